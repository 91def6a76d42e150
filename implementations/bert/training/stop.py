"""Why a run ends: its target, its last step, a signal on any rank, or training that has broken down."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bert.core.dist import World

TARGET, LAST_STEP = "the target was reached", "the last step was reached"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PATIENCE = 5.0  # seconds that a signal waits for all ranks to agree on it, where steps are shorter


class TrainingError(RuntimeError):
    """The run itself went wrong, such as a loss that is not a number."""

    exit_status = 1


@dataclass(frozen=True)
class Ending:
    """The reason for which a run ended, after how many steps, batches (with those that overflowed) and samples."""

    reason: str
    step: int
    batches: int
    samples: int

    @property
    def reached(self) -> bool:
        return self.reason == TARGET

    @property
    def stopped(self) -> bool:
        """Whether the run was asked to end early."""
        return self.reason not in (TARGET, LAST_STEP)


class Stop:
    """Listens for SIGTERM and SIGUSR1 while entered; the ranks agree at which batch they end.

    The agreement is an all-reduce that waits for the device, so it comes only every PATIENCE seconds or so: as many
    batches apart as the slowest rank takes in that time, which all ranks learn from the same all-reduce.
    """

    def __init__(self, world: World, listen: bool, note: Path | None = None) -> None:
        """listen: False leaves the signals' default handling; note: file of the last step at which all ranks agreed."""
        self.world, self.note = world, note
        self.listen = listen and threading.current_thread() is threading.main_thread()
        self.received = 0
        self.asked, self.next = time.monotonic(), 0
        self.asked_batch: int | None = None  # a run that continues begins with a later one
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if self.listen:
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def agreed(self, batch: int, step: int) -> str | None:
        """The name of a signal that a rank has received, the same on every rank after the same batch, or None."""
        if not self.listen or batch < self.next:
            return None
        received = self.received
        if self.world.size > 1:
            now = time.monotonic()
            seconds = (now - self.asked) / (1 if self.asked_batch is None else batch - self.asked_batch)
            values = torch.tensor([float(received), seconds], dtype=torch.float64, device=self.world.device)
            number, slowest = self.world.max(values).tolist()
            received = int(number)
            self.asked, self.asked_batch = now, batch
            if self.note is not None and self.world.is_main:
                with suppress(OSError):  # it only tells, after a failure, how much is lost
                    self.note.write_text(f"{step}\n", encoding="ascii")
            self.next = batch + max(1, int(PATIENCE / max(slowest, 1e-6)))
        return signal.Signals(received).name if received else None
