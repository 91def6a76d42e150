"""The training step by DeepSpeed: its ZeRO stages and offload; our losses, rules, rates and seeds."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bert.core.dist import World
from bert.data.batch import Batch
from bert.deepspeed import zero as zero_internals
from bert.deepspeed.partitions import ZeroRule, ZeroState
from bert.kernels.precision import LossScaler, Precision
from bert.model.init import Chunk
from bert.model.trainable import Trainable
from bert.optim import Config as OptimizerConfig
from bert.training.step import StepResult
from common.env import ConfigError, announce


def load(asked_by: str = "ENGINE=deepspeed") -> Any:
    """Imports DeepSpeed. Raises ConfigError, naming ``asked_by``, if it is not installed."""
    if not torch.cuda.is_available():
        announce("DS_ACCELERATOR", "cpu")  # prevents a warning
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"{asked_by}: {error}: pip install -r requirements/deepspeed.txt, or do without it"
        ) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Our optimizer is tested with every stage.
    deepspeed.utils.logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
    # It calls collectives by names that PyTorch 2.13 warns about at every step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _choose_device(deepspeed: Any, world: World) -> None:
    """Makes DeepSpeed use our DEVICE and process group."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if world.device.type == "cpu":
        set_accelerator(CPU_Accelerator())
    # Not DeepSpeed's shared-memory all-reduce: compiling it takes minutes on a busy machine, and if killed leaves a
    # lock on which all later runs hang. gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Required by DeepSpeed; srun and a bare shell do not set it.
    announce("LOCAL_RANK", str(world.local_rank))
    if not distributed.is_initialized():  # DeepSpeed needs a group even for one rank
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False)


def check_fp16(deepspeed: Any, device: torch.device) -> None:
    """Raises ConfigError if DeepSpeed does not support fp16 on ``device``; for CPUs that depends on the CPU model."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    accelerator = (
        CPU_Accelerator() if device.type == "cpu" else deepspeed.accelerator.get_accelerator()
    )
    if not accelerator.is_fp16_supported():
        problem = f"DeepSpeed finds no fp16 on this {device.type.upper()}"
        raise ConfigError(
            f"ENGINE=deepspeed and PRECISION=fp16: {problem}: set bf16 or fp32, in the JSON too"
        )


@torch.no_grad()
def fill_parameters(
    named: Mapping[str, nn.Parameter],
    chunks: Iterable[Chunk],
    device: torch.device,
    then: Callable[[nn.Parameter], None] | None,
) -> None:
    """Fills each parameter on the device, then calls ``then`` on it. The chunks of a parameter must be consecutive.

    One parameter at a time is whole, so that a model larger than the device can be partitioned.
    """
    filled = set()
    for name, chunks_of_one in itertools.groupby(chunks, key=lambda chunk: chunk.name):
        parameter = named[name]
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        for _, start, values in chunks_of_one:
            whole.view(-1)[start : start + len(values)].copy_(values)
        parameter.data = whole
        filled.add(name)
        if then is not None:
            then(parameter)
    assert filled == named.keys()


class DeepSpeedStep:
    """Callable training step over micro-batches, as bert.training.step.Step, run by a DeepSpeed engine."""

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

        ``model`` has placeholders (bert.model.init) in the dtype of ``precision``; weights fills one parameter after
        the other, and in stage 3 only one at a time is whole. masters yields the same weights again, for fp32 masters.
        settings: DeepSpeed's complete JSON.
        """
        deepspeed = load()
        _choose_device(deepspeed, world)
        precision.apply()
        self.world = world
        # Ours, since DeepSpeed's dynamic loss scaler changes the scale before stage 3 has divided by it.
        self.scaler = LossScaler(precision, world.device)
        named = dict(model.named_parameters())
        stage = int(settings["zero_optimization"]["stage"])
        self.spare = None  # a copy on the meta device, for ``whole``
        if stage == 3:
            # For deepcopy's memo: no weights are copied, and tied parameters stay tied.
            empty = {
                id(p): nn.Parameter(torch.empty_like(p, device="meta", dtype=precision.dtype))
                for p in named.values()
            }
            self.spare = copy.deepcopy(model, dict(empty))
        shapes = {name: parameter.shape for name, parameter in named.items()}
        update = ZeroRule(named.values(), optimizer.rule, world)
        # Before the engine exists: stage 3 expects its parameters partitioned.
        partition = zero_internals.partitioner(deepspeed, settings) if stage == 3 else None
        fill_parameters(named, weights, world.device, partition)
        self.engine, optimizer_of_zero, _, _ = deepspeed.initialize(
            model=model, optimizer=update, config=settings, dist_init_required=False
        )
        zero = zero_internals.wrap(optimizer_of_zero)
        partitions = zero.partitions(list(named.values()), world.rank)
        self.optimizer = ZeroState(zero, update, shapes, world)
        if precision.is_low:  # DeepSpeed took its masters from the weights after the cast
            self.optimizer.begin(partitions, masters())
        # Last, since until then a step of ZeRO's changes nothing (see ZeroRule).
        update.bind(list(named), partitions)

    def __call__(self, batches: Sequence[Batch], lr: float | Tensor) -> StepResult:
        """Trains on the micro-batches; their gradients are averaged."""
        assert len(batches) == self.engine.gradient_accumulation_steps()
        for group in self.optimizer.update.param_groups:
            group["lr"] = lr
        totals: list[Tensor] = []
        for batch in batches:
            losses = self.engine(batch.to(self.world.device))
            # The engine multiplies by the loss scale and divides by the number of micro-batches.
            self.engine.backward(reduce(operator.add, losses))
            self.engine.step()  # counts, and updates after the last micro-batch
            totals = totals or [torch.zeros((), device=self.world.device) for _ in losses]
            for total, loss in zip(totals, losses, strict=True):
                total.add_(loss.detach(), alpha=1 / len(batches))
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.world.device).float()
        finite = torch.isfinite(norm)
        if self.scaler.enabled:
            self.scaler.update(finite)
            self.optimizer.zero.set_loss_scale(float(self.scaler.scale))  # waits for the device
            # The host knows by now: ZeRO decides on the host whether it skips a step.
            if not finite:
                self.optimizer.zero.after_skipped_step()
        return StepResult(losses._make(totals), norm, finite)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """The model with all its weights on every rank, for evaluation. A collective.

        Stage 3: a temporary copy, since the trained model gathers its layers on all ranks together, and ranks may have
        unequal numbers of evaluation batches.
        """
        if self.spare is None:
            yield self.engine.module
            return
        whole = self.spare.to_empty(device=self.world.device)
        with torch.no_grad():
            # One parameter at a time is gathered, into the copy.
            for source, target in zip(
                self.engine.module.parameters(), whole.parameters(), strict=True
            ):
                with load().zero.GatheredParameters([source]):
                    target.copy_(source)
        yield whole
        self.spare = whole.to("meta")

    def state_tensors(self) -> list[Tensor]:
        """Masters and moments of this rank, on whatever device; ZeRO casts the weights from the masters."""
        return [
            flat for part in self.optimizer.update.parts() for flat, _ in self.optimizer.flats(part)
        ]

    def state_dict(self) -> dict[str, Any]:
        """As bert.training.step.Step's. A collective."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict()``, or that of bert.training.step.Step. A collective."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.scaler.enabled:
            self.optimizer.zero.set_loss_scale(float(self.scaler.scale))
