"""Trials of attention backends on a GPU, before the clock, each in a process of its own.

Versions of the libraries differ in support and speed. Each backend runs on a model's heads, is
checked against the reference and timed in a CUDA graph. A failure that breaks the CUDA context (an
unfinished capture, an illegal access) ends with its process; a hang is ended at a time limit. It
costs that backend, never the run.

The results are cached beside the compiled kernels, by all that they judged: GPU, driver, every
installed package, the variables that steer libraries, heads, and the sources of the kernels.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bert.core.dist import World
from bert.kernels import attention
from bert.kernels.attention import Attention
from bert.kernels.support import triton_support
from bert.kernels.support.dropout import ForwardPass
from bert.kernels.support.graph_capture import capture, warm_stream
from common.env import beginning_with
from common.files import sources_of, text_of, write_text
from common.process import hard_exit, one_line, root_cause

# 3,072 tokens: sequences of full, even and odd lengths.
LENGTHS = (512, 384, 128, 256, 200, 56, 512, 97, 415, 333, 179)
MAX_LENGTH, DROPOUT = 512, 0.1
NUM_REPEATS = 8  # of LENGTHS in the timed batch: 24,576 tokens
NUM_TIMED = 5  # passes in the timed graph
NUM_EMPTY = 3  # sequences of length 0 at the end, as in a graph's padded batch
# Where libraries had faults: one token, beside the edges of their tiles, and nothing at all.
HARD_LENGTHS = (1, 63, 64, 65, 0, 127, 128, 129, 192)
# Logits, of which exp() is 0 or inf in fp32: cuDNN's gradient was NaN below -88.7 (pytorch 196678).
FAR_LOGITS = -120.0, 120.0
TOLERANCE = 0.02  # of the norm: bf16 operands
KERNELS = Path(__file__).resolve().parents[1]  # the sources that a verdict judges
MARGIN = 0.03  # of a time: what trials of one backend differ by is no reason to take another one
# What libraries read at run time, by the beginnings of the names.
STEERING = (
    "CUBLAS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDNN_",
    "FLASH_ATT",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_",
    "TORCH_CUDNN_",
    "TORCH_ALLOW_TF32",
    "TRITON_",
)
LIMIT = 120  # seconds of a trial, of which its process may take half to import PyTorch
BUSY = "busy or unavailable"  # in the driver's error
# Ends with its parent from the first moment, as it would go on using the GPU.
CHILD = """
import json, sys
sys.path[:0] = sys.argv[2:]
from common.process import end_with
end_with(json.loads(sys.argv[1])[0])
from bert.kernels.attention import benchmark
benchmark.main(sys.argv[1])
"""


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
    """Milliseconds of a forward and a backward pass with dropout on 24,576 tokens, or why the trial
    failed.
    """

    name: str
    milliseconds: float | None = None
    problem: str = ""


def fallback(name: str, results: list[Trial]) -> str:
    """Backend to use if ``name`` fails at a run's sizes; empty if there is none, or it is not
    needed.
    """
    compiles = attention.BACKENDS[name].compiles
    return (fastest(results, in_graph=False) or "") if compiles else ""


def fastest(results: list[Trial], in_graph: bool = True) -> str | None:
    """Name of the fastest successful trial among the backends for auto, in a CUDA graph or without.

    Of those within MARGIN of the fastest the first in the table of backends, so that noise changes
    no run's kernels.
    """
    times = {
        trial.name: trial.milliseconds
        for trial in results
        if trial.milliseconds is not None
    }
    # Without a graph every batch has other sizes, for each of which these would compile a plan.
    usable = [
        name for name in times if in_graph or not attention.BACKENDS[name].compiles
    ]
    if not usable:
        return None
    limit = (1 + MARGIN) * min(times[name] for name in usable)
    return min(
        (name for name in usable if times[name] <= limit),
        key=list(attention.BACKENDS).index,
    )


def agreed(results: list[Trial], world: World) -> list[Trial]:
    """The trials as all ranks see them: failed if it failed on any, else the median of their times.
    A collective.
    """
    mine = dict.fromkeys(attention.BACKENDS, math.inf)
    mine |= {t.name: t.milliseconds for t in results if t.milliseconds is not None}
    # A number for every backend, tried or not, as ranks gather lists of equal lengths.
    of_ranks = world.gather(list(mine.values()))
    by_backend = dict(zip(mine, zip(*of_ranks, strict=True), strict=True))
    return [_agreed(trial, by_backend[trial.name]) for trial in results]


def _agreed(trial: Trial, times: Sequence[float]) -> Trial:
    """times: of the backend on each rank, inf where it failed."""
    if trial.problem:
        return trial
    if math.inf in times:
        problem = f"fails on another rank's GPU (rank {times.index(math.inf)})"
        return Trial(name=trial.name, problem=problem)
    return Trial(name=trial.name, milliseconds=statistics.median(times))


@functools.cache
def benchmark_backends(
    device: torch.device, heads: Heads = BERT_LARGE, name: str = "auto"
) -> list[Trial]:
    """Trials on a GPU of a backend, or all those for auto; cached results if there are any."""
    names = attention.candidates(device) if name == "auto" else [name]
    # The list of names is part of the key: another package makes another set of trials.
    path = _cache_file(device, heads, names)
    # No results yet, or a damaged file.
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [
            Trial(**trial) for trial in json.loads(path.read_text(encoding="utf-8"))
        ]
    trials = attempts(names, device, heads)
    # If all fail the cause may lie elsewhere.
    if any(trial.milliseconds is not None for trial in trials):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(
                path, json.dumps([asdict(trial) for trial in trials], indent=1) + "\n"
            )
    return trials


def problem_of(name: str, results: list[Trial]) -> str:
    """Why a trial failed; empty if it did not, or was not run."""
    return next((trial.problem for trial in results if trial.name == name), "")


def _cache_file(device: torch.device, heads: Heads, names: list[str]) -> Path:
    """File for the results, named by all that they depend on."""
    driver = text_of(Path("/proc/driver/nvidia/version"))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    libraries = torch.__version__, torch.version.cuda, torch.backends.cudnn.version()
    sources = [path.read_bytes() for path in sources_of(KERNELS)]
    judged = gpu, driver, libraries, packages(), beginning_with(*STEERING), heads
    key = hashlib.sha256(repr((*judged, names, sources)).encode()).hexdigest()
    return cache_folder() / f"trials-{key[:24]}.json"


def packages() -> list[str]:
    """Every installed package with its version: a backend loads others than the one that it is
    named after.
    """
    return sorted(
        f"{package.name}=={package.version}"
        for package in importlib.metadata.distributions()
    )


def cache_folder() -> Path:
    """A folder beside Triton's compiled kernels, set by KERNEL_CACHE; without Triton nothing is
    cached.
    """
    if triton_support.triton is None:
        return Path(os.devnull)
    # The manager of one entry knows the folder in every version, triton.knobs only from 3.4 on.
    manager = importlib.import_module("triton.runtime.cache").FileCacheManager(
        "attention"
    )
    return Path(manager.cache_dir)


def attempts(names: list[str], device: torch.device, heads: Heads) -> list[Trial]:
    """A trial of each, in a process of its own; in this one on a GPU in compute mode
    EXCLUSIVE_PROCESS.
    """
    trials = []
    for name in names:
        trial = _attempt_apart(name, device, heads)
        if BUSY in trial.problem:
            return [attempt(name, device, heads) for name in names]
        trials.append(trial)
    return trials


def _attempt_apart(name: str, device: torch.device, heads: Heads) -> Trial:
    """A trial in another process."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        dtype = str(heads.dtype).removeprefix("torch.")
        sizes = heads.num_heads, heads.head_size
        asked = [os.getpid(), name, str(device), *sizes, dtype, str(answer)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps(asked), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # With a group of its own a compiler that it started ends with it.
                start_new_session=True,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)  # a process stuck in the driver cannot be killed
        if answer.is_file():
            return Trial(**json.loads(answer.read_text(encoding="utf-8")))
        if status is None:
            return Trial(name=name, problem=f"ran past {LIMIT} s")
        by = signal.Signals(-status).name if status < 0 else f"with status {status}"
        last = " ".join(text_of(log).strip().splitlines()[-1:])[:200]
        return Trial(name=name, problem=f"its process died ({by}): {last}")


def main(text: str) -> None:
    """The process of a trial."""
    _, name, device, num_heads, head_size, dtype, answer = json.loads(text)
    heads = Heads(num_heads=num_heads, head_size=head_size, dtype=getattr(torch, dtype))
    trial = attempt(name, torch.device(device), heads)
    write_text(Path(answer), json.dumps(asdict(trial)))
    # Teardown may hang or abort in a context that a trial has broken.
    hard_exit(0)


def attempt(name: str, device: torch.device, heads: Heads) -> Trial:
    """A trial in this process; an error is its problem."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        run = attention.BACKENDS[name].run
        if problem := disagreement(run, device, heads):
            return Trial(name=name, problem=problem)
        return Trial(name=name, milliseconds=_time(run, device, heads))
    except Exception as error:  # any error of a library
        # The first, as ending a failed capture raises another one.
        reason = one_line(root_cause(error))
        return Trial(name=name, problem=reason or type(error).__name__)


def offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens of the lengths, followed by NUM_EMPTY empty sequences."""
    ends = itertools.accumulate(lengths + (0,) * NUM_EMPTY)
    return torch.tensor([0, *ends], dtype=torch.int32, device=device)


def disagreement(
    run: Attention, device: torch.device, heads: Heads = BERT_LARGE
) -> str:
    """Problem of a backend: context or gradient unlike the fp32 reference's, also at magnitudes and
    lengths that are rare, or wrong dropout; empty if there is none.
    """
    lengths = LENGTHS + HARD_LENGTHS
    forward_pass = ForwardPass(offsets(lengths, device), MAX_LENGTH)
    generator = torch.Generator(device).manual_seed(0)
    shape = (sum(lengths), 3, heads.num_heads, heads.head_size)
    qkv = torch.randn(shape, generator=generator, device=device)
    upstream = torch.randn(shape[0], *shape[2:], generator=generator, device=device)
    if problem := _inexact(run, forward_pass, qkv, upstream, heads.dtype):
        return problem
    for logit in FAR_LOGITS:
        far = qkv.clone()
        far[:, 0, :, 0], far[:, 1, :, 0] = 1.0, logit * math.sqrt(heads.head_size)
        # But for the gradient of the one large factor, a sum that cancels.
        if problem := _inexact(run, forward_pass, far, upstream, heads.dtype, first=1):
            return f"{problem} at logits of {logit:g}"
    # Values by whose sums and products neither the type nor fp32 overflows.
    limit = 2.0 ** int(0.8 * math.log2(torch.finfo(heads.dtype).max))
    large = qkv.clone()
    large[:, 2] *= limit
    if problem := _inexact(run, forward_pass, large, upstream / limit, heads.dtype):
        return f"{problem} at values of {limit:.3g}"
    return _wrong_dropout(run, forward_pass, qkv.to(heads.dtype))


def _inexact(
    run: Attention,
    forward_pass: ForwardPass,
    qkv: Tensor,
    upstream: Tensor,
    dtype: torch.dtype,
    first: int = 0,
) -> str:
    """Context or gradient that differs from the fp32 reference's; of gradients the columns from
    ``first`` on.
    """
    qkv, upstream = qkv.to(dtype).requires_grad_(), upstream.to(dtype)
    context = run(qkv, forward_pass, 0.0)
    (gradient,) = torch.autograd.grad(context, qkv, upstream)
    # In fp32 from the same rounded numbers: the difference is the backend's own.
    exact = qkv.detach().float().requires_grad_()
    expected = attention.sdpa_loop(exact, forward_pass, 0.0)
    (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.float())
    pairs = [("context", context.detach(), expected.detach(), 0)]
    # Queries, keys and values apart: their magnitudes differ.
    for number, name in enumerate(("queries", "keys", "values")):
        both = gradient[:, number], expected_gradient[:, number]
        pairs.append((f"gradient of the {name}", *both, first))
    for name, found, wanted, begin in pairs:
        if not found.isfinite().all():
            return f"its {name} is not finite"
        found, wanted = found[..., begin:].double(), wanted[..., begin:].double()
        error = ((found - wanted).norm() / wanted.norm()).item()
        if not error <= TOLERANCE:  # nan included
            return f"its {name} differs from the reference's by {error:.3g}"
    return ""


def _wrong_dropout(run: Attention, forward_pass: ForwardPass, qkv: Tensor) -> str:
    """Dropout does not change the expected context. For a given mask the context is linear in the
    values, so that the products of context and its gradient and of values and theirs agree if both
    passes drop the same.
    """
    qkv = qkv.requires_grad_()
    kept = run(qkv, forward_pass, 0.0).detach().float()
    context = run(qkv, forward_pass, DROPOUT)
    # The context as its own gradient, for the products compared below.
    (gradient,) = torch.autograd.grad(context, qkv, context.detach())
    dropped = context.detach().float()
    if not (dropped - kept).norm() > TOLERANCE * kept.norm():
        return "it drops nothing"
    # The projection on the context without dropout, 1 if survivors are scaled right.
    share = ((dropped * kept).sum() / kept.square().sum()).item()
    if not abs(share - 1) <= TOLERANCE:
        return (
            f"with dropout its context is on average {share:.3g} of what it is without"
        )
    by_values = (qkv.detach()[:, 2].float() * gradient[:, 2].float()).sum()
    share = (by_values / dropped.square().sum()).item()
    if not abs(share - 1) <= TOLERANCE:
        return f"its two passes drop different probabilities ({share:.3g})"
    return ""


def _time(run: Attention, device: torch.device, heads: Heads) -> float:
    """Milliseconds of both passes in a CUDA graph, which also shows that it works in one."""
    cu_seqlens = offsets(NUM_REPEATS * LENGTHS, device)
    shape = NUM_REPEATS * sum(LENGTHS), heads.num_heads, heads.head_size
    qkv = torch.randn(
        shape[0], 3, *shape[1:], device=device, dtype=heads.dtype, requires_grad=True
    )
    gradient = torch.randn(shape, device=device, dtype=heads.dtype)

    def both_passes(count: int) -> None:
        # Shared, as by the layers of a model.
        forward_pass = ForwardPass(cu_seqlens, MAX_LENGTH)
        for _ in range(count):
            torch.autograd.grad(run(qkv, forward_pass, DROPOUT), qkv, gradient)

    graph = capture(
        lambda: both_passes(NUM_TIMED), warm_stream(lambda: both_passes(3), 1, device)
    )
    # The first launch of a graph is slow, and not timed.
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    # The host waits here; the events alone measure.
    end.synchronize()
    return begin.elapsed_time(end) / NUM_TIMED
