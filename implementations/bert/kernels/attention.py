"""Self-attention over a packed batch: every sequence attends to itself alone. One signature, several backends.

A backend maps qkv [T, 3, N, H], the forward pass (its sequences) and the dropout probability to the context [T, N, H].
What it leaves at tokens past cu_seqlens[-1] is undefined; batches for a graph have none (graph.py).

On a GPU each is tried once, before the clock, on BERT-large's shape, checked against the oracle and timed: versions of
the libraries differ in what they support and in how fast it is.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.core.env import ConfigError
from bert.core.process import root_cause
from bert.kernels import attention_cudnn, attention_triton, triton_support
from bert.kernels import attention_libraries as libraries
from bert.kernels.attention_libraries import needs, package
from bert.kernels.dropout import ForwardPass

Attention = Callable[[Tensor, ForwardPass, float], Tensor]


def sdpa_loop(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
    """One scaled_dot_product_attention a sequence: the oracle, and the fastest on a CPU (no masked-out work)."""
    offsets = forward_pass.cu_seqlens.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise([*offsets, qkv.shape[0]])]
    # Split, not sliced: the gradients of the parts become one by a concatenation, not each by a pass over all tokens.
    query, key, value = (part.split(lengths, dim=2) for part in qkv.permute(1, 2, 0, 3).unsqueeze(1))  # (1, N, L, H)
    contexts = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        for q, k, v in zip(query[:-1], key[:-1], value[:-1], strict=True)
        if q.shape[2]
    ]
    if lengths[-1]:
        contexts.append(torch.zeros_like(query[-1]))
    return torch.cat(contexts, dim=2)[0].transpose(0, 1)  # (T, N, H)


@dataclass(frozen=True)
class Backend:
    """An implementation. ``missing(device)`` says in a few words why it cannot run there, or None."""

    run: Attention
    missing: Callable[[torch.device], str | None]
    has_dropout: bool = True
    has_fp32: bool = False
    on_device: bool = True  # works without the host reading the lengths, so it can be part of a CUDA graph
    compiles: bool = False  # for each size of batch, so that auto takes it for CUDA graphs alone


_BACKENDS: dict[str, Backend] = {
    "cudnn": Backend(libraries.cudnn, needs((9, 0), libraries.cudnn_absent)),
    "cudnn_frontend": Backend(
        attention_cudnn.attention, needs((9, 0), package("cudnn", "nvidia-cudnn-frontend")), compiles=True
    ),
    "flash": Backend(libraries.flash, needs((8, 0), libraries.flash_absent)),
    "triton": Backend(attention_triton.attention, triton_support.missing, has_fp32=True),
    "flash_attn_2": Backend(libraries.flash_attn_2, needs((8, 0), package("flash_attn"))),
    "flash_attn_3": Backend(libraries.flash_attn_3, needs((9, 0), package("flash_attn_interface")), has_dropout=False),
    "flash_attn_4": Backend(libraries.flash_attn_4, needs((9, 0), package("flash_attn.cute")), has_dropout=False),
    "transformer_engine": Backend(libraries.transformer_engine, needs((8, 0), package("transformer_engine"))),
    "sdpa_loop": Backend(sdpa_loop, lambda device: None, has_fp32=True, on_device=False),
}
BACKENDS: dict[str, Attention] = {name: backend.run for name, backend in _BACKENDS.items()}


def check(name: str, device: torch.device, dropout: float, dtype: torch.dtype, in_graph: bool) -> None:
    """Raises ConfigError where the backend that ATTENTION names cannot do what the run needs."""
    if name == "auto":
        return
    if name not in _BACKENDS:
        raise ConfigError(f"ATTENTION={name}: expected auto or one of {', '.join(_BACKENDS)}")
    backend = _BACKENDS[name]
    if reason := backend.missing(device):
        raise ConfigError(f"ATTENTION={name} cannot run here: {reason}; use auto")
    if dtype == torch.float32 and not backend.has_fp32:
        raise ConfigError(f"ATTENTION={name} computes in bf16 or fp16: not with PRECISION=fp32")
    if dropout and not backend.has_dropout:
        raise ConfigError(
            f"ATTENTION={name} has no dropout, and attention_probs_dropout_prob is {dropout}: use auto, or set it to 0"
        )
    if in_graph and not backend.on_device:
        raise ConfigError(f"ATTENTION={name} reads the lengths on the host: set CUDA_GRAPH=0, or use auto")


def candidates(device: torch.device) -> dict[str, Attention]:
    """The backends with dropout that the device and the installed packages have, but for the oracle."""
    return {
        name: backend.run
        for name, backend in _BACKENDS.items()
        if backend.has_dropout and backend.on_device and backend.missing(device) is None
    }


def with_fallback(first: str, second: str) -> Attention:
    """Backend ``first``, until it raises: then one line says so, and ``second`` takes its place for good."""
    failed = False

    def run(qkv: Tensor, forward_pass: ForwardPass, dropout: float) -> Tensor:
        nonlocal failed
        if not failed:
            num_sites = forward_pass.sites.num_sites
            try:
                return _BACKENDS[first].run(qkv, forward_pass, dropout)
            except Exception as error:  # whatever a library raises
                failed = True
                forward_pass.sites.num_sites = num_sites
                reason = " ".join(str(error).split())[:300]
                print(f"attention: {first} failed, {second} takes its place: {reason}", file=sys.stderr, flush=True)
        return _BACKENDS[second].run(qkv, forward_pass, dropout)

    return run


# --- the choice of ATTENTION=auto ------------------------------------------------------------------------------------

LENGTHS = (512, 384, 128, 256, 200, 56, 512, 97, 415, 333, 179)  # 3,072 tokens: full, even and odd ones
NUM_HEADS, HEAD_SIZE, MAX_LENGTH, DROPOUT = 16, 64, 512, 0.1
NUM_REPEATS, NUM_TIMED = 8, 5  # of LENGTHS in the timed batch: 24,576 tokens; of passes in the timed graph
NUM_EMPTY = 3  # sequences of length 0 at the end, as those that fill up a graph's batch
TOLERANCE = 0.02  # of the norm: bf16 operands


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Milliseconds of a forward and a backward pass with dropout on 24,576 tokens, or why there are none."""

    name: str
    milliseconds: float | None
    problem: str = ""


def default_backend(device: torch.device, in_graph: bool = True) -> str:
    """The backend that ATTENTION=auto takes on a device: on a GPU the fastest that gives the oracle's results there."""
    return "sdpa_loop" if device.type != "cuda" else fastest(trials(device), in_graph) or "sdpa_loop"


def fallback(name: str, results: list[Trial]) -> str:
    """Backend to use if ``name`` fails at a run's sizes; empty if there is none, or none is needed."""
    return (fastest(results, in_graph=False) or "") if _BACKENDS[name].compiles else ""


def fastest(results: list[Trial], in_graph: bool = True) -> str | None:
    """Name of the fastest successful trial among the backends that auto may take, in a CUDA graph or without."""
    usable = [trial for trial in results if in_graph or not _BACKENDS[trial.name].compiles]
    good = [(trial.milliseconds, trial.name) for trial in usable if trial.milliseconds is not None]
    return min(good)[1] if good else None


@functools.cache
def trials(device: torch.device) -> list[Trial]:
    """Trials of all candidates on a GPU."""
    return try_backends(candidates(device), device)


def try_backends(backends: Mapping[str, Attention], device: torch.device) -> list[Trial]:
    """A trial of each; one that fails is reported, not raised. Random states are left as they were."""
    random_state = torch.cuda.get_rng_state(device)
    found = []
    for name, run in backends.items():
        try:
            problem = disagreement(run, device)
            found.append(Trial(name=name, milliseconds=None if problem else _time(run, device), problem=problem))
        except Exception as error:  # whatever a library raises for what it cannot do
            reason = " ".join(str(root_cause(error)).split())[:200]  # the end of a graph's capture raises another one
            found.append(Trial(name=name, milliseconds=None, problem=reason))
    torch.cuda.set_rng_state(random_state, device)
    return found


def offsets(repeats: int, device: torch.device) -> Tensor:
    """cu_seqlens of LENGTHS, ``repeats`` times, followed by NUM_EMPTY empty sequences."""
    ends = itertools.accumulate(LENGTHS * repeats + (0,) * NUM_EMPTY)
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def disagreement(run: Attention, device: torch.device) -> str:
    """Problem of a backend: context or gradient unlike the fp32 oracle's, or wrong dropout; empty if there is none.

    Dropout leaves the expected context as it is. For a given mask the context is linear in the values, so that
    the products of context and gradient and of values and their gradient agree, if both passes drop the same.
    """
    generator = torch.Generator(device).manual_seed(0)
    forward_pass = ForwardPass(offsets(1, device), MAX_LENGTH)
    shape = (sum(LENGTHS), 3, NUM_HEADS, HEAD_SIZE)
    qkv = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
    upstream = torch.randn(shape[0], *shape[2:], generator=generator, device=device).bfloat16()
    context = run(qkv, forward_pass, 0.0)
    (gradient,) = torch.autograd.grad(context, qkv, upstream)
    exact = qkv.detach().float().requires_grad_()
    expected = sdpa_loop(exact, forward_pass, 0.0)
    (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.float())
    for what, value, reference in (("context", context, expected), ("gradient", gradient, expected_gradient)):
        error = ((value.detach().float() - reference).norm() / reference.norm()).item()
        if not error <= TOLERANCE:  # nan included
            return f"its {what} differs from the oracle's by {error:.3g}"
    kept = context.detach().float()
    context = run(qkv, forward_pass, DROPOUT)
    (gradient,) = torch.autograd.grad(context, qkv, context.detach())
    dropped = context.detach().float()
    if not (dropped - kept).norm() > TOLERANCE * kept.norm():
        return "it drops nothing"
    share = ((dropped * kept).sum() / kept.square().sum()).item()
    if not abs(share - 1) <= TOLERANCE:
        return f"with dropout its context is on average {share:.3g} of what it is without"
    by_values = (qkv.detach()[:, 2].float() * gradient[:, 2].float()).sum()
    share = (by_values / dropped.square().sum()).item()
    return "" if abs(share - 1) <= TOLERANCE else f"its two passes drop different probabilities ({share:.3g})"


def _time(run: Attention, device: torch.device) -> float:
    """Milliseconds on the device, in a CUDA graph, so that it is also known to work in one."""
    cu_seqlens = offsets(NUM_REPEATS, device)
    tokens = NUM_REPEATS * sum(LENGTHS)
    qkv = torch.randn(tokens, 3, NUM_HEADS, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(tokens, NUM_HEADS, HEAD_SIZE, device=device, dtype=torch.bfloat16)

    def both_passes(count: int) -> None:
        forward_pass = ForwardPass(cu_seqlens, MAX_LENGTH)  # one for all, as for the layers of a model
        for _ in range(count):
            torch.autograd.grad(run(qkv, forward_pass, DROPOUT), qkv, gradient)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        both_passes(3)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        both_passes(NUM_TIMED)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / NUM_TIMED
