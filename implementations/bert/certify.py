"""``python -m bert.certify``: one rank of an acceptance test. Its times go to RUN_DIR/certify_rank<N>.json.

Every rank takes the same batch in every step, in three stages: one rank after the other, the others idle; all at the
same time, each by itself; all together, with the gradients reduced. Exit status: 0; 1 it crashed; 2 bad input.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert import pretraining, rundir
from bert.config import Config as TrainerConfig
from bert.data.sampler import Sampler
from bert.data.training import TrainingData, open_source
from bert.dist import World
from bert.env import ConfigError, env, from_env
from bert.exit import leave
from bert.step import Step

SEED = 0  # one for all ranks and repeats: the same work, bit for bit
LEARNING_RATE = 1e-4
WARM_UP_STEPS = 2
LEAST_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Config:
    """How long the test takes."""

    seconds: float = env("CERTIFY_SECONDS", above=0, doc="seconds of a stage; set by the launcher")


class Load:
    """What one rank does. Every rank makes it and calls ``run`` with the same settings."""

    def __init__(self, config: TrainerConfig, world: World) -> None:
        self.world = world
        # By itself each rank does what rank 0 would, so that all do the same.
        self.alone = World(dataclasses.replace(config.dist, rank=0, world_size=1))
        config = pretraining.settle_kernels(config, world)
        source = open_source(config.data, config.model.vocab_size)
        sampler = Sampler(source.row_counts(), config.data.rows_per_step, SEED, 0, 1)
        finish = pretraining.finisher(config, self.alone)
        data = TrainingData(source, sampler, config.data, config.model.vocab_size, 1, finish)
        self.batches = [batch.to(world.device) for batch in data.next_step()]
        data.close()
        self.config = config

    def run(self, seconds: float) -> dict[str, Any]:
        """All stages, each about ``seconds`` long; the record of this rank."""
        alone = self._build(self.alone)
        self._steps(alone, WARM_UP_STEPS)
        count = self._agree(seconds / statistics.median(self._steps(alone, WARM_UP_STEPS)))
        single: list[float] = []
        for turn in range(self.world.size):
            self.world.barrier()
            if turn == self.world.rank:
                single = self._steps(alone, count)
        self.world.barrier()
        parallel = self._steps(alone, count)
        del alone
        model, step = self._build_with_model(self.world)
        self._steps(step, WARM_UP_STEPS)
        self.world.barrier()
        together = self._steps(step, count)
        return {
            "rank": self.world.rank,
            "local_rank": self.world.local_rank,
            "node": platform.node(),
            "device": _device_name(self.world.device),
            "seconds": {"single": single, "parallel": parallel, "together": together},
            "weights_crc32": checksum(list(model.parameters())),
        }

    def _build(self, world: World) -> Step:
        return self._build_with_model(world)[1]

    def _build_with_model(self, world: World) -> tuple[torch.nn.Module, Step]:
        torch.manual_seed(SEED)
        return pretraining.build(self.config, world, SEED)

    def _agree(self, count: float) -> int:
        """Steps of a stage: as many as the slowest rank takes in the time, the same on every rank."""
        most = torch.tensor([-count], dtype=torch.float64, device=self.world.device)
        return max(LEAST_STEPS, int(-self.world.max(most).item()))

    def _steps(self, step: Step, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        taken: list[float] = []
        for number in range(count):
            torch.manual_seed(SEED + number)
            started = time.perf_counter()
            step(self.batches, LEARNING_RATE)
            if self.world.device.type == "cuda":
                torch.cuda.synchronize(self.world.device)
            taken.append(time.perf_counter() - started)
        return taken


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """CRC-32 of the bits of all tensors, which must be the same on every rank."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes(), value)
    return value


def write(folder: Path, record: dict[str, Any]) -> None:
    """Writes the record of a rank beside the others."""
    rundir.write_text(folder / f"certify_rank{record['rank']}.json", json.dumps(record) + "\n")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def main(environ: Mapping[str, str]) -> int:
    """Runs the stages on this rank; returns the exit status."""
    run = rundir.Config()
    try:
        run = from_env(rundir.Config, environ)
        config, trainer = from_env(Config, environ), from_env(TrainerConfig, environ)
        trainer.check()
        if run.run_dir is None:
            raise ConfigError("RUN_DIR is not set: start it by certify.sh")
        with World(trainer.dist) as world:
            if world.is_main:
                rundir.write_description(run, trainer, {})
            write(run.run_dir, Load(trainer, world).run(config.seconds))
    except ConfigError as error:
        return rundir.fail(run, "certify", str(error), 2)
    except Exception as error:
        traceback.print_exc()
        return rundir.fail(run, "certify", f"{type(error).__name__}: {error}"[:2000], 1)
    return 0


if __name__ == "__main__":
    leave(main(os.environ))
