"""Stand-ins for a GPU's streams, events and graphs, to run steps at fixed sizes like a graph's on a CPU."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert.core.dist import World

from ..bench import cuda_rules


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
    capabilities = lambda device=None: capability  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities)


class CUDAGraph(cuda_rules.CUDAGraph):
    """What a capture launched, with the memory that it used: a replay does that and nothing else,
    whatever the host has decided since.
    """

    def __init__(self, cuda):
        self.launches, self.recording = [], None
        super().__init__(cuda)

    def started(self):
        self.recording = _Recording(self).__enter__()

    def stopped(self, kept):
        if self.recording is not None:
            self.recording.__exit__(None, None, None)
            self.recording = None
        if not kept:
            self.launches.clear()

    @torch.no_grad()
    def launch(self):
        for launch in self.launches:
            launch()


def _tensors(values):
    """Of what operations take and return; torch.utils._pytree finds them more slowly."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class _Recording(TorchDispatchMode):
    """Inside, operations run and are recorded; collectives are recorded alone."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.graph.permit(function is not torch.ops.aten._local_scalar_dense.default)
        self.graph.cuda.call("launch")
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        tensors = [*_tensors(results)]
        given = [id(one) for one in _tensors([*args, *kwargs.values()])]
        self.graph.cuda.allocated([one for one in tensors if id(one) not in given])

        def launch():
            again = _tensors(function(*args, **kwargs))
            for old, new in zip(tensors, again, strict=True):
                if old.data_ptr() != new.data_ptr():  # else written in place, or a view
                    old.copy_(new)

        if "empty" not in function.name():  # memory, which the recording keeps
            self.graph.launches.append(launch)
        return results


class _CapturedWork:
    """Of a collective that only a replay starts."""

    def __init__(self, cuda):
        self.cuda = cuda

    def wait(self):
        if self.cuda.stream.graph is None:
            raise RuntimeError("waits for a collective of a capture")


def captures(monkeypatch, version="2.13"):
    """torch.cuda.graph, which is PyTorch's own, records what it captures, by the rules of a version.
    Returns the libraries.
    """
    cuda = cuda_rules.Cuda(version)

    def recorded(run, waits):
        def start(world, *arguments):
            if (graph := cuda.stream.graph) is None:
                return run(world, *arguments)

            def launch():
                if hasattr(work := run(world, *arguments), "wait"):
                    work.wait()

            graph.launches.append(launch)
            return arguments[0] if waits else _CapturedWork(cuda)

        return start

    for name in ("sum", "max", "reduce_scatter", "average", "all_gather"):
        run = recorded(getattr(World, name), name in ("sum", "max"))
        monkeypatch.setattr(World, name, run)
    for name, value in cuda.installed(CUDAGraph).items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in cuda.private().items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", {0: cuda.generator})
    return cuda


def uncapturable(*_):
    """A hook that fails only in a capture."""
    torch.cuda.synchronize()
