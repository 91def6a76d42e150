"""Timing on a GPU: calls recorded in a CUDA graph and replayed in turns, and the ceilings of the GPU at hand.

Import it first: it finds the trainer's package in a checkout that nothing is installed from.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from errors import explain

if importlib.util.find_spec("bert") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "implementations"))

Call = Callable[[int], object]


def require_gpu() -> torch.device:
    """The GPU; without one, one line on stderr and exit status 2."""
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: no GPU: this benchmark measures GPU kernels", file=sys.stderr)
        sys.exit(2)
    return torch.device("cuda", torch.cuda.current_device())


class Recorded:
    """``num_calls`` calls of a function, given their number, as one CUDA graph."""

    def __init__(self, function: Call, num_calls: int) -> None:
        self.num_calls = num_calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in range(3):  # compiles, picks algorithms
                function(call)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in range(num_calls):
                function(call)

    def seconds(self) -> float:
        """Seconds a call of one replay, between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.num_calls


def seconds_in_turns(functions: Mapping[str, Call], num_calls: int = 12, repeats: int = 15) -> dict[str, list[float]]:
    """Seconds a call of each function, replayed in turns after two replays to warm up.

    A function gets the number of the call: rotate among inputs, so that the cache does not hold them. One that fails is
    reported on stderr and left out.
    """
    recorded: dict[str, Recorded] = {}
    for name, function in functions.items():
        try:
            recorded[name] = Recorded(function, num_calls)
        except Exception as error:
            print(f"{name}: left out: {explain(error)}", file=sys.stderr)
        gc.collect()
    times: dict[str, list[float]] = {name: [] for name in recorded}
    for repeat in range(-2, repeats):
        for name, calls in recorded.items():
            spent = calls.seconds()
            if repeat >= 0:
                times[name].append(spent)
    return times


def copy_bandwidth() -> float:
    """GB/s of a copy of 2 GiB within the GPU, bytes read plus bytes written: what memory-bound kernels can reach."""
    source = torch.randint(0, 127, (2**31,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    seconds = statistics.median(seconds_in_turns({"copy": lambda _: target.copy_(source)}, 2, 7)["copy"])
    return 2 * source.numel() / seconds / 1e9


def gemm_rate(size: int = 8192) -> float:
    """TFLOP/s of a bf16 product of random square matrices: what matrix-bound kernels can reach."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    seconds = statistics.median(seconds_in_turns({"gemm": lambda _: torch.mm(a, b, out=out)}, 4, 7)["gemm"])
    return 2 * size**3 / seconds / 1e12


def microseconds(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, fastest and slowest of each."""
    return {
        name: {
            "us": round(statistics.median(spans) * 1e6, 2),
            "min": round(min(spans) * 1e6, 2),
            "max": round(max(spans) * 1e6, 2),
        }
        for name, spans in times.items()
    }
