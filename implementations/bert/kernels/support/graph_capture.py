"""Capture of CUDA graphs after a warm-up; a failed capture leaves no trace."""

import traceback
from collections.abc import Callable
from contextlib import suppress

import torch

from common.process import root_cause


class CaptureError(RuntimeError):
    """Work could not be captured, on this rank or another one. It may still be run eagerly."""


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
    replay. Raises CaptureError, leaving the device's state unchanged.
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
        _undo(stream, outside, pool)
        _forget_tensors(error)
        raise CaptureError(" ".join(str(root_cause(error)).split())[:200]) from error
    finally:
        if not draws:
            generator.graphsafe_set_state(state)
    return graph


def _undo(
    stream: torch.cuda.Stream, outside: torch.cuda.Stream, pool: tuple[int, int]
) -> None:
    """Ends what torch.cuda.graph leaves open when its exit raises: stream, allocations to the pool,
    random numbers.

    It has no try/finally, and CUDAGraph.capture_end raises before it ends anything if the capture
    is invalid.
    """
    torch.cuda.set_stream(outside)
    # Raised if it has ended: the graph was captured but not instantiated.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    # Raised if capture_begin failed before it took the pool.
    with suppress(RuntimeError):
        torch._C._cuda_releasePool(stream.device_index, pool)
    # A generator that is still registered with the graph refuses to draw.
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())


def _forget_tensors(error: BaseException) -> None:
    """Clears the frames that an error and its causes hold, and with them the activations of the
    failed capture.
    """
    failure: BaseException | None = error
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
