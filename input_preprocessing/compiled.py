"""Compilation of the inner loops: the trainer's own, under the stages' names."""

from bert.data.compiled import compiled as compiled
