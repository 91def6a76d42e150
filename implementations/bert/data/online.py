"""Packs sequences into rows as they come, from a small buffer of them.

A row starts with the sequence that has waited longest and is filled up exactly where the buffer allows it: by one
sequence, by two, by three, tried in that order; else by the longest that fits, and so on. Starting with the oldest
bounds the wait of every sequence to about two buffers, and on Wikipedia's lengths fills three slots a row to 99.9%
(`bench/packing.py`): the buffer stays a fair sample of all lengths, whereas a packer that takes the longest first
leaves itself the middling ones. Deterministic: rows depend on the order of the sequences only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bert.data.compiled import array, compiled_for, scalar
from bert.data.format import DataError
from bert.data.packing import Integers

_NEXT, _OLDER, _NEWER, _FILE, _SEQUENCE, _LENGTH = range(6)  # columns of a node; NEXT: of its length, or free
_HEAD, _TAIL, _COUNT = range(3)  # columns of a length's queue
_OLDEST, _NEWEST, _FREE, _TAKEN = range(4)  # entries of the state: nodes, and sequences read of the piece at hand
_NUMBER, _INT64, _MATRIX = scalar("int64"), array("int64"), array("int64", ndim=2)


class OnlinePacker:
    """Rows of at most ``max_tokens`` tokens and ``max_sequences`` sequences from an endless stream of sequences."""

    def __init__(
        self,
        stream: Iterator[tuple[int, np.ndarray]],
        lengths_of: Callable[[int, np.ndarray], np.ndarray],
        max_tokens: int,
        max_sequences: int,
        buffer_size: int,
    ) -> None:
        """stream: (file, sequences in it) after another; lengths_of(file, sequences): their tokens."""
        self.stream, self.lengths_of = stream, lengths_of
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self._file = 0
        self._sequences: Integers = np.zeros(0, np.int64)
        self._lengths: Integers = np.zeros(0, np.int64)
        self._nodes = np.full((buffer_size, 6), -1, dtype=np.int64)
        self._nodes[:, _NEXT] = np.arange(1, buffer_size + 1)  # the free list
        self._nodes[-1, _NEXT] = -1
        self._queues = np.full((max_tokens + 1, 3), -1, dtype=np.int64)
        self._queues[:, _COUNT] = 0
        self._state = np.array([-1, -1, 0, 0], dtype=np.int64)

    def rows(self, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next rows: file and number in it of every sequence [S], and row offsets [num_rows + 1]."""
        chosen = np.empty((num_rows * self.max_sequences, 2), dtype=np.int64)
        offsets = np.zeros(num_rows + 1, dtype=np.int64)
        limits = np.array([self.max_tokens, self.max_sequences, num_rows], dtype=np.int64)
        done = 0
        while done < num_rows:
            done = _pack_rows(
                self._nodes, self._queues, self._state, limits, self._file, self._sequences, self._lengths,
                done, chosen, offsets,
            )  # fmt: skip
            if done < num_rows:
                self._next_piece()
        return chosen[: offsets[-1], 0], chosen[: offsets[-1], 1], offsets

    def _next_piece(self) -> None:
        file, sequences = next(self.stream)
        lengths = self.lengths_of(file, sequences)
        if lengths.size and not 1 <= lengths.min() <= lengths.max() <= self.max_tokens:
            raise DataError(
                f"training file {file}: sequences of {lengths.min()} to {lengths.max()} tokens do not fit rows of "
                f"{self.max_tokens}; verify the data, or set MAX_SEQ_LENGTH"
            )
        self._file, self._state[_TAKEN] = file, 0
        self._sequences = np.ascontiguousarray(sequences, dtype=np.int64)
        self._lengths = np.ascontiguousarray(lengths, dtype=np.int64)


@compiled_for(_MATRIX, _MATRIX, _INT64, _NUMBER, _NUMBER, _NUMBER)
def _insert(nodes, queues, state, file, sequence, length):  # type: ignore[no-untyped-def]
    """Puts a sequence into the buffer, as the newest."""
    node = state[_FREE]
    state[_FREE] = nodes[node, _NEXT]
    nodes[node, _NEXT] = -1
    nodes[node, _OLDER] = state[_NEWEST]
    nodes[node, _NEWER] = -1
    nodes[node, _FILE] = file
    nodes[node, _SEQUENCE] = sequence
    nodes[node, _LENGTH] = length
    if state[_NEWEST] >= 0:
        nodes[state[_NEWEST], _NEWER] = node
    else:
        state[_OLDEST] = node
    state[_NEWEST] = node
    if queues[length, _COUNT]:
        nodes[queues[length, _TAIL], _NEXT] = node
    else:
        queues[length, _HEAD] = node
    queues[length, _TAIL] = node
    queues[length, _COUNT] += 1


@compiled_for(_MATRIX, _MATRIX, _INT64, _NUMBER)
def _remove(nodes, queues, state, length):  # type: ignore[no-untyped-def]
    """Takes the oldest sequence of a length out of the buffer; its node."""
    node = queues[length, _HEAD]
    queues[length, _HEAD] = nodes[node, _NEXT]
    queues[length, _COUNT] -= 1
    older, newer = nodes[node, _OLDER], nodes[node, _NEWER]
    if older >= 0:
        nodes[older, _NEWER] = newer
    else:
        state[_OLDEST] = newer
    if newer >= 0:
        nodes[newer, _OLDER] = older
    else:
        state[_NEWEST] = older
    nodes[node, _NEXT] = state[_FREE]
    state[_FREE] = node
    return node


@compiled_for(_MATRIX, _NUMBER, _NUMBER)
def _next_length(queues, space, slots):  # type: ignore[no-untyped-def]
    """Length to put into a row with `space` tokens and `slots` sequences left: the longest of an exact fill, else the
    longest that fits; 0 where none does."""
    if queues[space, _COUNT]:
        return space
    if slots >= 2:
        for short in range(space // 2, 0, -1):
            long = space - short
            if queues[short, _COUNT] > (short == long) and queues[long, _COUNT]:
                return long
    if slots >= 3:
        for first in range(space - 2, (space - 1) // 3, -1):
            if queues[first, _COUNT]:
                rest = space - first
                for second in range(min(first, rest - 1), (rest - 1) // 2, -1):
                    third = rest - second
                    if (
                        queues[second, _COUNT] > (second == first)
                        and queues[third, _COUNT] > (third == first) + (third == second)
                    ):  # fmt: skip
                        return first
    length = space
    while length and not queues[length, _COUNT]:
        length -= 1
    return length


@compiled_for(_MATRIX, _MATRIX, _INT64, _INT64, _NUMBER, _INT64, _INT64, _NUMBER, _MATRIX, _INT64)
def _pack_rows(nodes, queues, state, limits, file, sequences, lengths, done, chosen, offsets):  # type: ignore[no-untyped-def]
    """Makes rows from `done` on until there are enough or the buffer is short of sequences; how many there are then."""
    max_tokens, max_sequences, num_rows = limits
    while done < num_rows:
        while state[_FREE] >= 0 and state[_TAKEN] < sequences.size:
            _insert(nodes, queues, state, file, sequences[state[_TAKEN]], lengths[state[_TAKEN]])
            state[_TAKEN] += 1
        if state[_FREE] >= 0:
            return done
        end, space, slots = offsets[done], max_tokens, max_sequences
        length = nodes[state[_OLDEST], _LENGTH]
        while length:
            node = _remove(nodes, queues, state, length)
            chosen[end, 0] = nodes[node, _FILE]
            chosen[end, 1] = nodes[node, _SEQUENCE]
            end += 1
            space -= length
            slots -= 1
            length = _next_length(queues, space, slots) if slots and space else 0
        done += 1
        offsets[done] = end
    return done
