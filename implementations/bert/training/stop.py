"""How a run ends: at its target, at its last step, by a signal on any rank, or because training has
broken down.
"""

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
PATIENCE = "evaluations are no longer better"
# SIGUSR1 is what run.sub has Slurm send two minutes before the time limit.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Between agreements of the ranks on signals, unless steps are longer.
AGREEMENT_SECONDS = 5.0


class TrainingError(RuntimeError):
    """Training failed, such as by a loss that is nan."""

    exit_status = 1


@dataclass(frozen=True)
class Ending:
    """Why a run ended, after how many steps, batches (including those that overflowed) and
    samples.
    """

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
        return self.reason not in (TARGET, LAST_STEP, PATIENCE)


class Stop:
    """Handles SIGTERM and SIGUSR1 while entered; the ranks agree on the batch at which they end.

    The agreement is an all-reduce that waits for the device, so it comes only about every
    AGREEMENT_SECONDS: as many batches apart as the slowest rank takes in that time, by the same
    all-reduce.
    """

    def __init__(self, world: World, listen: bool, note: Path | None = None) -> None:
        """listen: False keeps the signals' default handling; note: file for the last step at which
        the ranks agreed.
        """
        self.world, self.note = world, note
        # Python allows handlers in the main thread only.
        self.listen = listen and threading.current_thread() is threading.main_thread()
        self.received_signal = 0
        self.last_agreement, self.next_batch = time.monotonic(), 0
        self.last_batch: int | None = None  # a resumed run begins at a later batch
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if self.listen:
            self._before = {
                number: signal.signal(number, self._receive) for number in SIGNALS
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Only noted: ranks that stopped in the middle of a step would leave others in a collective.
        self.received_signal = number

    def agreed(self, batch: int, step: int) -> str | None:
        """Name of a signal received by any rank, the same on every rank after the same batch, or
        None.
        """
        if not self.listen or batch < self.next_batch:
            return None
        received = self.received_signal
        if self.world.size > 1:
            now = time.monotonic()
            num_batches = 1 if self.last_batch is None else batch - self.last_batch
            seconds_per_batch = (now - self.last_agreement) / num_batches
            self.last_agreement, self.last_batch = now, batch
            # One all-reduce for both: any signal is above 0, and the slowest rank counts.
            mine = [float(received), seconds_per_batch]
            values = torch.tensor(mine, dtype=torch.float64, device=self.world.device)
            number, slowest = self.world.max(values).tolist()  # waits for the device
            received = int(number)
            if self.note is not None and self.world.is_main:
                # Only needed to tell, after a failure, how much is lost.
                with suppress(OSError):
                    self.note.write_text(f"{step}\n", encoding="ascii")
            self.next_batch = batch + max(
                1, int(AGREEMENT_SECONDS / max(slowest, 1e-6))
            )
        return signal.Signals(received).name if received else None
