"""Burn-in: hours of the same steps, each repeat bit for bit equal to the first.

RUN_DIR/burn_in.json holds the checksums of the first repeat, burn_in_<node>.jsonl a line per
repeat, burn_in_<node>.npz the node's telemetry. A test resumes from them only with the same
machines, settings and versions: others compute other bits.
"""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert.core import software
from bert.kernels import precision
from bert.pretraining.config import PretrainingConfig
from certify import hardware
from certify.load import Load
from certify.store_group import StoreGroup
from certify.telemetry import Gpus, Sampler
from common.durations import duration
from common.env import settings
from common.files import text_of, write_text
from review.acceptance import schema

FIRST = "burn_in.json"
SAVE_SECONDS = 300.0  # between writes of the telemetry
DRIVER = Path("/proc/driver/nvidia/version")


def described_model(trainer: PretrainingConfig) -> dict[str, Any]:
    """The model itself, whose file may change."""
    return dataclasses.asdict(trainer.model) | {"gelu_form": trainer.model.gelu_form}


def facts(trainer: PretrainingConfig, peers: StoreGroup) -> dict[str, Any]:
    """Everything but the choice of kernels that determines the weights bit for bit: ranks,
    settings, versions.
    """
    environment = software.environment(trainer.device)
    described: dict[str, Any] = {
        "ranks": peers.size,
        "nodes": ", ".join(peers.nodes),
        # The number of threads determines the order of a CPU's sums, and so their rounding.
        "OMP_NUM_THREADS": trainer.dist.num_threads,
        "device": device_name(trainer.device),
        "driver": next(iter(text_of(DRIVER).splitlines()), None),
        "commit": (environment["git_commit"] or "unknown").removesuffix("-dirty"),
    }
    for group in ("optim", "recompute", "data", "zero", "graph", "precision"):
        described |= settings(getattr(trainer, group))
    settled = precision.resolved(trainer.precision.precision, trainer.device)
    # Another version of a library may choose other kernels, which round differently.
    versions = {name: environment[name] for name in ("cuda", "cudnn", "nccl", "python")}
    described |= environment["packages"] | versions
    return described | {"PRECISION": settled, **described_model(trainer)}


def device_name(device: torch.device) -> str:
    """Name of a rank's device in records."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or "CPU"
    )


def refuse_other(folder: Path, peers: StoreGroup, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError on all ranks if the burn-in in this folder was started with other
    facts.
    """
    reason, path = "", folder / FIRST
    if peers.rank == 0 and path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8")).get("facts", {})
        # The default, a dictionary that no value equals, makes a fact that was not recorded differ.
        name = next(
            (
                name
                for name, value in facts.items()
                if earlier.get(name, facts) != value
            ),
            None,
        )
        if name is not None:
            message = (
                f"{name}={earlier[name]}, now {facts[name]}"
                if name in earlier
                else f"{name} is not recorded"
            )
            reason = f"{folder} has a burn-in that cannot be resumed: {message}: choose another RUN_NAME"
    peers.refuse(reason)


class BurnIn:
    """The burn-in of one rank. Every rank creates one and calls ``run``."""

    def __init__(self, load: Load, folder: Path, duration: float) -> None:
        """duration: seconds in total, including earlier processes."""
        self.load, self.peers, self.duration = load, load.peers, duration
        self.folder, self.first = folder, folder / FIRST
        self.facts: dict[str, Any] = {}
        if self.peers.rank == 0:
            # Load has resolved ATTENTION=auto by now; another backend rounds differently.
            self.facts = facts(load.trainer, self.peers) | settings(
                load.trainer.kernels
            )
        self.node = self.peers.nodes[self.peers.node]
        self.journal, self.samples = (
            folder / f"burn_in_{self.node}.{kind}" for kind in ("jsonl", "npz")
        )

    def sampled(self) -> np.ndarray:
        """Telemetry saved by an earlier process."""
        columns = (
            schema.read(self.samples)[1]["telemetry"]
            if self.samples.exists()
            else {"time": ()}
        )
        samples = np.empty(len(columns["time"]), schema.SAMPLE)
        for name, column in columns.items():
            samples[name] = column
        return samples

    def run(self, sampler: Sampler | None = None) -> None:
        """Repeats until the time is over. sampler: already started; stopped here."""
        # Again, now with the kernels among the facts.
        refuse_other(self.folder, self.peers, self.facts)
        saved = time.monotonic()
        trainee = self.load.trainee(self.load.alone)
        count = self.load.count_steps(trainee, self.load.config.rounds)
        # All ranks resume from the same repeat, with the checksums of the first.
        reference, repeat, elapsed = self._progress()
        # A resumed test takes the steps of the first repeat, however fast the machine is today.
        count = len(reference) or count
        self.load.check_drill(count)
        started = time.monotonic() - elapsed
        # All ranks agree on elapsed: one that stopped by its own clock would leave the others
        # waiting.
        while not reference or elapsed < self.duration:
            self.peers.barrier()
            # From the initial weights. The drill spares the first repeat, the reference.
            with trainee.step.rollback():
                checksums = self.load.take_steps(
                    trainee, count, drill=bool(reference)
                ).tolist()
                seconds = statistics.median(
                    trainee.recorder.take().sum(axis=1).tolist()
                )
            # A rank that is wrong in its first repeat must not become the reference of the others.
            if not reference:  # the first repeat of most ranks
                everyone = Counter(map(tuple, self.peers.exchange(checksums)))
                reference = [*everyone.most_common(1)[0][0]]
                self._write_first(reference)
            pairs = enumerate(zip(checksums, reference, strict=True))
            different = next(
                (step for step, (mine, first) in pairs if mine != first), -1
            )
            repeat += 1
            elapsed = self.peers.max(time.monotonic() - started)
            self._report(repeat, elapsed, seconds, different)
            # A burn-in may end with the machine: what was sampled until then is evidence.
            if sampler is not None and time.monotonic() - saved >= SAVE_SECONDS:
                self._save(sampler.rows())
                saved = time.monotonic()
        if sampler is not None:
            self._save(sampler.stop())

    def _save(self, samples: np.ndarray) -> None:
        schema.write(
            self.samples,
            {
                "node": self.node,
                "ended": time.time(),
                "after": hardware.health(Gpus([])),
                "kernel_log": hardware.kernel_log(),
            },
            {"telemetry": samples},
        )

    def _progress(self) -> tuple[list[int], int, float]:
        """Checksums of the first repeat, and repeats and seconds done by earlier processes; the
        same on all ranks.
        """
        checksums: list[int] = []
        text = (
            self.journal.read_text(encoding="utf-8")
            if self.peers.leads_node and self.journal.exists()
            else ""
        )
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line is incomplete after a power failure
            write_text(self.journal, whole)
        if self.peers.rank == 0 and self.first.exists():
            checksums = json.loads(self.first.read_text(encoding="utf-8"))["checksums"]
            # DURATION may differ from before; other facts would have been refused.
            self._write_first(checksums)
        last = json.loads(whole.splitlines()[-1]) if whole else {}
        done = checksums, last.get("repeat", 0), last.get("elapsed", 0.0)
        answers = self.peers.exchange(done if self.peers.leads_node else None)
        # A repeat that a node did not record is taken again.
        _, repeat, elapsed = min(filter(None, answers), key=lambda answer: answer[1])
        return answers[0][0], repeat, elapsed

    def _write_first(self, checksums: list[int]) -> None:
        """Writes burn_in.json on rank 0."""
        if self.peers.rank == 0:
            about = {
                "duration": self.duration,
                "checksums": checksums,
                "facts": self.facts,
            }
            write_text(self.first, json.dumps(about) + "\n")

    def _report(
        self, repeat: int, elapsed: float, seconds: float, different: int
    ) -> None:
        """Appends a line to this node's journal; rank 0 prints one. different: first step that
        differs, or -1.
        """
        answers = self.peers.exchange([seconds, different])
        if self.peers.leads_node:
            of_node = {rank: answers[rank] for rank in self.peers.node_ranks}
            line = {
                "repeat": repeat,
                "elapsed": elapsed,
                "seconds": {rank: spent for rank, (spent, _) in of_node.items()},
                "different": {
                    rank: step for rank, (_, step) in of_node.items() if step >= 0
                },
            }
            with open(self.journal, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                # A machine that loses power is what the test looks
                # for: these lines must survive it.
                os.fsync(file.fileno())
        wrong = [rank for rank, (_, step) in enumerate(answers) if step >= 0]
        message = (
            f"rank {', '.join(map(str, wrong))} differs from the first"
            if wrong
            else "all identical"
        )
        self.peers.print_rank0(
            f"burn-in {duration(elapsed)} of {duration(self.duration)}: repeat {repeat}, {message}"
        )
