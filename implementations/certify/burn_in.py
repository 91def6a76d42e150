"""Hours of the same steps, over and over: what a rank computes must be what it computed first, bit for bit.

A burn-in continues only where the facts of the test are the same: what another machine or other settings compute is no
corruption.

RUN_DIR/burn_in.json is the first repeat, burn_in_<node>.jsonl has a line for each repeat, burn_in_<node>.npz the node's
telemetry. With them there a test continues where it ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert.core import rundir
from bert.core.env import Variable, variables
from bert.core.files import write_text
from bert.kernels import precision
from bert.pretraining.config import Config as TrainerConfig
from bert.training.metrics import clock
from certify import schema
from certify.load import Load, Trainee
from certify.meeting import Meeting
from certify.telemetry import Sampler

FIRST = "burn_in.json"
SAVE_SECONDS = 300.0  # between two writings of the telemetry
DRIVER = Path("/proc/driver/nvidia/version")


def derived(trainer: TrainerConfig) -> dict[str, Any]:
    """For config.json: the model itself, which a path may no longer lead to, and the precision that `auto` is here."""
    model = dataclasses.asdict(trainer.model) | {"gelu_form": trainer.model.gelu_form}
    return {"model": model, "settled_precision": precision.resolved(trainer.precision.precision, trainer.device)}


def facts(trainer: TrainerConfig, meeting: Meeting) -> dict[str, Any]:
    """What decides the bits that the steps compute, but for the kernels: ranks, settings, devices and versions."""
    described, environment = derived(trainer), rundir.environment()
    groups = (trainer.optim, trainer.recompute, trainer.data, trainer.zero, trainer.graph, trainer.precision)
    found: dict[str, Any] = {"ranks": meeting.size, "nodes": ", ".join(meeting.nodes)}
    for group in groups:
        found |= settings(group)
    found |= {"PRECISION": described["settled_precision"], **described["model"]}
    found |= {"OMP_NUM_THREADS": trainer.dist.num_threads, "device": device_name(trainer.device)}
    found |= environment["packages"] | {name: environment[name] for name in ("cuda", "cudnn", "nccl", "python")}
    found["driver"] = DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.is_file() else None
    found["commit"] = (environment["git_commit"] or "unknown").removesuffix("-dirty")
    return found


def settings(group: Any) -> dict[str, Any]:
    """The values of a part of the Config by the names of their variables; paths, which may move, left out."""
    found: dict[str, Any] = {}
    paths = {variable.name for _, variable, kind, _ in variables(type(group)) if kind is Path}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        variable: Variable | None = field.metadata.get("env")
        if dataclasses.is_dataclass(value):
            found |= settings(value)
        elif variable is not None and variable.name not in paths:
            found[variable.name] = value
    return found


def device_name(device: torch.device) -> str:
    """Of a rank's device, as the records and baselines have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def refuse_other(folder: Path, meeting: Meeting, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError on all ranks where the burn-in in this folder was begun with other facts."""
    reason, path = "", folder / FIRST
    if meeting.rank == 0 and path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8")).get("facts", {})
        for name, value in facts.items():
            if earlier.get(name, facts) != value:
                known = f"its {name} is {earlier.get(name)}, and now {value}"
                words = known if name in earlier else f"nothing is known of its {name}"
                reason = f"{folder} has a burn-in that cannot continue: {words}: choose another RUN_NAME"
                break
    meeting.refuse(reason)


class BurnIn:
    """Every rank makes it and calls ``run``."""

    def __init__(self, load: Load, folder: Path, duration: float) -> None:
        """duration: seconds of the whole, what an earlier process has done counted in."""
        self.load, self.meeting, self.duration = load, load.meeting, duration
        self.folder, self.first = folder, folder / FIRST
        self.facts: dict[str, Any] = {}
        if self.meeting.rank == 0:
            self.facts = facts(load.trainer, self.meeting) | settings(load.trainer.kernels)
        self.node = self.meeting.nodes[self.meeting.node]
        self.journal, self.samples = (folder / f"burn_in_{self.node}.{kind}" for kind in ("jsonl", "npz"))
        self.writes = self.meeting.rank == self.meeting.members(self.meeting.node)[0]

    @staticmethod
    def begun(folder: Path) -> bool:
        """Whether an earlier process has taken the first repeat."""
        return (folder / FIRST).exists()

    def sampled(self) -> np.ndarray:
        """Telemetry of an earlier process."""
        if not self.samples.exists():
            return np.empty(0, schema.SAMPLE)
        with np.load(self.samples) as file:
            found = np.empty(len(file["telemetry.time"]), schema.SAMPLE)
            for column in schema.SAMPLE.names or ():
                found[column] = file[f"telemetry.{column}"]
        return found

    def run(self, sampler: Sampler | None = None) -> None:
        """Repeats until the time is over. sampler: has begun; it ends here."""
        refuse_other(self.folder, self.meeting, self.facts)
        saved = time.monotonic()
        with self.load.trainee_alone() as trainee:
            count = self.load.count_steps(trainee)
            known = self._known()
            # All go on from the same repeat, and none of them forgets what it has done.
            repeat, elapsed = known.get("repeats", 0), known.get("elapsed", 0.0)
            reference: list[int] = known.get("checksums", [])
            self.load.check_drill(len(reference) or count)
            started = time.monotonic() - elapsed
            # Elapsed is what all agree on: whoever stopped by its own clock would leave the others waiting.
            while not reference or elapsed < self.duration:
                self.meeting.barrier()
                seconds, checksums = self._repeat(trainee, len(reference) or count, drill=bool(reference))
                if not reference:
                    reference = self._agree(checksums)
                different = next(
                    (i for i, pair in enumerate(zip(checksums, reference, strict=True)) if len({*pair}) > 1), -1
                )
                repeat += 1
                elapsed = self.meeting.most(time.monotonic() - started)
                self._tell(repeat, elapsed, seconds, different)
                if sampler is not None and time.monotonic() - saved >= SAVE_SECONDS:
                    self._save(sampler.rows())
                    saved = time.monotonic()
        if sampler is not None:
            self._save(sampler.stop())

    def _save(self, samples: np.ndarray) -> None:
        schema.write(self.samples, {"node": self.node}, {"telemetry": samples})

    def _lines(self) -> list[str]:
        """Of this node's journal; the end of one that was being written when the power failed is cut off."""
        if not self.journal.exists():
            return []
        text = self.journal.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_text(self.journal, whole)
        return whole.splitlines()

    def _known(self) -> dict[str, Any]:
        """What an earlier process left; the same on all ranks."""
        known: dict[str, Any] = {}
        if self.writes:
            self._lines()
        if self.meeting.rank == 0 and self.first.exists():
            known = json.loads(self.first.read_text(encoding="utf-8"))
            self._write_first(known["checksums"])
            lines = self._lines()
            last = json.loads(lines[-1]) if lines else {}
            known |= {"repeats": last.get("repeat", 0), "elapsed": last.get("elapsed", 0.0)}
        found: dict[str, Any] = json.loads(self.meeting.exchange(json.dumps(known).encode())[0])
        return found

    def _repeat(self, trainee: Trainee, count: int, drill: bool) -> tuple[float, list[int]]:
        """Median seconds of a step, and the checksums after each."""
        with trainee.step.rollback():
            checksums = self.load.take_steps(trainee, count, drill)
            parts = trainee.recorder.take()
        return statistics.median(parts.sum(axis=1).tolist()), checksums.tolist()

    def _agree(self, checksums: list[int]) -> list[int]:
        """The first repeat of most ranks, which rank 0 writes down."""
        said = self.meeting.exchange(json.dumps(checksums).encode())
        reference: list[int] = json.loads(Counter(said).most_common(1)[0][0])
        if self.meeting.rank == 0:
            self._write_first(reference)
        return reference

    def _write_first(self, checksums: list[int]) -> None:
        """The first repeat, with what it was computed by and for how long the burn-in shall go on."""
        about = {"duration": self.duration, "checksums": checksums, "facts": self.facts}
        write_text(self.first, json.dumps(about) + "\n")

    def _tell(self, repeat: int, elapsed: float, seconds: float, different: int) -> None:
        """A line of this node's journal, and rank 0's on how it goes."""
        said = [json.loads(one) for one in self.meeting.exchange(json.dumps([seconds, different]).encode())]
        if self.writes:
            members = self.meeting.members(self.meeting.node)
            line = {"repeat": repeat, "elapsed": elapsed, "seconds": {rank: said[rank][0] for rank in members}}
            line["different"] = {rank: said[rank][1] for rank in members if said[rank][1] >= 0}
            with open(self.journal, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        if self.meeting.rank == 0:
            wrong = [rank for rank, (_, step) in enumerate(said) if step >= 0]
            words = f"rank {', '.join(map(str, wrong))} computed something else" if wrong else "all the same"
            print(
                f"burn-in {clock(elapsed)} of {clock(self.duration)}: repeat {repeat}, {words}",
                file=sys.stderr,
                flush=True,
            )
