"""Trials, before the clock and in a separate process, of code that may fail on a GPU: inline assembly, attention
backends, QuACK's feed-forward.

Versions of the libraries differ in support and speed. Each backend runs on a model's heads, is checked against the
reference and timed in a CUDA graph. A failure that breaks the CUDA context (an unfinished capture, an illegal access)
ends with its process; a hang is ended at a time limit. It costs that backend, never the run.

The results are cached beside the compiled kernels, by GPU, driver, PyTorch, Triton, heads, and these sources.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.kernels import (
    assembly_check,
    attention,
    bias_gelu,
    feed_forward,
    fp8,
    fp8_feed_forward,
    triton_support,
)
from bert.kernels.attention import Attention
from bert.kernels.dropout import ForwardPass
from bert.kernels.fp8_cast import cast_rows
from bert.kernels.precision import LOW_PRECISION
from bert.kernels.recording import record, warm_stream
from common.files import text_of, write_text
from common.process import hard_exit, root_cause

ASSEMBLY, FEED_FORWARD, FP8_FEED_FORWARD = "assembly", "feed_forward", "fp8_feed_forward"
LENGTHS = (
    512,
    384,
    128,
    256,
    200,
    56,
    512,
    97,
    415,
    333,
    179,
)  # 3,072 tokens: full, even and odd ones
MAX_LENGTH, DROPOUT = 512, 0.1
NUM_REPEATS, NUM_TIMED = (
    8,
    5,
)  # of LENGTHS in the timed batch: 24,576 tokens; of passes in the timed graph
NUM_EMPTY = 3  # sequences of length 0 at the end, as in a graph's padded batch
TOLERANCE = 0.02  # of the norm: bf16 operands
LIMIT, TO_START = 60, 60  # seconds of a trial, and for its process to import PyTorch
BUSY = "busy or unavailable"  # in the driver's error
HANGS, TIMEOUT, MARK = (
    f"ran past {LIMIT} s",
    "Timeout (",
    b"bert-trial ",
)  # TIMEOUT: faulthandler's; MARK: of results
CHILD = "import sys; sys.path[:0] = sys.argv[2:]; from bert.kernels import trials; trials.main(sys.argv[1])"


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A model's attention heads, and the type of its activations."""

    num_heads: int = 16
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16


BERT_LARGE = Heads()


class Model(Protocol):
    """Interface of BertConfig, which cannot be imported here."""

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def head_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Milliseconds of a forward and a backward pass with dropout on 24,576 tokens, or why the trial failed.

    Trials of the assembly and the feed-forward have no time; being slower is a problem of the latter.
    """

    name: str
    milliseconds: float | None = None
    problem: str = ""


def default_backend(device: torch.device) -> str:
    """The backend for ATTENTION=auto on a device: on a GPU the fastest with the reference's results."""
    return "sdpa_loop" if device.type != "cuda" else fastest(trials(device)) or "sdpa_loop"


def fallback(name: str, results: list[Trial]) -> str:
    """Backend to use if ``name`` fails at a run's sizes; empty if there is none, or it is not needed."""
    return (fastest(results, in_graph=False) or "") if name in attention.COMPILING else ""


def fastest(results: list[Trial], in_graph: bool = True) -> str | None:
    """Name of the fastest successful trial among the backends for auto, in a CUDA graph or without."""
    usable = [trial for trial in results if in_graph or trial.name not in attention.COMPILING]
    good = [(trial.milliseconds, trial.name) for trial in usable if trial.milliseconds is not None]
    return min(good)[1] if good else None


# --- parent process --------------------------------------------------------------------------------------------------


@functools.cache
def trials(device: torch.device, heads: Heads = BERT_LARGE, name: str = "auto") -> list[Trial]:
    """Trials on a GPU of the assembly, and of a backend or all those for auto; cached results if there are any.

    If a piece of assembly is wrong, assembly is disabled in this process.
    """
    names = [ASSEMBLY] if triton_support.supported(device) else []
    names += (
        list(attention.candidates(device))
        if name == "auto"
        else [name]
        if name in attention.TRIABLE
        else []
    )
    if heads.dtype in LOW_PRECISION:
        names += [FEED_FORWARD] if feed_forward.missing(device) is None else []
        names += [FP8_FEED_FORWARD] if feed_forward.missing_in_fp8(device) is None else []
    path = _cache_file(device, heads, names)
    try:
        found = [Trial(**trial) for trial in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):  # no results yet, or a damaged file
        found = attempts(names, device, heads)
        if any(
            trial.milliseconds is not None for trial in found
        ):  # if all fail the cause may lie elsewhere
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps([asdict(trial) for trial in found], indent=1) + "\n")
    if problem_of(ASSEMBLY, found):
        triton_support.do_without_assembly()
    return found


def problem_of(name: str, results: list[Trial]) -> str:
    """Why a trial failed; empty if it did not, or was not run."""
    return next((trial.problem for trial in results if trial.name == name), "")


def _cache_file(device: torch.device, heads: Heads, names: list[str]) -> Path:
    """File for the results, named by all that they depend on."""
    driver = text_of(Path("/proc/driver/nvidia/version"))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    triton, versions = (
        triton_support.triton,
        (torch.__version__, torch.version.cuda, torch.backends.cudnn.version()),
    )
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    asked = repr((gpu, driver, versions, getattr(triton, "__version__", ""), heads, names, sources))
    return cache_folder() / f"trials-{hashlib.sha256(asked.encode()).hexdigest()[:24]}.json"


def cache_folder() -> Path:
    """Triton's folder of compiled kernels, set by KERNEL_CACHE; without one nothing is cached."""
    knobs = getattr(triton_support.triton, "knobs", None)
    return Path(knobs.cache.dir if knobs else os.devnull)


def attempts(names: list[str], device: torch.device, heads: Heads) -> list[Trial]:
    """A trial of each, in other processes; after a failed trial the next process continues.

    In this process on a GPU in compute mode EXCLUSIVE_PROCESS.
    """
    found: list[Trial] = []
    while len(found) < len(names):
        asked = {
            "names": names[len(found) :], "device": str(device), "assembly": not problem_of(ASSEMBLY, found),
            "heads": [heads.num_heads, heads.head_size, str(heads.dtype).removeprefix("torch.")],
        }  # fmt: skip
        found += _attempts(asked)
        if BUSY in found[-1].problem:  # EXCLUSIVE_PROCESS: no other process can open the GPU
            return [attempt(name, device, heads) for name in names]
    return found


def _attempts(asked: dict[str, Any]) -> list[Trial]:
    """Trials in another process, up to the first that fails."""
    command = [sys.executable, "-c", CHILD, json.dumps(asked), *sys.path]
    found: list[Trial] = []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert process.stdout is not None
        text, deadline, problem = b"", time.monotonic() + TO_START + LIMIT, ""
        while len(found) < len(asked["names"]) and not (found and found[-1].problem):
            if not select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                problem = HANGS
                break
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                problem = "its process died"
                break
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                if line.startswith(MARK):  # libraries may print other lines
                    found.append(Trial(**json.loads(line.removeprefix(MARK))))
                    deadline = time.monotonic() + TO_START + LIMIT
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # a process stuck in the driver cannot be killed
            process.wait(10)
        process.stdout.close()
        if problem:
            log.seek(0)
            errors = log.read().decode(errors="replace")
            last = " ".join(errors.strip().splitlines()[-1:])[:200]
            if TIMEOUT in errors:
                problem = HANGS
            elif problem != HANGS:
                status = process.returncode
                by = (
                    signal.Signals(-status).name
                    if status and status < 0
                    else f"with status {status}"
                )
                problem = f"{problem} ({by}): {last}"
            found.append(Trial(name=asked["names"][len(found)], problem=problem))
    return found


# --- child process ---------------------------------------------------------------------------------------------------


def main(text: str) -> None:
    """Prints a line for each requested trial, up to the first that fails."""
    asked = json.loads(text)
    num_heads, head_size, dtype = asked["heads"]
    heads = Heads(num_heads=num_heads, head_size=head_size, dtype=getattr(torch, dtype))
    device = torch.device(asked["device"])
    if not asked["assembly"]:
        triton_support.do_without_assembly()
    for name in asked["names"]:
        faulthandler.dump_traceback_later(LIMIT, exit=True)  # even if the parent is gone
        trial = attempt(name, device, heads)
        print(f"\n{MARK.decode()}{json.dumps(asdict(trial))}", flush=True)
        if trial.problem:
            break
    hard_exit(0)


def attempt(name: str, device: torch.device, heads: Heads) -> Trial:
    """A trial in this process; an error is its problem."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if name == ASSEMBLY:
            wrong = assembly_check.problems(device)
            return Trial(
                name=name,
                problem="; ".join(f"{piece}: {problem}" for piece, problem in wrong.items()),
            )
        if name in (FEED_FORWARD, FP8_FEED_FORWARD):
            tried = feed_forward_problem if name == FEED_FORWARD else fp8_feed_forward_problem
            return Trial(name=name, problem=tried(device, heads))
        run = attention.BACKENDS[name]
        problem = disagreement(run, device, heads)
        return Trial(
            name=name, milliseconds=None if problem else _time(run, device, heads), problem=problem
        )
    except Exception as error:  # any error of a library
        reason = " ".join(str(root_cause(error)).split())[
            :200
        ]  # ending a failed capture raises another error
        return Trial(name=name, problem=reason or type(error).__name__)


def offsets(repeats: int, device: torch.device) -> Tensor:
    """cu_seqlens of LENGTHS, ``repeats`` times, followed by NUM_EMPTY empty sequences."""
    ends = itertools.accumulate(LENGTHS * repeats + (0,) * NUM_EMPTY)
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def disagreement(run: Attention, device: torch.device, heads: Heads = BERT_LARGE) -> str:
    """Problem of a backend: context or gradient unlike the fp32 reference's, or wrong dropout; empty if there is none.

    Dropout does not change the expected context. For a given mask the context is linear in the values, so that the
    products of context and its gradient and of values and theirs agree if both passes drop the same.
    """
    generator = torch.Generator(device).manual_seed(0)
    forward_pass = ForwardPass(offsets(1, device), MAX_LENGTH)
    shape = (sum(LENGTHS), 3, heads.num_heads, heads.head_size)
    qkv = torch.randn(shape, generator=generator, device=device).to(heads.dtype).requires_grad_()
    upstream = torch.randn(shape[0], *shape[2:], generator=generator, device=device).to(heads.dtype)
    context = run(qkv, forward_pass, 0.0)
    (gradient,) = torch.autograd.grad(context, qkv, upstream)
    exact = qkv.detach().float().requires_grad_()
    expected = attention.sdpa_loop(exact, forward_pass, 0.0)
    (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.float())
    for what, value, reference in (
        ("context", context, expected),
        ("gradient", gradient, expected_gradient),
    ):
        error = ((value.detach().float() - reference).norm() / reference.norm()).item()
        if not error <= TOLERANCE:  # nan included
            return f"its {what} differs from the reference's by {error:.3g}"
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
    return (
        ""
        if abs(share - 1) <= TOLERANCE
        else f"its two passes drop different probabilities ({share:.3g})"
    )


def feed_forward_problem(device: torch.device, heads: Heads) -> str:
    """Why QuACK's feed-forward is not to be used: a result or gradient unlike fp32's, or slower than ours; or empty."""
    *inputs, upstream = _feed_forward(device, heads)
    exact = [tensor.float().requires_grad_() for tensor in inputs]
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def separate(
        x: Tensor, weight: Tensor, bias: Tensor, out_weight: Tensor, approximate: str
    ) -> Tensor:
        activation = bias_gelu.fused if triton_support.supported(device) else bias_gelu.reference
        return F.linear(activation(F.linear(x, weight), bias, approximate), out_weight)

    def both_ways(run: Callable[..., Tensor], on: list[Tensor], approximate: str) -> list[Tensor]:
        result = run(*on, approximate)
        return [result.detach(), *torch.autograd.grad(result, on, upstream.to(result.dtype))]

    names = (
        "result",
        "input's gradient",
        "weight's gradient",
        "bias' gradient",
        "second weight's gradient",
    )
    for approximate in ("none", "tanh"):
        found = both_ways(feed_forward.fused, inputs, approximate)
        expected = both_ways(feed_forward.reference, exact, approximate)
        if problem := _unlike(names, found, expected, expected):
            return problem
    runs = separate, feed_forward.fused
    return _slower([functools.partial(both_ways, run, inputs, "tanh") for run in runs], device)


def fp8_feed_forward_problem(device: torch.device, heads: Heads) -> str:
    """Why QuACK's is not to be used in fp8: further from fp32's results than separate kernels, or slower; or empty."""
    x, weight, bias, out_weight, upstream = _feed_forward(device, heads)
    scaling = fp8.Scaling(fp8.Recipe(), 2, device)

    def operands(
        number: int, a: Tensor, which: int, b: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        targets = scaling.target_for(a, number, which), scaling.target_for(b, number, fp8.WEIGHT)
        return (
            cast_rows(a, targets[0]),
            cast_rows(b, targets[1]),
            (targets[0].inverse, targets[1].inverse),
        )

    def exact(a: Tensor, b: Tensor, inverses: tuple[Tensor, Tensor]) -> Tensor:
        return a.float() @ b.float().t() * inverses[0] * inverses[1]

    before, after = (
        operands(0, x, fp8.INPUT, weight),
        operands(1, upstream, fp8.GRADIENT, out_weight.t()),
    )
    linear, into_gelu = (exact(*before) + bias.float()).requires_grad_(), exact(*after)

    def both_ways(
        by_quack: bool, approximate: str, fast: bool, targets: tuple[fp8.Target, fp8.Target]
    ) -> list[Tensor]:
        kernels = fp8_feed_forward.kernels(by_quack)
        inner, *values = kernels.gelu_of_product(*before, bias, approximate, targets[0])
        gradients = kernels.gelu_gradient_of_product(
            *after, inner, bias, approximate, targets[1], fast
        )
        return [*values, *gradients]

    names = (
        "result",
        "transposed result",
        "gradient",
        "transposed gradient",
        "bias' gradient",
        "largest magnitude",
    )
    for approximate, fast in itertools.product(("none", "tanh"), (False, True)):
        value = F.gelu(linear, approximate=approximate)
        (gradient,) = torch.autograd.grad(value, linear, into_gelu)
        targets = (
            scaling.target_for(value.detach(), 1, fp8.INPUT),
            scaling.target_for(gradient, 0, fp8.GRADIENT),
        )
        value, scaled = value.detach() * targets[0].scale, gradient * targets[1].scale
        largest = torch.stack([one.maximum / one.scale for one in targets])
        right = [value, value.t(), scaled, scaled.t(), gradient.sum(0), largest]
        found = []
        for by_quack in (False, True):
            scaling.largest.zero_()
            found.append(
                [*both_ways(by_quack, approximate, fast, targets), scaling.largest[[1, 0], [0, 2]]]
            )
        if problem := _unlike(names, found[1], right, found[0]):
            return problem
    return _slower(
        [
            functools.partial(both_ways, by_quack, "tanh", False, targets)
            for by_quack in (False, True)
        ],
        device,
    )


def _feed_forward(device: torch.device, heads: Heads) -> list[Tensor]:
    """Input [T, D], weight [F, D], bias [F], second weight [D, F], and a gradient [T, D]."""
    width, rows = heads.num_heads * heads.head_size, NUM_REPEATS * sum(LENGTHS)
    generator = torch.Generator(device).manual_seed(0)
    shapes = (rows, width), (4 * width, width), (4 * width,), (width, 4 * width), (rows, width)
    drawn = (
        torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5
        for shape in shapes
    )
    return [tensor.to(heads.dtype) for tensor in drawn]


def _unlike(
    names: tuple[str, ...], found: list[Tensor], expected: list[Tensor], ours: list[Tensor]
) -> str:
    """Which is further from what is expected than it may be, by the tolerance or our own error; empty if none is."""

    def error(value: Tensor, right: Tensor) -> float:
        return ((value.float() - right).norm() / right.norm()).item()

    for name, value, right, own in zip(names, found, expected, ours, strict=True):
        if not error(value, right) <= max(TOLERANCE, 1.25 * error(own, right)):  # nan included
            return f"its {name} differs from fp32's by {error(value, right):.3g}"
    return ""


def _slower(runs: list[Callable[[], object]], device: torch.device) -> str:
    """By how much QuACK's kernels, the second run, are slower than separate ones; empty if they are not."""

    def repeated(run: Callable[[], object]) -> Callable[[int], object]:
        return lambda count: [run() for _ in range(count)]

    ours, theirs = (_milliseconds(repeated(run), device) for run in runs)
    return f"slower: {theirs:.2f} ms, ours {ours:.2f} ms" if theirs > ours else ""


def _time(run: Attention, device: torch.device, heads: Heads) -> float:
    """Milliseconds of both passes, on a GPU in a CUDA graph, which also shows that it works in one."""
    cu_seqlens = offsets(NUM_REPEATS, device)
    shape = NUM_REPEATS * sum(LENGTHS), heads.num_heads, heads.head_size
    qkv = torch.randn(shape[0], 3, *shape[1:], device=device, dtype=heads.dtype, requires_grad=True)
    gradient = torch.randn(shape, device=device, dtype=heads.dtype)

    def both_passes(count: int) -> None:
        forward_pass = ForwardPass(cu_seqlens, MAX_LENGTH)  # shared, as by the layers of a model
        for _ in range(count):
            torch.autograd.grad(run(qkv, forward_pass, DROPOUT), qkv, gradient)

    return _milliseconds(both_passes, device)


def _milliseconds(both_passes: Callable[[int], object], device: torch.device) -> float:
    """Milliseconds of ``both_passes(1)``, on a GPU averaged in a CUDA graph."""
    if device.type != "cuda":
        start = time.perf_counter()
        both_passes(1)
        return (time.perf_counter() - start) * 1e3
    graph = record(lambda: both_passes(NUM_TIMED), warm_stream(lambda: both_passes(3), 1, device))
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / NUM_TIMED
