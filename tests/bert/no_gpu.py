"""Stand-ins for a GPU's streams and events, to run steps at fixed sizes like a graph's on a CPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from bert.core.dist import World


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


STREAM = Stream()  # where a process begins


def captures(monkeypatch):
    """torch.cuda.graph runs what it captures; if that fails its stream stays current, as with PyTorch."""
    current = [STREAM]

    class Capture:
        def __init__(self, graph, *, pool, stream, capture_error_mode):
            self.stream = stream

        def __enter__(self):
            self.before, current[0] = current[0], self.stream

        def __exit__(self, kind, *_):
            if kind is not None:
                raise RuntimeError("operation failed due to a previous error during capture")
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None, replay=lambda: None)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))


def uncapturable(*_):
    """A hook that fails only in a capture."""
    if torch.cuda.current_stream() is not STREAM:
        raise RuntimeError("operation not permitted when stream is capturing")
