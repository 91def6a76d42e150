"""A trial's files in RUN_DIR: whose they are, and from when on this run writes them."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from bert.core import rundir
from bert.core.dist import World
from bert.core.rundir import RunConfig
from bert.pretraining import identity
from bert.pretraining.build import chosen_kernels
from bert.pretraining.config import PretrainingConfig
from bert.training.mlperf import MlperfLog, ending_of
from common.env import ConfigError


def log_of(run: RunConfig) -> Path | None:
    """RUN_DIR/result_<TRIAL>.txt."""
    return run.run_dir and run.file("result_{}.txt")


class Ended(NamedTuple):
    """A trial that is complete. status: "success" or "aborted"."""

    log: Path
    status: str


def ended(config: PretrainingConfig) -> Ended | None:
    """How this very trial has ended, if its folder has it complete.

    Raises ConfigError if what lies there is of another run, which this one would write over.
    """
    run, log = config.run, log_of(config.run)
    if run.folder is None or log is None:
        return None
    known = identity.noted(run, run.trial)
    # An attempt's log is moved to the run's folder once it is complete.
    for path in (run.folder / log.name, log):
        # A process that was killed after run_stop may not have written the last checkpoint.
        if (status := ending_of(path)) and identity.is_whole(known):
            rundir.check_same(path, known, identity.of_trial(config))
            return Ended(path, status)
    # A log of an earlier version, whose checkpoints alone say whose it is.
    if log.is_file() and not known and not identity.has_begun(config):
        rundir.check_same(log, {}, {})
    mine = identity.that_stays(config)
    for other in sorted(run.folder.glob("result_*.txt")):
        known = identity.noted(run, other.stem.partition("_")[2])
        # The trials of a folder have one config.json, and seeds of their own.
        if other.name != log.name or mine["SEED"] is None:
            known.pop("SEED", None)
        if problem := rundir.difference(known, mine):
            cure = "give another RUN_DIR"
            cure += " and CHECKPOINT_DIR" if config.checkpoint.directory else ""
            raise ConfigError(f"{other} is {problem}: {cure}")
    return None


def begin(
    config: PretrainingConfig,
    world: World,
    log: MlperfLog,
    starting_point: dict[str, Any],
) -> None:
    """From here on the trial's files are this run's. A collective.

    Not before settings, data, weights and checkpoint are known to be right: what is refused must
    not have cost the log of an earlier process.
    """
    rundir.begin(config.run)
    if world.is_main:
        _begin_files(config, starting_point)
        log.open()
    world.barrier()  # an error of another rank must not be taken for an old one


def _begin_files(config: PretrainingConfig, starting_point: dict[str, Any]) -> None:
    folder = config.run.run_dir
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("error_{}.txt", "hang_{}.txt"):  # of an attempt before
            config.run.file(name).unlink(missing_ok=True)
        identity.note(config, identity.settings_of(config))
        others = {*folder.glob("result_*.txt")} - {log_of(config.run)}
        # That of the first trial: the others have its settings.
        if not others:
            model = dataclasses.asdict(config.model)
            model["gelu_form"] = config.model.gelu_form
            facts = chosen_kernels(config)
            if starting_point:
                facts["starting_point"] = starting_point
            rundir.write_description(config.run, config, {"model": model}, facts)
