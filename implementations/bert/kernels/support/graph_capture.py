"""Capture of CUDA graphs after a warm-up; a failed capture leaves no trace."""

import traceback
from collections.abc import Callable
from contextlib import suppress

import torch

from common.process import one_line, root_cause


class CaptureError(RuntimeError):
    """Work could not be captured, on this rank or another one. It may still be run eagerly."""


# Captures that PyTorch has left open: its allocator of host memory goes on asking their graphs.
_ABANDONED: list[torch.cuda.CUDAGraph] = []


def warm_stream(
    run: Callable[[], object], times: int, device: torch.device
) -> torch.cuda.Stream:
    """A stream on which ``run`` has run ``times`` times, so that kernels and communicators are
    ready for a capture.
    """
    # The default stream cannot be captured, and libraries hold workspaces by stream.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(times):
            run()
    # What follows on the caller's stream may use what ``run`` wrote.
    torch.cuda.current_stream(device).wait_stream(stream)
    return stream


def capture(
    run: Callable[[], object],
    stream: torch.cuda.Stream,
    before: torch.cuda.CUDAGraph | None = None,
    *,
    draws: bool = True,
) -> torch.cuda.CUDAGraph:
    """The graph of what ``run`` launches on the device; it must have been warmed up on ``stream``.

    Reuses the memory of the graph ``before`` except tensors still referenced: temporaries of that
    graph are invalid once this one is launched. draws: random numbers, by the seed set before each
    replay. Raises CaptureError, leaving the device's state unchanged; ``before`` is then reset, too.
    """
    graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    # Made here, as a graph tells its pool only after a capture that succeeded.
    pool = torch.cuda.graph_pool_handle() if before is None else before.pool()
    generator = torch.cuda.default_generators[stream.device_index]
    state = generator.graphsafe_get_state()
    if not draws:
        # A graph draws from the state of its capture for good, and one that fails spoils it.
        generator.graphsafe_set_state(generator.clone_state())
    try:
        # Other threads (data, NCCL's watchdog) may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            run()
    except Exception as error:
        _forget_tensors(error)
        _undo(graph, before, pool, stream, outside)
        raise CaptureError(one_line(root_cause(error))) from error
    finally:
        if not draws:
            generator.graphsafe_set_state(state)
    return graph


def _undo(
    graph: torch.cuda.CUDAGraph,
    before: torch.cuda.CUDAGraph | None,
    pool: tuple[int, int],
    stream: torch.cuda.Stream,
    outside: torch.cuda.Stream,
) -> None:
    """Ends what a capture that failed leaves open: capture, stream, allocations to the pool, the
    pool itself, random numbers.

    torch.cuda.graph has no try/finally. What CUDAGraph itself ends differs between versions, and
    builds of one version: each part is ended if it is found open.
    """
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):
        if torch.cuda.is_current_stream_capturing():  # a hook failed as it began
            graph.capture_end()
    torch.cuda.set_stream(outside)
    with suppress(RuntimeError, AttributeError):
        for each in filter(None, (graph, before)):
            each.reset()  # no destructor has to give back the pool after this
        # Raised if they have ended; no version has a public name for it.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            _ABANDONED.append(graph)
        torch.cuda.empty_cache()
        if _is_held(pool):
            torch._C._cuda_releasePool(stream.device_index, pool)
            torch.cuda.empty_cache()
    # A generator that is still registered with the graph refuses to draw.
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())


def _is_held(pool: tuple[int, int]) -> bool:
    """Whether the failed capture still counts as a user of its pool, as before PyTorch 2.14: the
    cache, just emptied, has kept memory of it that no tensor uses.

    To give back a pool once more than it is held aborts the process.
    """
    return any(
        segment["segment_pool_id"] == pool and not segment["active_size"]
        for segment in torch.cuda.memory_snapshot()
    )


def _forget_tensors(error: BaseException) -> None:
    """Clears the frames that an error and its causes hold, and with them the activations of the
    failed capture.
    """
    failure: BaseException | None = error
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
