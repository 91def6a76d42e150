"""Counting optimizer steps and giving each its learning rate, also where batches overflow and make none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bert.kernels.precision import LossScaler
from bert.training.stop import TrainingError

MOST_OVERFLOWS = 50  # in a row: as many halvings bring every sensible loss scale to 1


class Steps:
    """Counts optimizer steps, and gives each its learning rate.

    With loss scaling, a batch whose gradient overflows is skipped. Only the device knows, so the rate is computed
    there, and ``done`` runs ahead of the truth until something is due, where the host waits for the device anyway.
    """

    def __init__(
        self, rate: Callable[[int], float], last: int, scaler: LossScaler, done: int = 0, batches: int = 0
    ) -> None:
        """rate: learning rate of a step, 1 first; last: step at which the run ends; done, batches: before it began."""
        self.rate, self.scaler, self.done, self.batches = rate, scaler, done, batches
        self.settled, self.settled_batches = done, batches
        self.rates: Tensor | None = None
        if scaler.enabled:
            rates = [rate(step) for step in range(1, last + 1)]
            self.rates = torch.tensor(rates, dtype=torch.float32, device=scaler.scale.device)

    def begin(self) -> float | Tensor:
        """Begins a step; returns its learning rate."""
        self.done += 1
        self.batches += 1
        if self.rates is None:
            return self.rate(self.done)
        return torch.take(self.rates, self.batches - 1 - self.scaler.num_skipped_steps)

    def settle(self) -> bool:
        """Brings ``done`` to the truth; False where overflows have put off what is due. Waits for the device.

        Raises TrainingError where no gradient is finite any more.
        """
        if not self.scaler.enabled:
            return True
        expected, self.done = self.done, self.batches - int(self.scaler.num_skipped_steps)
        if self.done > self.settled:
            self.settled, self.settled_batches = self.done, self.batches
        elif self.batches - self.settled_batches > MOST_OVERFLOWS:
            raise TrainingError(
                f"gradients were not finite in {self.batches - self.settled_batches} steps in a row after step "
                f"{self.done}: lower LR or INIT_LOSS_SCALE, or look at the data"
            )
        return self.done == expected
