"""Stand-ins for a GPU's streams, events and graphs, to run steps at fixed sizes like a graph's on a
CPU.
"""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bert.core.dist import World

from ..bench.random_states import Generator


class Stream:
    """A stream or event of a device that does everything synchronously."""

    device = device_index = None

    def wait_stream(self, other):
        pass

    wait_event = record = wait_stream

    def query(self):
        return True


def streams(monkeypatch):
    """torch.cuda's streams and events are synchronous."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(World, "wait_for", lambda self, event: None)


def in_name(monkeypatch, capability=(9, 0)):
    """A GPU of a compute capability that can be asked what it is; nothing can run on it.

    PyTorch's build for CPUs has no CUDA version, its build for GPUs asks the driver: both are told.
    """
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: capability
    )


STREAM = Stream()  # where a process begins


class Allocator:
    """Pools of memory as PyTorch's: by whether allocations go there, and how many graphs use it."""

    def __init__(self):
        self.open, self.uses = [], {}

    def begin(self, pool):
        self.open.append(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1

    def end(self, device, pool):
        if pool not in self.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open.remove(pool)

    def release(self, device, pool):
        if not self.uses.get(pool):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.uses[pool] -= 1


class CUDAGraph:
    """What a capture launched, with the memory that it used: a replay does that and nothing else,
    whatever the host has decided since.

    Tells its pool only after a capture that succeeded, as PyTorch's.
    """

    pool_id = random = None

    def __init__(self):
        self.launches = []

    def pool(self):
        if self.pool_id is None:
            raise RuntimeError(
                "Called CUDAGraph::pool() without a preceding successful capture."
            )
        return self.pool_id

    def replay(self):
        generator = torch.cuda.default_generators[None]
        generator.replay(self.random, self.run)

    @torch.no_grad()
    def run(self):
        for launch in self.launches:
            launch()


class _Recording(TorchDispatchMode):
    """Inside, operations run and are recorded; collectives are recorded alone."""

    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        results = function(*args, **kwargs)

        def launch():
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                # Else written in place, or a view.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        if "empty" not in function.name():  # memory, which the recording keeps
            self.launches.append(launch)
        return results


class _CapturedWork:
    """Of a collective that only a replay starts."""

    def wait(self):
        if torch.cuda.current_stream() is STREAM:
            raise RuntimeError("waits for a collective of a capture")


def captures(monkeypatch):
    """torch.cuda.graph records what it captures. If that fails its stream stays current and its
    pool open and in use, as with PyTorch, whose graph.__exit__ has no try/finally and whose
    capture_end raises first. Returns the allocator.
    """
    current, allocator, handles = [STREAM], Allocator(), itertools.count(1)
    recordings, generator = [], Generator()

    class Capture:
        def __init__(self, graph, *, pool, stream, capture_error_mode):
            self.graph, self.stream = graph, stream
            self.pool = pool or (0, next(handles))  # one of its own

        def __enter__(self):
            self.before, current[0] = current[0], self.stream
            allocator.begin(self.pool)
            self.graph.random = generator.begin()
            recordings.append(_Recording(self.graph.launches).__enter__())

        def __exit__(self, kind, *reason):
            recordings.pop().__exit__(kind, *reason)
            if kind is not None:
                self.graph.launches.clear()
                raise RuntimeError(
                    "operation failed due to a previous error during capture"
                )
            allocator.end(None, self.pool)
            generator.end(self.graph.random)
            self.graph.pool_id = self.pool
            current[0] = self.before

    def recorded(run, waits):
        def start(world, *arguments):
            if not recordings:
                return run(world, *arguments)

            def launch():
                if hasattr(work := run(world, *arguments), "wait"):
                    work.wait()

            recordings[-1].launches.append(launch)
            return arguments[0] if waits else _CapturedWork()

        return start

    for name in ("sum", "max", "reduce_scatter", "average", "all_gather"):
        run = recorded(getattr(World, name), name in ("sum", "max"))
        monkeypatch.setattr(World, name, run)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: generator})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[0])
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream)
    )
    return allocator


def uncapturable(*_):
    """A hook that fails only in a capture."""
    if torch.cuda.current_stream() is not STREAM:
        raise RuntimeError("operation not permitted when stream is capturing")
