"""CUDA graphs: work that is recorded once on a stream where it has settled; a recording that fails leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from bert.core.process import root_cause


class CaptureError(RuntimeError):
    """Work that could not be recorded on this rank or another one. It may be run as it is."""


def warm_stream(run: Callable[[], object], times: int, device: torch.device) -> torch.cuda.Stream:
    """A stream on which ``run`` has run as often as a recording needs: kernels and communicators are ready."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(times):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    return stream


def record(
    run: Callable[[], object], stream: torch.cuda.Stream, before: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Records what ``run`` starts on the device. It has run on ``stream`` before, as often as it needs to settle.

    The memory of the graph ``before`` is used again, but for what is still held of it: nothing that only passes through
    that graph may be wanted once this one has started. Raises CaptureError; what is on the device is then as it was.
    """
    graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    pool = before.pool() if before is not None else None
    try:
        # Other threads (data, NCCL's watchdog) may keep using the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    except Exception as error:
        # Where a capture fails PyTorch may leave its stream current, its memory pool open and its generator recording.
        torch.cuda.set_stream(outside)
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(stream.device_index, graph.pool())
        with contextlib.suppress(Exception):
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
        raise CaptureError(" ".join(str(root_cause(error)).split())[:200]) from error
    return graph
