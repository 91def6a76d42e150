"""Which attention backend a run takes: settled once, before the model is built, on all ranks alike."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from bert import kernels
from bert.core.dist import World
from bert.core.env import ConfigError
from bert.kernels import assembly_check, attention, compile_once, triton_support
from bert.kernels.precision import Precision


class Settings(Protocol):
    """The settings of a run, as far as they bear on its kernels."""

    @property
    def kernels(self) -> kernels.Config:
        """Which kernels are asked for."""
        ...

    @property
    def numerics(self) -> Precision:
        """The precision of the run."""
        ...

    @property
    def uses_graph(self) -> bool:
        """Whether steps run as CUDA graphs."""
        ...


def choose(config: Settings, world: World) -> tuple[kernels.Config, str]:
    """The kernels with the attention backend named, and why it is that one, in words. A collective.

    Comes before any kernel runs: if a piece of assembly is wrong on a rank's GPU, all ranks do without.
    """
    if world.device.type == "cuda":
        compile_once.compilations()
    wrong = assembly_check.settle(world.device)
    if world.device.type == "cuda" and world.any(bool(wrong)):
        triton_support.do_without_assembly()
        pieces = "; ".join(f"{name}: {problem}" for name, problem in wrong.items()) or "on another rank's"
        choice, words = _choose_attention(config, world)
        return choice, f"{words}; all kernels do without assembly, which is wrong on this GPU ({pieces})"
    return _choose_attention(config, world)


def _choose_attention(config: Settings, world: World) -> tuple[kernels.Config, str]:
    """The attention backend and why.

    On a GPU ATTENTION=auto is the fastest backend on rank 0, if it works on every rank. Raises ConfigError where
    nothing works in a graph that is wanted.
    """
    choice, device = config.kernels, world.device
    if choice.attention != "auto":
        return choice, f"{choice.attention} (ATTENTION)"
    fallback = ""
    if device.type != "cuda":
        name, words = "sdpa_loop", "sdpa_loop (the device is a CPU)"
    elif config.numerics.dtype == torch.float32:
        name, words = "sdpa_loop", "sdpa_loop (the others compute in bf16 or fp16)"
    else:
        name, words = _agreed(config, world)
        fallback = attention.fallback(name, attention.trials(device))
    return dataclasses.replace(choice, attention=name, attention_fallback=fallback), words


def _agreed(config: Settings, world: World) -> tuple[str, str]:
    trials = {trial.name: trial for trial in attention.trials(world.device)}
    tried = "; ".join(f"{trial.name} {trial.problem or f'{trial.milliseconds:.2f} ms'}" for trial in trials.values())
    names = list(attention.BACKENDS)
    best = attention.default_backend(world.device, config.uses_graph)
    taken = names[world.broadcast_int(names.index(best))]
    if world.any(taken in trials and trials[taken].milliseconds is None):
        raise ConfigError(f"attention {taken} is the fastest on rank 0 and fails on another one: set ATTENTION")
    if taken == "sdpa_loop" and config.uses_graph:
        raise ConfigError(f"no attention backend works here ({tried}): set CUDA_GRAPH=0")
    return taken, f"{taken} (tried: {tried})"
