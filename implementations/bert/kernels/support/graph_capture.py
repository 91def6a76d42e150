"""Recording of CUDA graphs after a warm-up; a failed recording leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from common.process import root_cause


class CaptureError(RuntimeError):
    """Work could not be recorded, on this rank or another one. It may still be run eagerly."""


def warm_stream(run: Callable[[], object], times: int, device: torch.device) -> torch.cuda.Stream:
    """A stream on which ``run`` has run ``times`` times, so that kernels and communicators are ready to be recorded."""
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
    """Records what ``run`` launches on the device; it must have been warmed up on ``stream``.

    Reuses the memory of the graph ``before`` except tensors still referenced: temporaries of that graph are invalid
    once this one is launched. Raises CaptureError, leaving the device's state unchanged.
    """
    graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    pool = before.pool() if before is not None else None
    try:
        # Other threads (data, NCCL's watchdog) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    except Exception as error:
        # After a failed capture PyTorch may leave its stream current, its memory pool open and its generator recording.
        torch.cuda.set_stream(outside)
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(stream.device_index, graph.pool())
        with contextlib.suppress(Exception):
            generator = torch.cuda.default_generators[stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
        raise CaptureError(" ".join(str(root_cause(error)).split())[:200]) from error
    return graph
