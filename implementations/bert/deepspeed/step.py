"""The training step by DeepSpeed: its ZeRO stages 1 and 2, and offload; our losses, rules, rates
and seeds.
"""

import contextlib
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from bert.core.dist import World
from bert.data.batch import Batch
from bert.deepspeed.partitions import ZeroRule, ZeroState, partition_of
from bert.kernels.precision import LossScaler, Precision
from bert.model.init import Chunk
from bert.model.init import fill as fill_model
from bert.model.trainable import Trainable
from bert.optim import OptimizerConfig
from bert.optim.layout import fill
from bert.training.step import Resumable, StepResult, add_losses
from common.env import ConfigError, announce


def load() -> Any:
    """Imports DeepSpeed. Raises ConfigError if it is not installed."""
    if not torch.cuda.is_available():
        announce("DS_ACCELERATOR", "cpu")  # prevents a warning
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"ENGINE=deepspeed: {error}: pip install -r requirements/deepspeed.txt, or do without it"
        ) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Our optimizer is tested with every stage.
    deepspeed.utils.logger.addFilter(
        lambda record: "untested optimizer" not in record.getMessage()
    )
    # It calls collectives by names that PyTorch 2.13 warns about at every step.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
    )
    return deepspeed


def _choose_device(deepspeed: Any, world: World) -> None:
    """Makes DeepSpeed use our DEVICE and process group."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if world.device.type == "cpu":
        set_accelerator(CPU_Accelerator())
    # Not DeepSpeed's shared-memory all-reduce: compiling it takes minutes on a busy machine, and if
    # killed leaves a lock on which all later runs hang. gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Required by DeepSpeed; srun and a bare shell do not set it.
    announce("LOCAL_RANK", str(world.local_rank))
    if not distributed.is_initialized():  # DeepSpeed needs a group even for one rank
        distributed.init_process_group(
            "gloo", store=distributed.HashStore(), rank=0, world_size=1
        )
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False)


class DeepSpeedStep(Resumable):
    """Callable training step over micro-batches, as bert.training.step.Step, run by a DeepSpeed
    engine.
    """

    optimizer: ZeroState

    def __init__(
        self,
        model: Trainable,
        precision: Precision,
        optimizer: OptimizerConfig,
        world: World,
        settings: dict[str, Any],
        weights: Iterator[Chunk],
        masters: Callable[[], Iterator[Chunk]],
    ) -> None:
        """A collective.

        ``model`` has placeholders (bert.model.init) in the dtype of ``precision``, which weights
        fill. masters yields the same weights again, for fp32 masters. settings: DeepSpeed's
        complete JSON.
        """
        deepspeed = load()
        _choose_device(deepspeed, world)
        precision.apply()
        self.world = world
        # Ours, so that scales and skipped steps are those of our own engine.
        self.scaler = LossScaler(precision, world.device)
        named = dict(model.named_parameters())
        shapes = {name: parameter.shape for name, parameter in named.items()}
        for parameter in named.values():
            parameter.data = torch.empty(
                parameter.shape, dtype=precision.dtype, device=world.device
            )
        fill_model(model, weights)
        self.update = ZeroRule(named.values(), optimizer.rule, world)
        self.engine, zero, _, _ = deepspeed.initialize(
            model=model,
            optimizer=self.update,
            config=settings,
            dist_init_required=False,
        )
        masters_flat, segments = partition_of(zero, named.values())
        # DeepSpeed took its masters from the weights after the cast.
        if precision.is_low:
            fill(masters_flat, segments, list(named), masters())
        # Last, since until then a step of ZeRO's changes nothing (see ZeroRule).
        rule = self.update.bind(shapes, masters_flat, segments)
        self.optimizer = ZeroState(zero, rule, world)

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        assert len(batches) == self.engine.gradient_accumulation_steps()
        self.update.param_groups[0]["lr"] = lr
        means: list[Tensor] = []
        for batch in batches:
            losses = self.engine(batch.to(self.world.device))
            # The engine multiplies by the loss scale and divides by the number of micro-batches.
            self.engine.backward(reduce(operator.add, losses))
            self.engine.step()  # counts, and updates after the last micro-batch
            means = add_losses(means, losses, len(batches))
        norm = torch.as_tensor(
            self.engine.get_global_grad_norm(), device=self.world.device
        ).float()
        finite = torch.isfinite(norm)
        if self.scaler.enabled:
            self.scaler.update(finite)
            # Waits for the device.
            self.optimizer.zero.loss_scaler.cur_scale = float(self.scaler.scale)
        return StepResult(losses._make(means), norm, finite)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """The model, whose weights every rank has."""
        yield self.engine.module

    def state_tensors(self) -> list[Tensor]:
        """Masters and moments of this rank, on whatever device; ZeRO casts the weights from the
        masters.
        """
        return list(self.optimizer.parts().values())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, or that of bert.training.step.Step. A collective."""
        super().load_state_dict(state)
        if self.scaler.enabled:
            self.optimizer.zero.loss_scaler.cur_scale = float(self.scaler.scale)
