"""A trial's files in RUN_DIR: whose they are, and from when on this run writes them."""

import dataclasses
from pathlib import Path
from typing import Any

from bert.core import rundir
from bert.core.dist import World
from bert.core.rundir import RunConfig
from bert.pretraining import identity
from bert.pretraining.build import chosen_kernels
from bert.pretraining.config import PretrainingConfig
from bert.training.mlperf import MlperfLog, ending_of
from common.env import ConfigError
from common.files import object_of, write_json


def log_of(run: RunConfig) -> Path | None:
    """RUN_DIR/result_<TRIAL>.txt."""
    return run.run_dir and run.file("result_{}.txt")


def ended(config: PretrainingConfig) -> str:
    """How this very trial has ended, if RUN_DIR has it complete: "success" or "aborted"; else
    empty.

    Raises ConfigError if what lies there is of another run, which this one would write over.
    """
    log = log_of(config.run)
    if log is None:
        return ""
    # A process that was killed after run_stop may not have written the last checkpoint.
    if (ending := ending_of(log)) and identity.is_whole(_known(log)):
        rundir.check_same(log, _known(log), identity.of_trial(config))
        return ending
    # A log of an earlier version, whose checkpoints alone say whose it is.
    begun = config.run.has_begun(config.checkpoint.directory)
    if log.is_file() and not _known(log) and not begun:
        rundir.check_same(log, {}, {})
    mine = identity.that_stays(config)
    for other in sorted(log.parent.glob("result_*.txt")):
        # The trials of a folder have one config.json, and seeds of their own.
        seed = {"SEED"} if other != log or mine["SEED"] is None else set()
        compared = {name: value for name, value in mine.items() if name not in seed}
        if problem := rundir.difference(_known(other), compared):
            cure = "give another RUN_DIR"
            cure += " and CHECKPOINT_DIR" if config.checkpoint.directory else ""
            raise ConfigError(f"{other} is {problem}: {cure}")
    return ""


def _known(log: Path) -> dict[str, Any]:
    """What the run of a log noted of itself."""
    number = log.stem.partition("_")[2]
    known = object_of(log.with_name(f"identity_{number}.json"))
    # Earlier versions noted it unresolved, which says nothing; the checkpoint has what it was.
    return {
        name: value
        for name, value in known.items()
        if (name, value) != ("PRECISION", "auto")
    }


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
        note(config, identity.settings_of(config))
        others = {*folder.glob("result_*.txt")} - {log_of(config.run)}
        # That of the first trial: the others have its settings.
        if not others:
            model = dataclasses.asdict(config.model)
            model["gelu_form"] = config.model.gelu_form
            facts = chosen_kernels(config)
            if starting_point:
                facts["starting_point"] = starting_point
            rundir.write_description(config.run, config, {"model": model}, facts)


def note(config: PretrainingConfig, facts: dict[str, Any]) -> None:
    """Writes RUN_DIR/identity_<TRIAL>.json, for ``ended``."""
    if config.run.run_dir is not None:
        write_json(config.run.file("identity_{}.json"), facts)
