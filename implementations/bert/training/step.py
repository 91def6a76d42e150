"""One optimizer step: forward, backward, reduce, clip, update. It never waits for the device."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bert import optim
from bert.core.dist import World
from bert.data.batch import Batch
from bert.kernels.fp8 import Scaling
from bert.kernels.precision import LossScaler, Precision, cast_with_masters
from bert.model.init import Chunk
from bert.model.trainable import Trainable
from bert.optim import OptimizerConfig
from bert.optim.clipping import Clipping, Gradients
from bert.optim.sharded import FlatOptimizer
from bert.optim.state import ShardState
from bert.training.stop import TrainingError


class StepResult(NamedTuple):
    """Results of a step; 0-d, on the device.

    losses: the task's NamedTuple, means of this rank's micro-batches. norm: of the average gradient
    before clipping; with CLIP=bucket that of the clipped average; with CLIP=before, the mean of the
    norms of this rank's micro-batches, in fp16 on several ranks that of the clipped average. finite
    (bool): whether the gradient was; in fp8 also whether all tensors cast were, as saturation hides
    inf. A step whose gradient is not finite leaves the weights unchanged with loss scaling (fp16),
    else it ruins them.
    """

    losses: tuple[Tensor, ...]
    norm: Tensor
    finite: Tensor


# An optimizer step over micro-batches, averaging their gradients, at a learning rate: Step,
# graph.GraphedStep, ...
TrainingStep = Callable[[Sequence[Batch], float | Tensor], StepResult]


def build_step(
    model: Trainable,
    precision: Precision,
    optimizer: OptimizerConfig,
    world: World,
    *,
    accumulate: bool,
    fused_update: bool,
    first_weights: Iterable[Chunk] | None = None,
) -> Step:
    """Casts ``model``, which has its initial weights in fp32 on the device, and makes optimizer and
    step.

    accumulate: over several micro-batches; fused_update: by Triton kernels; first_weights: for a
    model of placeholders (model/init.py), which a sharded optimizer fills.
    """
    precision.apply()
    masters = (
        cast_with_masters(model, precision.dtype) if first_weights is None else None
    )
    fp8 = None
    if precision.fp8:
        fp8 = model.use_fp8(world.device, precision.fp8_trials)
    sharded_optimizer = optim.build(
        optimizer,
        model,
        masters,
        world,
        accumulate=accumulate,
        fused=fused_update,
        first_weights=first_weights,
    )
    clipping = Clipping(when=optimizer.clip, max_norm=optimizer.max_grad_norm)
    scaler = LossScaler(precision, world.device)
    return Step(model, sharded_optimizer, clipping, scaler, fp8, world)


@contextlib.contextmanager
def preserved(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Restores tensors (in place) and random states on exit, bit for bit.

    The copies are in host memory: beside a model that just fits, the device has no room for them.
    """
    # With a group of one rank the weights and their shard are one tensor.
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    random_state = torch.get_rng_state()
    # Dropout on the device draws from a generator of its own.
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    yield
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
    torch.set_rng_state(random_state)
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, device)


def is_finite(state: Iterable[Tensor], world: World) -> bool:
    """Whether no rank has inf or nan in its ``state``. A collective, which waits for the device."""
    tensors = [
        tensor for tensor in state if tensor.is_floating_point() and tensor.numel()
    ]
    # aminmax keeps nan and makes no copy, unlike isfinite() of tensors as large as the model.
    extremes = [
        torch.stack(tensor.aminmax()).to(world.device, torch.float64)
        for tensor in tensors
    ]
    return not world.any(not torch.stack(extremes).isfinite().all())


def check_finite(state: Iterable[Tensor], world: World, step: int) -> None:
    """Before a checkpoint: raises TrainingError, on all ranks, if a state is not finite after
    ``step``.
    """
    if not is_finite(state, world):
        raise TrainingError(
            f"weights or moments are not finite at step {step}, and are not saved: "
            "lower LR, or look at the data; checkpoints of earlier steps are kept"
        )


def add_losses(
    means: list[Tensor], losses: Sequence[Tensor], count: int
) -> list[Tensor]:
    """The means, none yet of the first micro-batch, with the losses of one of ``count``."""
    means = means or [torch.zeros((), device=loss.device) for loss in losses]
    for mean, loss in zip(means, losses, strict=True):
        mean.add_(loss.detach(), alpha=1 / count)
    return means


class Resumable:
    """A step's state in checkpoints, the same for either engine."""

    optimizer: ShardState
    scaler: LossScaler
    fp8: Scaling | None = None

    def state_dict(self) -> dict[str, Any]:
        """State for resuming, by part. A collective."""
        return {"optimizer": self.optimizer.state_dict(), **self._scales()}

    def shard_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's part of the sharded optimizer's state, and the state common to all ranks."""
        return self.optimizer.shard_state(), {
            "optimizer": self.optimizer.index(),
            **self._scales(),
        }

    def _scales(self) -> dict[str, Any]:
        scales = {"scaler": self.scaler.state_dict()}
        return scales if self.fp8 is None else {**scales, "fp8": self.fp8.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``; fp8 scales missing in it are measured by the next step."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.fp8 is not None and "fp8" in state:
            self.fp8.load_state_dict(state["fp8"])


class Step(Resumable):
    """Callable training step over micro-batches."""

    optimizer: FlatOptimizer

    def __init__(
        self,
        model: Trainable,
        optimizer: FlatOptimizer,
        clipping: Clipping,
        scaler: LossScaler,
        fp8: Scaling | None,
        world: World,
    ) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.scaler, self.fp8 = scaler, fp8
        # On the device, where a captured graph reads it.
        self.lr = torch.zeros((), dtype=torch.float32, device=world.device)
        self.gradients = Gradients(
            model, optimizer, clipping, world, find_overflow=scaler.enabled
        )
        # Timing hook, called at the end of a part of the step.
        self.mark: Callable[[str], None] = lambda part: None

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        self.lr.fill_(lr)
        return self.run([batch.to(self.world.device) for batch in batches])

    def run(self, batches: Sequence[Batch]) -> StepResult:
        """The step on batches on the device, at the rate in ``lr``: what a CUDA graph captures."""
        self.model.zero_grad()
        means: list[Tensor] = []
        # The gradients of the micro-batches add up to their mean, times the loss scale.
        factor = self.scaler.scale / len(batches)
        for number, batch in enumerate(batches, start=1):
            with self.gradients.micro_batch(
                number == 1, number == len(batches), factor
            ):
                losses = self.gradients.forward(batch)
                # The losses count equally, as in BERT's paper: the sum of two means.
                (functools.reduce(operator.add, losses) * factor).backward()
            means = add_losses(means, losses, len(batches))
        norm, grad_scale = self.gradients.finish(self.scaler.scale)
        self.mark("reduced")
        unscaled = norm / self.scaler.scale
        finite = torch.isfinite(norm)
        # Only with loss scaling is an overflow part of normal training, and skipped.
        self.optimizer.step(
            self.lr, grad_scale, finite if self.scaler.enabled else None
        )
        self.scaler.update(finite)
        if self.fp8 is not None:
            # ``and`` would read the tensor on the host, and wait.
            finite = finite & self.fp8.update(self.world)
        self.mark("updated")
        return StepResult(losses._make(means), unscaled, finite)

    @property
    def needs_calibration_step(self) -> bool:
        """Whether the next step measures its fp8 scales first, with other kernels than all later
        steps.
        """
        return self.fp8 is not None and not self.fp8.calibrated

    def after_graph_replay(self) -> None:
        """Updates the host's state as a step does; replaying a graph does not."""
        self.optimizer.weights.mark_stale()
        if self.fp8 is not None:
            self.fp8.calibrated = True

    @contextlib.contextmanager
    def rollback(self) -> Iterator[None]:
        """Undoes the steps taken inside: restores all state bit for bit. A collective."""
        # Weights of other ranks' shards must be here before they can be kept.
        self.optimizer.gather()
        calibrated = self.fp8 is not None and self.fp8.calibrated
        with preserved(self.state_tensors(), self.world.device):
            yield
            # A gather still under way would overwrite what is restored next.
            self.optimizer.gather()
        # Known to the host alone, so that no tensor restores it.
        if self.fp8 is not None:
            self.fp8.calibrated = calibrated

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        self.optimizer.gather()
        yield self.model

    def state_tensors(self) -> list[Tensor]:
        """Every tensor on the device that a step changes."""
        scales = self.fp8.state_tensors() if self.fp8 is not None else []
        return [*self.optimizer.state_tensors(), *self.scaler.state_tensors(), *scales]
