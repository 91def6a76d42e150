"""Interface between a training step and a model with its task."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert.kernels.fp8 import Scaling
from bert.model.recompute import Recomputation
from common.env import ConfigError


class Trainable(nn.Module, ABC):
    """A module whose forward pass returns the losses of its task's batch. The rest of training is
    task-independent.

    The batch is a subclass of data/batch.py's Batch with the task's label fields.
    """

    @abstractmethod
    def stages(self) -> Sequence[nn.Module]:
        """Modules that together hold all parameters, in the order of the forward pass."""

    @abstractmethod
    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """A NamedTuple of mean losses (0-d, fp32 at least). Their sum is minimized; their names are
        reported.
        """

    def use_fp8(self, device: torch.device, trials: Collection[str] = ()) -> Scaling:
        """Runs matrix products in fp8 from now on; returns their scales. trials: of FP8_TRIALS. Raises ConfigError if
        unsupported.
        """
        raise ConfigError(
            f"PRECISION=fp8: {type(self).__name__} has no products in fp8: use PRECISION=bf16"
        )

    def recompute(self, recomputation: Recomputation) -> None:
        """Recomputes activations from now on. Raises ConfigError if unsupported."""
        raise ConfigError(
            f"RECOMPUTE_LAYERS: {type(self).__name__} has no layers to recompute: set it to 0"
        )
