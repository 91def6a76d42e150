"""Fused operations, one per file, each beside its plain PyTorch reference.

``KernelsConfig.resolve_attention`` picks the attention backend; ``bind_kernels`` binds every operation of
the model to its reference or its fused kernel. Both are called once, before the model is built;
nothing falls back silently afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bert.core.dist import World
from bert.kernels import attention
from bert.kernels.attention import benchmark
from bert.kernels.operations import (
    bias_gelu,
    cross_entropy,
    dropout_add_layer_norm,
    embeddings,
)
from bert.kernels.support import triton_support
from common.env import ConfigError, env

# The model's operations; FUSED also selects the optimizer's update (lamb) and the place of fp8
# casts.
OPERATIONS: dict[str, ModuleType] = {
    "embeddings": embeddings,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "bias_gelu": bias_gelu,
    "cross_entropy": cross_entropy,
}
FUSABLE = (*OPERATIONS, "lamb", "fp8_cast")
# Fused kernels required by others: fp8_cast is done inside the kernels whose results are cast.
NEEDED: dict[str, tuple[str, ...]] = {
    "fp8_cast": ("dropout_add_layer_norm", "bias_gelu")
}


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Which fused kernels and which attention backend a run uses."""

    fused: str = env(
        "FUSED",
        "auto",
        "auto (what the hardware supports), all, none, or names joined by commas",
    )
    attention: str = env(
        "ATTENTION", "auto", "attention backend; auto: the fastest on the hardware"
    )
    # Replaces the backend chosen by auto if that fails; has no variable.
    attention_fallback: str = ""

    def names(self, device: torch.device) -> set[str]:
        """The operations that run fused on ``device``. Raises ConfigError for a name that is
        unknown or cannot run.
        """
        reason = triton_support.missing(device)
        if self.fused == "none" or (self.fused == "auto" and reason):
            return set()
        wanted = {name.strip() for name in self.fused.split(",")}
        if self.fused in ("auto", "all"):
            wanted = set(FUSABLE)
        if unknown := sorted(wanted - set(FUSABLE)):
            raise ConfigError(
                f"FUSED names {', '.join(unknown)}: known are all, none or auto alone, {', '.join(FUSABLE)}"
            )
        if reason:
            raise ConfigError(
                f"FUSED asks for {', '.join(sorted(wanted))}, but {reason}: set FUSED=auto or FUSED=none"
            )
        for name in wanted & NEEDED.keys():
            if left_out := [other for other in NEEDED[name] if other not in wanted]:
                raise ConfigError(
                    f"FUSED={name} requires {' and '.join(left_out)}: add that, or drop {name}"
                )
        return wanted

    def describe(self, device: torch.device) -> str:
        """Text for ``--check``: the fused and the plain operations, or why none is fused."""
        names = self.names(device)
        if not names:
            reason = triton_support.missing(device)
            return f"plain PyTorch ({reason if self.fused != 'none' else 'FUSED=none'})"
        fused, plain = (
            ", ".join(name for name in FUSABLE if (name in names) is is_fused)
            for is_fused in (True, False)
        )
        return f"Triton for {fused}{plain and f'; plain PyTorch for {plain}'}"

    def resolve_attention(
        self, model: benchmark.Model, dtype: torch.dtype, in_graph: bool, world: World
    ) -> tuple[KernelsConfig, str]:
        """Settings with the attention backend resolved, equal on all ranks, and the reason as text.
        A collective.

        On a GPU ATTENTION=auto is the fastest backend that works on every rank. Raises ConfigError
        if none works in the CUDA graph, or not the one named.
        """
        device, name = world.device, self.attention
        plain = dataclasses.replace(self, attention="sdpa_loop")
        if name == "auto" and device.type != "cuda":
            return plain, "sdpa_loop (the device is a CPU)"
        if name == "auto" and dtype == torch.float32:
            return plain, "sdpa_loop (the others compute in bf16 or fp16)"
        named = f"{name} (ATTENTION)"
        # A CPU has no graphs or libraries to try, and the reference runs everywhere.
        if device.type != "cuda" or name == "sdpa_loop":
            return self, named
        heads = benchmark.Heads(
            num_heads=model.num_attention_heads, head_size=model.head_size, dtype=dtype
        )
        results = benchmark.benchmark_backends(device, heads, name)
        # Two views: all ranks must choose alike, the reason of a failure is this rank's.
        of_all = benchmark.agreed(results, world)
        if name != "auto":
            problem = benchmark.problem_of(name, of_all)
            if benchmark.problem_of(name, results):
                problem = f"fails on this GPU ({problem})"
            if problem:
                raise ConfigError(
                    f"attention {name} {problem}: set ATTENTION to another one, or auto"
                )
            return self, named
        tried = "; ".join(
            f"{trial.name} {trial.problem or f'{trial.milliseconds:.2f} ms'}"
            for trial in of_all
        )
        # sdpa_loop reads lengths on the host, so not in a graph.
        name = benchmark.fastest(of_all, in_graph) or "sdpa_loop"
        if name == "sdpa_loop" and in_graph:
            raise ConfigError(
                f"no attention backend works here ({tried}): set CUDA_GRAPH=0, or ATTENTION"
            )
        fallback = benchmark.fallback(name, of_all)
        chosen = dataclasses.replace(self, attention=name, attention_fallback=fallback)
        return chosen, f"{name} (tried: {tried})"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations of one model, bound. Signatures: the ``reference`` of each file.

    fp8_cast: kernels cast their results to fp8 for the next product if the scale is known in
    advance.
    """

    embeddings: Callable[..., Tensor]
    dropout_add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    bias_gelu: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    attention: attention.Attention
    fp8_cast: bool


def bind_kernels(config: KernelsConfig, device: torch.device) -> Kernels:
    """Binds every operation for ``device``. Raises ConfigError for what this hardware cannot
    run.
    """
    name, second = config.attention, config.attention_fallback
    fused = config.names(device)
    if name == "auto":  # outside of a run, where no other rank need agree
        results = benchmark.benchmark_backends(device) if device.type == "cuda" else []
        name = benchmark.fastest(results) or "sdpa_loop"
        second = benchmark.fallback(name, results)
    bound = {
        operation: module.fused if operation in fused else module.reference
        for operation, module in OPERATIONS.items()
    }
    # Only a backend that compiles a plan for each size may fail at a run's sizes, and has a second.
    run = attention.backend_of(name).run
    if second:
        run = attention.with_fallback(name, second)
    return Kernels(attention=run, fp8_cast="fp8_cast" in fused, **bound)
