"""Stand-ins for a GPU's streams and events, so that steps at fixed sizes can be taken as a graph's are, on a CPU."""

from __future__ import annotations

import contextlib

import torch

from bert.core.dist import World


class Stream:
    """A stream or an event of a device that does everything at once."""

    def wait_stream(self, other):
        pass

    wait_event = record = wait_stream

    def query(self):
        return True


def streams(monkeypatch):
    """torch.cuda's streams and events do everything at once."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(World, "wait_for", lambda self, event: None)
