"""Fused operations, one per file, each beside its plain PyTorch reference.

``Config.choose`` resolves the attention backend; ``select`` binds every operation of the model to its reference or its
fused kernel. Both are called once, before the model is built; nothing falls back silently afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bert.core.dist import World
from bert.kernels import (
    attention,
    bias_gelu,
    cross_entropy,
    dropout_add_layer_norm,
    embeddings,
    feed_forward,
    trials,
    triton_support,
)
from common.env import ConfigError, env

# The model's operations; FUSED also selects the optimizer's update (lamb) and the place of fp8 casts.
OPERATIONS: dict[str, ModuleType] = {
    "embeddings": embeddings,
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "bias_gelu": bias_gelu,
    "cross_entropy": cross_entropy,
}
FUSABLE = (*OPERATIONS, "lamb", "fp8_cast")
# By QuACK, if installed and found right and faster by trials: in 16 bits and in fp8. Values: why it cannot run.
QUACK = {
    trials.FEED_FORWARD: feed_forward.missing,
    trials.FP8_FEED_FORWARD: feed_forward.missing_in_fp8,
}
# Fused kernels required by others: fp8_cast is done inside the kernels whose results are cast.
NEEDED: dict[str, tuple[str, ...]] = {
    "fp8_cast": ("dropout_add_layer_norm", "bias_gelu"), trials.FP8_FEED_FORWARD: ("fp8_cast",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which fused kernels and which attention backend a run uses."""

    fused: str = env(
        "FUSED",
        "auto",
        doc="auto (what the hardware supports), all, none, or names joined by commas",
    )
    attention: str = env(
        "ATTENTION", "auto", doc="attention backend; auto: the fastest on the hardware"
    )
    attention_fallback: str = (
        ""  # replaces the backend chosen by auto if that fails; has no variable
    )

    def names(self, device: torch.device) -> set[str]:
        """The operations that run fused on ``device``. Raises ConfigError for a name that is unknown or cannot run."""
        reason = triton_support.missing(device)
        if self.fused == "none" or (self.fused == "auto" and reason):
            return set()
        absent = {name: why for name, missing in QUACK.items() if (why := missing(device))}
        known = (*FUSABLE, *QUACK)
        wanted = {name.strip() for name in self.fused.split(",")}
        if self.fused in ("auto", "all"):
            wanted = set(known) - set(absent)
        if unknown := sorted(wanted - set(known)):
            raise ConfigError(
                f"FUSED names {', '.join(unknown)}: known are all, none, auto, {', '.join(known)}"
            )
        if reason:
            raise ConfigError(
                f"FUSED asks for {', '.join(sorted(wanted))}, but {reason}: set FUSED=auto or FUSED=none"
            )
        for name in wanted & absent.keys():
            raise ConfigError(f"FUSED names {name}, but {absent[name]}: drop it")
        for name in wanted & NEEDED.keys():
            if left_out := [other for other in NEEDED[name] if other not in wanted]:
                raise ConfigError(
                    f"FUSED={name} requires {' and '.join(left_out)}: add that, or drop {name}"
                )
        return wanted

    def describe(self, device: torch.device) -> str:
        """Text for ``--check``: the fused and the plain operations, or why none is fused."""
        fused = self.names(device)
        if not fused:
            reason = "FUSED=none" if self.fused == "none" else triton_support.missing(device)
            return f"plain PyTorch ({reason})"
        plain = [name for name in FUSABLE if name not in fused]
        text = f"Triton for {', '.join(name for name in FUSABLE if name in fused)}"
        if by_quack := [name for name in QUACK if name in fused]:
            text += f"; QuACK for {', '.join(by_quack)}"
        return f"{text}; plain PyTorch for {', '.join(plain)}" if plain else text

    def choose(
        self, model: trials.Model, dtype: torch.dtype, in_graph: bool, world: World
    ) -> tuple[Config, str]:
        """Settings with the attention backend resolved, equal on all ranks, and the reason as text. A collective.

        On a GPU ATTENTION=auto is the fastest backend on rank 0, if it works on every rank. Raises ConfigError if no
        backend works in the CUDA graph, or not the one named. Must precede the first kernel: if inline assembly is
        wrong on any rank's GPU, all ranks disable it.
        """
        device, name, fallback = world.device, self.attention, ""
        words = f"{name} (ATTENTION)"
        if name == "auto" and (device.type != "cuda" or dtype == torch.float32):
            why = (
                "the device is a CPU"
                if device.type != "cuda"
                else "the others compute in bf16 or fp16"
            )
            name, words = "sdpa_loop", f"sdpa_loop ({why})"
        if device.type != "cuda":
            return dataclasses.replace(self, attention=name), words
        heads = trials.Heads(
            num_heads=model.num_attention_heads, head_size=model.head_size, dtype=dtype
        )
        results = trials.trials(device, heads, name)
        if name == "auto":
            shown = [trial for trial in results if trial.name not in (trials.ASSEMBLY, *QUACK)]
            tried = "; ".join(
                f"{one.name} {one.problem or f'{one.milliseconds:.2f} ms'}" for one in shown
            )
            backends = list(attention.BACKENDS)
            name = backends[
                world.broadcast_int(
                    backends.index(trials.fastest(results, in_graph) or "sdpa_loop")
                )
            ]
            if name == "sdpa_loop" and in_graph:
                raise ConfigError(
                    f"no attention backend works here ({tried}): set CUDA_GRAPH=0, or ATTENTION"
                )
            words, fallback = f"{name} (tried: {tried})", trials.fallback(name, results)
        problem = trials.problem_of(name, results)
        if world.any(bool(problem)):
            where = f"fails on this GPU ({problem})" if problem else "fails on another rank's GPU"
            raise ConfigError(f"attention {name} {where}: set ATTENTION to another one, or auto")
        wrong = trials.problem_of(trials.ASSEMBLY, results)
        if world.any(bool(wrong)):
            triton_support.do_without_assembly()
            words += f"; all kernels do without assembly, wrong on this GPU ({wrong or 'no: on another one'})"
        fused, used = self.fused, self.names(device)
        for one in QUACK:
            problem = trials.problem_of(one, results)
            if one in used and world.any(bool(problem)):
                problem = problem or "on another rank's GPU"
                if self.fused not in ("auto", "all"):
                    raise ConfigError(
                        f"FUSED names {one}, which trials advise against ({problem}): drop it"
                    )
                used -= {one}
                fused = ",".join(sorted(used))
                words += f"; {one} in separate kernels (QuACK's: {problem})"
        return dataclasses.replace(
            self, fused=fused, attention=name, attention_fallback=fallback
        ), words


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations of one model, bound. Signatures: the ``reference`` of each file.

    fp8_cast: kernels cast their results to fp8 for the next product if the scale is known in advance;
    fp8_feed_forward: those of the feed-forward inside its products, with GELU (quack_epilogues.py); feed_forward: both
    products and the GELU between them as one operation, in 16 bits; None: separately.
    """

    embeddings: Callable[..., Tensor]
    dropout_add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    bias_gelu: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    attention: attention.Attention
    fp8_cast: bool
    fp8_feed_forward: bool = False
    feed_forward: Callable[..., Tensor] | None = None


def select(config: Config, device: torch.device) -> Kernels:
    """Binds every operation for ``device``. Raises ConfigError for what this hardware cannot run."""
    name, second, fused = config.attention, config.attention_fallback, config.names(device)
    if name == "auto":
        name = trials.default_backend(device)
        if device.type == "cuda":
            second = trials.fallback(name, trials.trials(device))
            fused -= {one for one in QUACK if trials.problem_of(one, trials.trials(device))}
    if name not in attention.BACKENDS:
        raise ConfigError(
            f"ATTENTION={config.attention}: expected auto or one of {', '.join(attention.BACKENDS)}"
        )
    bound = {
        name: module.fused if name in fused else module.reference
        for name, module in OPERATIONS.items()
    }
    run = attention.with_fallback(name, second) if second else attention.BACKENDS[name]
    both = feed_forward.fused if trials.FEED_FORWARD in fused else None
    in_fp8 = trials.FP8_FEED_FORWARD in fused
    return Kernels(
        attention=run, fp8_cast="fp8_cast" in fused, fp8_feed_forward=in_fp8, feed_forward=both, **bound
    )  # fmt: skip
