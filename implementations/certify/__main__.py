"""``python -m certify``: one rank of an acceptance test. Its node's file is RUN_DIR/certify_<node>.npz.

Exit status: 0; 1 it crashed; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert.core import rundir
from bert.core.dist import Address
from bert.core.env import ConfigError, env, from_env
from bert.core.process import run_and_exit
from bert.pretraining.config import Config as TrainerConfig
from bert.pretraining.memory import fitted
from certify import burn_in, hardware, schema, tools
from certify.burn_in import BurnIn
from certify.load import Config as LoadConfig
from certify.load import Load
from certify.meeting import Meeting
from certify.schema import Expected
from certify.telemetry import Cpus, Gpus, Sampler


@dataclass(frozen=True, kw_only=True)
class Config(Address):
    """Where the ranks meet, and what their nodes are expected to be."""

    node: str = env("SLURMD_NODENAME", "", doc="this node's name; set by Slurm")
    inventory: Path | None = env("EXPECTED_INVENTORY", None, doc="parts of a good machine, as --expect wrote them")

    def expected_parts(self) -> Any:
        """What the file of EXPECTED_INVENTORY holds; None without one. Raises ConfigError."""
        try:
            found = json.loads(self.inventory.read_text(encoding="utf-8")) if self.inventory else None
            if found is not None and not all(isinstance(facts, dict) for facts in {**found}.values()):
                raise TypeError
        except (OSError, ValueError, TypeError):
            made = "python -m review certify RESULTS --expect FILE writes one"
            raise ConfigError(f"EXPECTED_INVENTORY={self.inventory}: not an inventory: {made}") from None
        return found


def certify(load: Load, folder: Path, measure: Callable[[], tuple[Any, Any]] = lambda: ([], [])) -> None:
    """The stages, unless a burn-in that continues has recorded them, and the burn-in if DURATION asks for one.

    measure: runs other tests first, while the GPUs are free; rows of ``probes``, and what ``about`` says of them.
    """
    meeting, seconds = load.meeting, load.config.burn_in_seconds
    done = bool(seconds) and (folder / burn_in.FIRST).exists()
    meeting.barrier()  # all have looked before any writes
    if not done:
        about: dict[str, Any] = {}
        if meeting.rank == meeting.members(meeting.node)[0]:
            about["hardware"] = {"parts": hardware.inventory(Gpus([])), "before": hardware.health(Gpus([]))}
        rows, about["tools"] = measure()
        load.probes += rows
        sampler = telemetry(meeting)
        load.run()
        write(folder, load, sampler.stop() if sampler else np.empty(0, schema.SAMPLE), about)
        load.rows.clear()
    if seconds:
        repeats = BurnIn(load, folder, seconds)
        repeats.run(telemetry(meeting, repeats.sampled()))
    meeting.leave()


def telemetry(meeting: Meeting, earlier: np.ndarray | None = None) -> Sampler | None:
    """Samples the devices of a node on its first rank. earlier: rows of an earlier process."""
    if meeting.rank != meeting.members(meeting.node)[0]:
        return None
    count = len(meeting.members(meeting.node)) if torch.cuda.is_available() else 0
    uuids = [str(getattr(torch.cuda.get_device_properties(number), "uuid", "")) for number in range(count)]
    sampler = Sampler([Gpus(uuids), Cpus()], earlier=earlier)
    sampler.start()
    return sampler


def write(folder: Path, load: Load, samples: np.ndarray, told: Mapping[str, Any]) -> None:
    """The first rank of each node writes what its ranks have measured. Every rank calls it. told: by its devices."""
    meeting = load.meeting
    own = {"steps": np.concatenate(load.rows), "probes": np.array(load.probes, schema.PROBE)}
    for name, rows in own.items():
        meeting.store.set(f"{name}/{meeting.rank}", rows.tobytes())  # type: ignore[arg-type]  # bytes will do
    devices = meeting.exchange(burn_in.device_name(load.device))
    members = meeting.members(meeting.node)
    if meeting.rank == members[0]:
        tables = {"telemetry": samples}
        for name, rows in own.items():
            parts = [np.frombuffer(meeting.store.get(f"{name}/{rank}"), rows.dtype) for rank in members]
            tables[name] = np.concatenate(parts)
        node = meeting.nodes[meeting.node]
        ranks = [
            {"rank": rank, "local_rank": meeting.places[rank].local_rank, "device": devices[rank]} for rank in members
        ]
        about = {"node": node, "number": meeting.node, "nodes": meeting.nodes, "ranks": ranks, "size": meeting.size}
        about |= {"on_cpus": load.device.type == "cpu", "tools": told["tools"]}
        about["hardware"] = {**told["hardware"], "after": hardware.health(Gpus([]))}
        schema.write(folder / f"certify_{node}.npz", about, tables)
    meeting.barrier()
    for name in own:
        meeting.store.delete_key(f"{name}/{meeting.rank}")


def main(environ: Mapping[str, str]) -> int:
    """Runs the stages on this rank; returns the exit status."""
    run = rundir.Config()
    try:
        run = from_env(rundir.Config, environ)
        config, load = from_env(Config, environ), from_env(LoadConfig, environ)
        trainer, figures = fitted(from_env(TrainerConfig, environ)), from_env(Expected, environ).figures()
        wanted, parts = from_env(tools.Config, environ), config.expected_parts()
        programs = wanted.programs(trainer.device.type == "cuda")
        trainer.check()
        load.check(trainer.dist.world_size)
        if trainer.zero.is_deepspeed:
            raise ConfigError("ENGINE=deepspeed: machines are certified with our own engine: unset ENGINE")
        if run.run_dir is None:
            raise ConfigError("RUN_DIR is not set: start it by certify.sh")
        ranks = trainer.dist
        store = config.store("certify", ranks.rank, ranks.world_size, ranks.timeout_seconds)
        meeting = Meeting(ranks, store, config.node or platform.node())  # waits for all
        if load.burn_in_seconds:
            burn_in.refuse_other(run.run_dir, meeting, burn_in.facts(trainer, meeting) if meeting.rank == 0 else {})
        if meeting.rank == 0:
            derived = {"expected": figures, "burn_in_seconds": load.burn_in_seconds}
            derived |= {"expected_parts": parts}
            rundir.write_description(run, trainer, derived | burn_in.derived(trainer))
        meeting.barrier()
        measure = partial(tools.run, wanted, programs, meeting, run.run_dir, environ)
        certify(Load(load, trainer, meeting), run.run_dir, measure)
    except Exception as error:
        return rundir.failed(run, "certify", error)
    return 0


if __name__ == "__main__":
    words = argparse.ArgumentParser(
        prog="python -m certify",
        description="One rank of an acceptance test, as ./certify.sh starts it, settings by environment variables.",
        epilog="of the results: python -m review certify | baseline | watch, each with --help; docs/certify.md",
    )
    run_and_exit(lambda: main(os.environ) if words.parse_args() else 2)
