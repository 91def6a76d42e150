"""A run's folder: configuration, environment and, after a failure, the reason in one line."""

import contextlib
import dataclasses
import json
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bert.core import software
from bert.core.claim import Claim, OccupiedError
from bert.core.dist import HangError
from common.env import ConfigError, env, settings
from common.files import NoSpaceError, is_full, no_space, write_json
from common.process import say

# May differ between the ranks of a run.
_OWN = "RANK", "LOCAL_RANK", "OMP_NUM_THREADS"
# Settings of the process, the machine and the output, which do not change what a run computes.
OUTPUT = {
    "RESUME",
    "TRIAL",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "DIST_TIMEOUT",
    "OMP_NUM_THREADS",
    "LOG_EVERY_STEPS",
    "METRICS",
    "CAPTURE",
    "CAPTURE_STEPS",
    "PROFILE_STEPS",
    "STEPS_THIS_RUN",
    "CACHE_CLEARED",
    "CHECKPOINT_EVERY_STEPS",
    "CHECKPOINT_KEEP",
    "CHECKPOINT_BEST",
    "CHECKPOINT_SHARDS",
    "DEEPSPEED_CHECKPOINTS",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run's files go. The launch scripts set them."""

    run_dir: Path | None = env(
        "RUN_DIR", None, "folder of this run's files; unset: none are written"
    )
    trial: int = env(
        "TRIAL", 0, "number of this run in its folder: result_<TRIAL>.txt", at_least=0
    )
    log_dir: Path | None = env(
        "LOGDIR",
        None,
        "parent folder of the run folders; digests of data are kept there",
    )

    def file(self, name: str) -> Path:
        """A file of the trial, whose number takes the place of {}; only with RUN_DIR."""
        assert self.run_dir is not None
        return self.run_dir / name.format(self.trial)

    @property
    def folder(self) -> Path | None:
        """The run's folder, whatever the attempt."""
        if self.run_dir is None:
            return None
        folder = self.run_dir.absolute()
        # The launch scripts' folder of a trial that is running; a restart has another one.
        is_attempt = re.fullmatch(rf"running_{self.trial}(_\d+)?", folder.name)
        return folder.parent if is_attempt else folder

    @property
    def owner(self) -> dict[str, Any]:
        """What a checkpoint notes of whose it is."""
        folder = None if self.folder is None else str(self.folder)
        return {"trial": self.trial, "run_dir": folder}

    def owns(self, saved: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of this very trial."""
        # Without RUN_DIR no run can be told from another one with the same settings.
        return self.run_dir is not None and self.owner.items() <= saved.items()

    def has_left(self, result: str) -> bool:
        """Whether the run's folder has this file: of a trial that is complete."""
        return self.folder is not None and (self.folder / result).is_file()

    def claims(
        self, environ: Mapping[str, str], rank: int, checkpoints: Path | None
    ) -> contextlib.ExitStack:
        """Rank 0's claims on the folder of checkpoints and on this trial's files in RUN_DIR.

        Raises OccupiedError if another process writes to one of them.
        """
        job = environ.get("SLURM_JOB_ID", "").strip()
        # RUN_DIR first: where it is ours, it is told there that the other is not.
        folders = [
            (self.run_dir, "RUN_DIR", f".writer_{self.trial}"),
            (checkpoints, "CHECKPOINT_DIR", ".writer"),
        ]
        with contextlib.ExitStack() as held:
            for folder, name, file in folders:
                # One claim for all ranks: the others end with rank 0.
                if folder is not None and rank == 0:
                    held.enter_context(Claim(folder / file, f"{name}={folder}", job))
            # All or none: if one folder is occupied, leaving the stack gives the others back.
            return held.pop_all()
        raise AssertionError  # ExitStack does not suppress errors


def write_description(
    config: RunConfig,
    tree: Any,
    derived: dict[str, Any],
    chosen: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes config.json (every setting of the run, and derived values) and environment.json (the
    machine, and what was chosen for it).

    tree: the Config of the program, with its device.
    """
    if config.run_dir is None:
        return
    settings = dataclasses.asdict(tree) | derived
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_json(config.run_dir / "config.json", settings)
    machine = software.environment(tree.device)
    write_json(config.run_dir / "environment.json", machine | dict(chosen))


def add_to_environment(config: RunConfig, facts: dict[str, Any]) -> None:
    """Adds facts learnt after write_description, such as the attention backend, to
    environment.json.
    """
    if config.run_dir is None:
        return
    path = config.run_dir / "environment.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_json(path, known | facts)


def difference(known: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """The first difference between two runs in what both record, in words; empty if there is
    none.
    """
    differing = (name for name in mine if name in known and known[name] != mine[name])
    return next(
        (
            f"of a run with {name} {known[name]}, this one has {mine[name]}"
            for name in differing
        ),
        "",
    )


def shared_facts(tree: Any) -> dict[str, Any]:
    """What must be equal on all ranks of a run, for World.agree: settings, code and libraries.

    tree: the Config of the program. Contents of files are compared where they are read.
    """
    facts = {name: value for name, value in settings(tree).items() if name not in _OWN}
    facts["EXTENSION"] = tree.extension.identity
    return facts | {"code": software.code()} | software.libraries(tree.device)


def check_same(
    result: Path, known: Mapping[str, Any] | None, mine: Mapping[str, Any]
) -> None:
    """Raises ConfigError if the finished trial of ``result`` is another run. known: what it
    recorded of itself.
    """
    problem = "does not record its settings and data"
    if not known or (
        problem := difference(known, mine) and f"is {difference(known, mine)}"
    ):
        raise ConfigError(
            f"{result} {problem}: use the same settings and data, or another RUN_NAME (RUN_DIR)"
        )


_begun: set[RunConfig] = set()


def begin(config: RunConfig) -> None:
    """The trial's files are this process's from here on."""
    _begun.add(config)


def _may_write(config: RunConfig) -> bool:
    """Whether an error may be left in the folder: not beside logs of an earlier process, which it
    would seem to be of, or of another run.
    """
    folder = config.run_dir
    return folder is not None and (
        config in _begun or not any(folder.glob("result_*.txt"))
    )


def write_error(config: RunConfig, reason: str) -> None:
    """Leaves the reason of a failure for the launcher; the first reason is kept."""
    if not _may_write(config):
        return
    path = config.file("error_{}.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created, never overwritten: the first rank to fail knows the cause, those after it only
        # that a peer is gone.
        with path.open("x", encoding="utf-8") as file:
            file.write(reason + "\n")
    except OSError:
        pass  # The reason is on stderr as well; a full disk must not hide it behind a second error.


def fail(config: RunConfig, program: str, reason: str, status: int) -> int:
    """Reports the failure in one line on stderr, and in RUN_DIR for the launcher; returns the exit
    status.
    """
    reason = " ".join(reason.split())
    write_error(config, reason)
    say(f"{program}: error: {reason}")
    return status


def failed(config: RunConfig, program: str, error: Exception) -> int:
    """``fail`` for the error being handled, with its ``exit_status``; without one, status 1 after a
    traceback.

    For a HangError: RUN_DIR/hang_<TRIAL>.txt has the message and a line per missing rank.
    """
    if isinstance(error, OccupiedError) and error.folder == config.run_dir:
        config = RunConfig()  # not into RUN_DIR, which is another's
    if isinstance(error, HangError) and _may_write(config):
        path = config.file("hang_{}.txt")
        # Of all ranks one list is enough.
        with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as file:
            file.writelines([f"{error}\n", *map("rank {}\n".format, error.absent)])
    if status := getattr(error, "exit_status", 0):
        return fail(config, program, str(error), status)
    if is_full(error):
        full = (
            error
            if isinstance(error, NoSpaceError)
            else no_space(config.run_dir or Path())
        )
        return fail(config, program, str(full), 1)
    # Nobody foresaw this error, so its place is worth more than a short output.
    traceback.print_exc()
    message = f"{type(error).__name__}: {error}"[:2000]
    return fail(config, program, message + _advice(error), 1)


def _advice(error: Exception) -> str:
    """What to do after an error on a GPU; empty on a CPU."""
    if not torch.cuda.is_initialized():
        return ""
    if isinstance(error, torch.OutOfMemoryError):
        return ": lower BATCHSIZE and raise GRADIENT_STEPS, or set RECOMPUTE_LAYERS"
    return ": python tests/self_check.py names the setting that leaves out what fails"
