"""Which attention backend to take on a GPU: each is tried on BERT-large's shape, checked against the oracle and timed.

Done once, before the clock: versions of the libraries differ in what they support and in how fast it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bert.core.process import root_cause
from bert.kernels.forward_pass import ForwardPass

Attention = Callable[[Tensor, ForwardPass, float], Tensor]

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


def offsets(repeats: int, device: torch.device) -> Tensor:
    """cu_seqlens of LENGTHS, so many times, and of NUM_EMPTY empty sequences."""
    ends = itertools.accumulate(LENGTHS * repeats + (0,) * NUM_EMPTY)
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def trials(candidates: Mapping[str, Attention], oracle: Attention, device: torch.device) -> list[Trial]:
    """Tries every candidate; one that fails is reported, not raised. Random states are left as they were."""
    random_state = torch.cuda.get_rng_state(device)
    found = []
    for name, run in candidates.items():
        try:
            problem = disagreement(run, oracle, device)
            found.append(Trial(name=name, milliseconds=None if problem else _time(run, device), problem=problem))
        except Exception as error:  # whatever a library raises for what it cannot do
            reason = " ".join(str(root_cause(error)).split())[:200]  # the end of a graph's capture raises another one
            found.append(Trial(name=name, milliseconds=None, problem=reason))
    torch.cuda.set_rng_state(random_state, device)
    return found


def fastest(results: list[Trial]) -> str | None:
    """Name of the fastest trial that went well."""
    good = [(trial.milliseconds, trial.name) for trial in results if trial.milliseconds is not None]
    return min(good)[1] if good else None


def disagreement(run: Attention, oracle: Attention, device: torch.device) -> str:
    """How the backend's context or gradient differs from the oracle's in fp32; empty: not."""
    generator = torch.Generator(device).manual_seed(0)
    forward_pass = ForwardPass(offsets(1, device), MAX_LENGTH)
    shape = (sum(LENGTHS), 3, NUM_HEADS, HEAD_SIZE)
    qkv = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
    gradient = torch.randn(shape[0], *shape[2:], generator=generator, device=device).bfloat16()
    context = run(qkv, forward_pass, 0.0)
    context.backward(gradient)
    exact = qkv.detach().float().requires_grad_()
    expected = oracle(exact, forward_pass, 0.0)
    expected.backward(gradient.float())
    assert qkv.grad is not None
    assert exact.grad is not None
    for what, value, reference in (("context", context, expected), ("gradient", qkv.grad, exact.grad)):
        error = ((value.detach().float() - reference).norm() / reference.norm()).item()
        if not error <= TOLERANCE:  # nan included
            return f"its {what} differs from the oracle's by {error:.3g}"
    return _dropout_problem(run, qkv, context.detach(), forward_pass)


def _dropout_problem(run: Attention, qkv: Tensor, without: Tensor, forward_pass: ForwardPass) -> str:
    """What is wrong with the backend's dropout; ``without``: its context without. empty: nothing.

    Dropout leaves the expected context as it is. For a given mask the context is linear in the values, so that
    the products of context and gradient and of values and their gradient agree, if both passes drop the same.
    """
    context = run(qkv, forward_pass, DROPOUT)
    (gradient,) = torch.autograd.grad(context, qkv, context.detach())
    dropped, kept = context.detach().float(), without.float()
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
