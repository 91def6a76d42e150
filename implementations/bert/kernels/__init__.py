"""Fused operations, one a file, each beside its plain-PyTorch reference.

``Config.choose`` names the attention backend; ``select`` binds every operation of the model to its reference or its
fused kernel. Both come once, before the model is built; nothing falls back silently afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bert.core.dist import World
from bert.core.env import ConfigError, env
from bert.kernels import (
    assembly_check,
    attention,
    bias_gelu,
    compile_once,
    cross_entropy,
    dropout_add_layer_norm,
    embeddings,
    triton_support,
)

# What the model calls; the optimizer's update (lamb) and where fp8 casts are done are chosen by the same variable.
OPERATIONS: dict[str, ModuleType] = {
    "embeddings": embeddings,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "bias_gelu": bias_gelu,
    "cross_entropy": cross_entropy,
}
FUSABLE = (*OPERATIONS, "lamb", "fp8_cast")
# The casts to fp8 are done inside the kernels whose results they are.
NEEDED: dict[str, tuple[str, ...]] = {"fp8_cast": ("dropout_add_layer_norm", "bias_gelu")}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which fused kernels and which attention backend a run uses."""

    fused: str = env("FUSED", "auto", doc="auto (what the hardware has), all, none, or names joined by commas")
    attention: str = env("ATTENTION", "auto", doc="attention backend; auto takes the best one of the hardware")
    attention_fallback: str = ""  # steps in where the backend that auto has taken fails; no variable of its own

    def names(self, device: torch.device) -> set[str]:
        """The operations that run fused on ``device``. Raises ConfigError for a name that is unknown or cannot run."""
        reason = triton_support.missing(device)
        if self.fused == "none" or (self.fused == "auto" and reason):
            return set()
        named = FUSABLE if self.fused in ("auto", "all") else [name.strip() for name in self.fused.split(",")]
        wanted = set(named)
        if unknown := sorted(wanted - set(FUSABLE)):
            raise ConfigError(f"FUSED names {', '.join(unknown)}: known are all, none, auto, {', '.join(FUSABLE)}")
        if reason:
            raise ConfigError(f"FUSED asks for {', '.join(sorted(wanted))}, but {reason}: set FUSED=auto or FUSED=none")
        for name in wanted & NEEDED.keys():
            if absent := [other for other in NEEDED[name] if other not in wanted]:
                raise ConfigError(f"FUSED={name} requires {' and '.join(absent)}: add that, or drop {name}")
        return wanted

    def describe(self, device: torch.device) -> str:
        """Line of ``--check``: the fused kernels, the plain ones, or why none is fused."""
        fused = self.names(device)
        if not fused:
            reason = "FUSED=none" if self.fused == "none" else triton_support.missing(device)
            return f"plain PyTorch ({reason})"
        plain = [name for name in FUSABLE if name not in fused]
        text = f"Triton for {', '.join(name for name in FUSABLE if name in fused)}"
        return f"{text}; plain PyTorch for {', '.join(plain)}" if plain else text

    def choose(self, dtype: torch.dtype, in_graph: bool, world: World) -> tuple[Config, str]:
        """Settings with the attention backend resolved, equal on all ranks, and the reason as text. A collective.

        On a GPU ATTENTION=auto is the fastest backend on rank 0, if it works on every rank. Raises ConfigError where
        no backend works in the CUDA graph. Must precede the first kernel: if a piece of assembly is wrong on any
        rank's GPU, all ranks do without assembly.
        """
        device, note = world.device, ""
        if device.type == "cuda":
            compile_once.compilations()
            wrong = assembly_check.check(device)
            if world.any(bool(wrong)):
                triton_support.do_without_assembly()
                pieces = "; ".join(f"{name}: {problem}" for name, problem in wrong.items()) or "on another rank's"
                note = f"; all kernels do without assembly, which is wrong on this GPU ({pieces})"
        if self.attention != "auto":
            return self, f"{self.attention} (ATTENTION){note}"
        name, fallback = "sdpa_loop", ""
        if device.type != "cuda":
            words = "sdpa_loop (the device is a CPU)"
        elif dtype == torch.float32:
            words = "sdpa_loop (the others compute in bf16 or fp16)"
        else:
            results = attention.trials(device)
            tried = "; ".join(f"{trial.name} {trial.problem or f'{trial.milliseconds:.2f} ms'}" for trial in results)
            backends = list(attention.BACKENDS)
            best = attention.default_backend(device, in_graph)
            name = backends[world.broadcast_int(backends.index(best))]
            if world.any(any(trial.name == name and trial.milliseconds is None for trial in results)):
                raise ConfigError(f"attention {name} is the fastest on rank 0 and fails on another one: set ATTENTION")
            if name == "sdpa_loop" and in_graph:
                raise ConfigError(f"no attention backend works here ({tried}): set CUDA_GRAPH=0")
            words, fallback = f"{name} (tried: {tried})", attention.fallback(name, results)
        return dataclasses.replace(self, attention=name, attention_fallback=fallback), words + note


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations of one model, bound. Signatures: the ``reference`` of each file.

    fp8_cast: kernels cast their results to fp8 for the next product where the scale is known in advance.
    """

    embeddings: Callable[..., Tensor]
    dropout_add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    bias_gelu: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    attention: attention.Attention
    fp8_cast: bool


def select(config: Config, device: torch.device) -> Kernels:
    """Binds every operation for ``device``. Raises ConfigError for what this hardware cannot run."""
    name, second = config.attention, config.attention_fallback
    if name == "auto":
        name = attention.default_backend(device)
        second = attention.fallback(name, attention.trials(device)) if device.type == "cuda" else ""
    if name not in attention.BACKENDS:
        raise ConfigError(f"ATTENTION={config.attention}: expected auto or one of {', '.join(attention.BACKENDS)}")
    fused = config.names(device)
    bound = {name: module.fused if name in fused else module.reference for name, module in OPERATIONS.items()}
    run = attention.with_fallback(name, second) if second else attention.BACKENDS[name]
    return Kernels(attention=run, fp8_cast="fp8_cast" in fused, **bound)
