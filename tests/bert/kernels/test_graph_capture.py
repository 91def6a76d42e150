"""A capture that fails at any call, by the rules of each PyTorch: it ends with one error, and leaves
nothing open, held, released twice or waiting.
"""

import contextlib
import gc

import pytest
import torch

from bert.kernels.support.graph_capture import CaptureError, capture, warm_stream

from ...bench import cuda_rules
from .. import no_gpu

# What run() does in the capture, as kernels that run out of memory and those that cannot be captured.
RUNS = ["succeeds", "raises", "invalidates"]
# What one more failure may leave, while the first one is undone.
LEFT = {
    "CUDAGraph::reset": ("leaks", "open", "dangling"),
    "emptyCache": ("leaks",),
    "memorySnapshot": ("leaks",),
    "releasePool": ("leaks",),
    "clone_state": ("capturing",),
    "graphsafe_set_state": ("capturing",),
}


KEPT = []  # tensors of a failed capture that somebody still holds


@pytest.fixture(autouse=True)
def _frozen():
    """What there is now is not looked at again by each garbage collection."""
    gc.freeze()
    yield
    gc.unfreeze()


def _work(memory, how):
    x = memory * 2
    if how == "kept":
        KEPT.append(x)
        raise RuntimeError("out of memory")
    y = torch.rand(4) + x
    if how == "raises":
        raise RuntimeError("out of memory")
    if how == "invalidates":
        no_gpu.uncapturable()
    memory.add_(y)


def _captured(cuda, how, shares, draws, fail_at=None):
    """(the error's type, names of the calls in order) of a capture and what follows it."""
    memory, error, graph = torch.ones(4), None, None
    stream = warm_stream(lambda: _work(memory, "succeeds"), 1, torch.device("cuda", 0))
    before = capture(lambda: _work(memory, "succeeds"), stream) if shares else None
    cuda.calls.clear()
    cuda.fail_at = fail_at
    try:
        graph = capture(lambda: _work(memory, how), stream, before, draws=draws)
    except RuntimeError as raised:
        error = raised
    calls, cuda.fail_at = list(cuda.calls), None
    if graph is not None:
        graph.replay()
        assert not cuda.faults()["stream"]
    kind, said = type(error), str(error)
    # As a caller that goes on eagerly.
    del graph, before, error
    gc.collect()
    with contextlib.suppress(RuntimeError):
        cuda.empty_cache()  # raises while allocations go to a pool
    return kind, said, calls


@pytest.mark.parametrize("version", cuda_rules.VERSIONS)
@pytest.mark.parametrize("how", RUNS)
def test_a_failure_at_any_call_of_a_capture_ends_it_cleanly(how, version, monkeypatch):
    outcomes = 0
    for shares in (False, True):
        for draws in (True, False):
            cuda = no_gpu.captures(monkeypatch, version)
            kind, _, calls = _captured(cuda, how, shares, draws)
            assert (kind is CaptureError) == (how != "succeeds")
            assert not any(cuda.faults().values()), (shares, draws, cuda.faults())
            for number, name in enumerate(calls, 1):
                cuda = no_gpu.captures(monkeypatch, version)
                kind, said, _ = _captured(cuda, how, shares, draws, number)
                found, place = cuda.faults(), (shares, draws, number, name)
                if how != "succeeds":
                    found |= {left: [] for left in LEFT.get(name, ())}
                assert not any(found.values()), (place, found)
                if how == "succeeds":
                    assert cuda_rules.INJECTED in said, place
                outcomes += 1
    assert outcomes > 20


@pytest.mark.parametrize("version", cuda_rules.VERSIONS)
@pytest.mark.parametrize("shares", [False, True])
def test_a_pool_in_use_is_not_released_twice(shares, version, monkeypatch):
    cuda = no_gpu.captures(monkeypatch, version)
    kind, _, _ = _captured(cuda, "kept", shares, draws=True)
    found = cuda.faults()
    KEPT.clear()
    assert kind is CaptureError
    # Before 2.14 nobody releases it: whether that is due cannot be seen.
    assert not any(found[name] for name in found.keys() - {"leaks"}), found
    assert bool(found["leaks"]) <= (not cuda.rules.releases)
