"""``python -m certify``: one rank of an acceptance test. Writes RUN_DIR/certify_<node>.npz, one
file per node.

Exit status: 0 success, 1 crash, 2 bad input.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert.checkpoint.huggingface import config_beside
from bert.checkpoint.save import CheckpointConfig
from bert.core import extension, rundir
from bert.core.dist import Address
from bert.pretraining.config import PretrainingConfig
from certify import burn_in, hardware, tools
from certify.burn_in import BurnIn
from certify.load import Load, LoadConfig
from certify.store_group import StoreGroup
from certify.telemetry import Gpus, Sampler
from common.env import ConfigError, env, from_env
from common.process import run_and_exit
from review.acceptance import schema
from review.acceptance.coverage import AREAS
from review.acceptance.schema import Expected


@dataclass(frozen=True, kw_only=True)
class CertifyConfig(Address):
    """Rendezvous address, and the expected parts of each node."""

    node: str = env("SLURMD_NODENAME", "", doc="this node's name; set by Slurm")
    inventory: Path | None = env(
        "EXPECTED_INVENTORY", None, doc="parts of a good machine, written by --expect"
    )

    operator: str = env("CERTIFY_OPERATOR", "", doc="who signs the page of the test")
    required: str = env(
        "REQUIRED_TESTS",
        "",
        doc="areas that must be tested, such as `inventory,health,nccl`",
    )

    def __post_init__(self) -> None:
        # A misspelt area would be required of no node, and its absence would pass.
        if unknown := {*self.required.split(",")} - {*AREAS, ""}:
            raise ConfigError(
                f"REQUIRED_TESTS: {min(unknown)}: expected some of {', '.join(AREAS)}, with commas between"
            )

    def expected_parts(self) -> Any:
        """Contents of EXPECTED_INVENTORY; None if unset. Raises ConfigError."""
        if not self.inventory:
            return None
        try:
            parts = json.loads(self.inventory.read_text(encoding="utf-8"))
            # ** raises TypeError for a list or a number, which is JSON and no inventory.
            return {device: {**facts} for device, facts in {**parts}.items()}
        except (OSError, ValueError, TypeError):
            made = "python -m review certify RESULTS --expect FILE writes one"
            raise ConfigError(
                f"EXPECTED_INVENTORY={self.inventory}: not an inventory: {made}"
            ) from None


def certify(
    load: Load, folder: Path, measure: Callable[[], tuple[Any, Any]] = lambda: ([], [])
) -> None:
    """Runs the stages, unless an earlier process recorded them, then the burn-in if DURATION is
    set.

    measure: runs external tools first, while the GPUs are idle; returns rows of ``probes`` and
    entries of ``about``.
    """
    peers, seconds = load.peers, load.config.burn_in_seconds
    # burn_in.json is written after the record of the stages.
    done = bool(seconds) and (folder / burn_in.FIRST).exists()
    peers.barrier()  # every rank has checked before any writes
    if not done:
        about: dict[str, Any] = {"began": time.time()}
        if peers.leads_node:
            # Faults are counted before and after: what grew in between fails, what is older warns.
            # hardware asks NVML by index, so these Gpus need no handles.
            about["hardware"] = {
                "parts": hardware.inventory(Gpus([])),
                "before": hardware.health(Gpus([])),
                "log_before": hardware.kernel_log(),
            }
        rows, about["tools"] = measure()
        load.probes += rows
        sampler = telemetry(peers)
        load.run()
        write(folder, load, sampler, about)
        # A burn-in takes hours, and the rows of the stages are in the record now.
        load.rows.clear()
    if seconds:
        repeats = BurnIn(load, folder, seconds)
        repeats.run(telemetry(peers, repeats.sampled()))
    peers.leave()


def telemetry(peers: StoreGroup, earlier: np.ndarray | None = None) -> Sampler | None:
    """Starts sampling the node's GPUs on its first rank; None on others. earlier: rows of an
    earlier process.
    """
    if not peers.leads_node:
        return None
    count = len(peers.node_ranks) if torch.cuda.is_available() else 0
    # CUDA and NVML may number the GPUs differently; the UUID is the same in both.
    uuids = [
        str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
        for number in range(count)
    ]
    sampler = Sampler(Gpus(uuids), earlier=earlier)
    sampler.start()
    return sampler


def write(
    folder: Path, load: Load, sampler: Sampler | None, about: Mapping[str, Any]
) -> None:
    """Writes the measurements of a node's ranks, on its first rank. A collective. about: hardware
    and tools.
    """
    peers = load.peers
    # Through the store: a process group over all ranks exists only within a stage.
    measured = {
        "steps": np.concatenate(load.rows),
        "probes": np.array(load.probes, schema.PROBE),
    }
    for name, rows in measured.items():
        peers.store.set(f"{name}/{peers.rank}", rows.tobytes())  # type: ignore[arg-type]  # bytes work too
    devices = peers.exchange(burn_in.device_name(load.device))
    if sampler is not None:
        tables = {"telemetry": sampler.stop()}
        for name, rows in measured.items():
            parts = [
                np.frombuffer(peers.store.get(f"{name}/{rank}"), rows.dtype)
                for rank in peers.node_ranks
            ]
            tables[name] = np.concatenate(parts)
        node = peers.nodes[peers.node]
        for port, rate in load.ports.items():
            # What sent nothing was not measured: a node alone, or another network.
            about["hardware"]["parts"].setdefault(port, {})["GB/s sent"] = (
                round(rate, 3) or None
            )
        ranks = [peers.ranks[rank] for rank in peers.node_ranks]
        record = {
            "node": node,
            "nodes": peers.nodes,
            "size": peers.size,
            "ranks": [vars(info) | {"device": devices[info.rank]} for info in ranks],
            "began": about["began"],
            "ended": time.time(),
            "on_cpus": load.device.type == "cpu",
            "tools": about["tools"],
            "hardware": {
                **about["hardware"],
                "data_set": load.data_set,
                "after": hardware.health(Gpus([])),
                "kernel_log": hardware.kernel_log(),
            },
        }
        schema.write(folder / f"certify_{node}.npz", record, tables)
    # Every node has read its rows; left in the store, they would stay in rank 0's memory.
    peers.barrier()
    for name in measured:
        peers.store.delete_key(f"{name}/{peers.rank}")


def main(environ: Mapping[str, str]) -> int:
    """Runs the test on this rank; returns the exit status."""
    run = rundir.RunConfig()
    try:
        run = from_env(rundir.RunConfig, environ)
        extension.load(environ)
        config, load = from_env(CertifyConfig, environ), from_env(LoadConfig, environ)
        trainer = from_env(PretrainingConfig, environ)
        # The load of the run, whatever it saves or continues; of its weights only the shape counts.
        weights = trainer.checkpoint.init_checkpoint
        trainer = replace(
            trainer,
            bert_config=trainer.bert_config or (weights and config_beside(weights)),
            checkpoint=CheckpointConfig(),
            steps_this_run=0,
        )
        figures = from_env(Expected, environ).figures()
        wanted, parts = from_env(tools.ToolsConfig, environ), config.expected_parts()
        programs = wanted.programs(trainer.device.type == "cuda")
        trainer.check()
        ranks = trainer.dist
        # Nothing would flip, and the test would pass.
        if load.flipped and load.flipped[0] >= ranks.world_size:
            raise ConfigError(
                f"CERTIFY_FLIP={load.flip}: ranks are 0 to {ranks.world_size - 1}"
            )
        if trainer.zero.is_deepspeed:
            raise ConfigError(
                "ENGINE=deepspeed: certify uses the trainer's own engine: unset ENGINE"
            )
        if run.run_dir is None:
            raise ConfigError("RUN_DIR is not set: start it with certify.sh")
        store = config.store(
            "certify", ranks.rank, ranks.world_size, ranks.timeout_seconds
        )
        # Waits for all ranks.
        peers = StoreGroup(ranks, store, config.node or platform.node())
        # Rank 0 compares, and its reason is raised on all ranks. The kernels are compared later:
        # their choice is measured when Load is made.
        if load.burn_in_seconds:
            burn_in.refuse_other(
                run.run_dir,
                peers,
                burn_in.facts(trainer, peers) if peers.rank == 0 else {},
            )
        if peers.rank == 0:
            derived = {
                "expected": figures,
                "expected_parts": parts,
                "required_tests": config.required,
                "operator": config.operator,
                "burn_in_seconds": load.burn_in_seconds,
                "model": burn_in.described_model(trainer),
            }
            rundir.write_description(run, trainer, derived)
        peers.barrier()
        # A burn-in of half an hour or more has the time that a thorough diagnosis takes.
        thorough = load.burn_in_seconds >= 1800
        measure = partial(
            tools.run, wanted, programs, peers, run.run_dir, environ, thorough
        )
        certify(Load(load, trainer, peers), run.run_dir, measure)
    except Exception as error:
        return rundir.failed(run, "certify", error)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m certify",
        description="One rank of an acceptance test, started by ./certify.sh and configured by environment variables.",
        epilog="results: python -m review certify --help; docs/certify.md",
    )
    run_and_exit(lambda: main(os.environ) if parser.parse_args() else 2)
