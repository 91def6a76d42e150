"""Finds result folders, with their system descriptions and accelerator counts."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ReviewError

POWER = "power"  # folder of a result's power files, in one subfolder per log
RESULT_NAME = re.compile(r"result_.*\.txt", re.DOTALL)
_MOST_OF_ERROR = 10_000  # bytes
_CRASH_NAME = re.compile(r"(?:failed|error)_(\d+)\.txt")


def natural_order(path: Path) -> list[Any]:
    """Sorts result_2 before result_10."""
    # Pairs, so that a number is never compared with a word: Python refuses to order them.
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", path.name)
    ]


def result_files(folder: Path) -> list[Path]:
    """The result_*.txt of a folder (the official tools' pattern, which folders match, too). Raises
    OSError.
    """
    return sorted(
        (folder / name for name in os.listdir(folder) if RESULT_NAME.fullmatch(name)),
        key=natural_order,
    )


def find_results(target: Path) -> list[tuple[Path, list[Path]]]:
    """(folder, logs) of every result at or below a path. Raises ReviewError if there is none.

    A file is one log, a folder with result_*.txt one result; other folders are searched. Skips the
    running_N folders of this repository's launcher, which hold unfinished trials.
    """
    if target.is_file():
        return [(target.parent, [target])]
    if not target.is_dir():
        raise ReviewError(f"{target}: no such file or folder")

    def unreadable(error: OSError) -> None:
        # The folder that the user named must be readable; below
        # it, one foreign folder stops nothing.
        why = f"{error.filename}: {error.strerror}"
        if error.filename == str(target):
            raise ReviewError(why)
        # Folders of live runs come and go while the tree is walked: not worth a warning.
        if not isinstance(error, FileNotFoundError):
            print(f"review: warning: skipped {why}", file=sys.stderr)

    results = []
    for name, folders, files in os.walk(target, onerror=unreadable):
        # Changed in place: os.walk descends only into the names that are left.
        folders[:] = sorted(
            folder for folder in folders if not folder.startswith((".", "running_"))
        )
        # A folder whose trials all crashed is a result, too: it must not vanish from the list.
        if any(map(RESULT_NAME.fullmatch, files)) or any(
            map(_CRASH_NAME.fullmatch, files)
        ):
            # Removed meanwhile, in a tree of live runs.
            with contextlib.suppress(FileNotFoundError):
                results.append((Path(name), result_files(Path(name))))
    if not results:
        raise ReviewError(
            f"{target}: no result_*.txt here or below; give a log, or the folder with the logs"
        )
    return results


def copy_runs(logs: Iterable[Path], target: Path) -> None:
    """Copies logs and their power files, numbered from 0. Raises OSError."""
    # The official checkers expect result_0.txt onwards; power files belong to a log by its name.
    for index, log in enumerate(logs):
        shutil.copyfile(log, target / f"result_{index}.txt")
        power = log.parent / POWER / log.stem
        if power.is_dir():
            shutil.copytree(power, target / POWER / f"result_{index}")


def read_text(path: Path, most: int = -1, errors: str = "strict") -> str:
    """Text of a regular file, or of its first ``most`` bytes. Raises OSError and ValueError."""
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with open(path, "rb") as file:
        return file.read(most).decode("utf-8", errors)


def crashes(folder: Path) -> dict[int, str]:
    """{trial: reason} of every trial that left no result: failed_N.txt, with the reason in
    error_N.txt.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        # A folder that cannot be listed has no known crashes; its logs are reported as unreadable.
        names = os.listdir(folder)
    reasons = {}
    matches = filter(None, map(_CRASH_NAME.fullmatch, names))
    for trial in sorted({int(match[1]) for match in matches}):
        # A trial with a result is a run; its error is that run's.
        if f"result_{trial}.txt" not in names:
            unknown = "crashed without a reason; see its failed_ and output_ files"
            reasons[trial] = _error(folder / f"error_{trial}.txt") or unknown
    return reasons


def error_beside(log: Path) -> str:
    """Why the run of a log ended in an error, by error_N.txt beside result_N.txt; empty if it did
    not.
    """
    trial = re.fullmatch(r"result_(\d+)\.txt", log.name)
    return _error(log.with_name(f"error_{trial[1]}.txt")) if trial else ""


def _error(path: Path) -> str:
    """The first line of a file that holds a reason, as a terminal shows it; the whole stands there."""
    with contextlib.suppress(OSError):
        start = read_text(path, _MOST_OF_ERROR, "replace").strip() or "an error"
        return start.splitlines()[0][:300]
    return ""


def read_object(path: Path, form: str = "") -> dict[str, Any]:
    """Reads a JSON object. ``form``: example for the error message. Raises ReviewError."""
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise ReviewError(f"{path}: {error.strerror}") from None
    # A file nested thousands of levels deep makes the parser run out of stack.
    except (ValueError, RecursionError) as error:
        raise ReviewError(f"{path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ReviewError(f"{path}: expected a JSON object{form and ', '}{form}")
    return content


def read_json(path: Path | None, section: str = "") -> dict[str, Any]:
    """A JSON object, or its entry ``section``; empty if it is missing, unreadable or not an
    object.
    """
    content: Any = {}
    with contextlib.suppress(ReviewError):
        content = {} if path is None else read_object(path)
    content = content.get(section) if section else content
    return content if isinstance(content, dict) else {}


def system_file(folder: Path) -> Path | None:
    """systems/SYSTEM.json of ORG/results/SYSTEM/BENCHMARK; None outside such a tree."""
    folder = folder.resolve()
    # Three levels are needed: BENCHMARK in SYSTEM in results in ORG.
    if len(folder.parents) < 3 or folder.parents[1].name != "results":
        return None
    return folder.parents[2] / "systems" / f"{folder.parent.name}.json"


def description(folder: Path) -> dict[str, Any]:
    """The system description of a result folder; empty if missing or unreadable."""
    return read_json(system_file(folder))


def organization(folder: Path) -> Path | None:
    """ORG of ORG/results/SYSTEM/BENCHMARK, recognised by its systems folder or the name bert; else
    None.
    """
    system = system_file(folder)
    # Any folder may be called results: only systems/ beside
    # it, or the name bert, tell a submission.
    if system is None or not (
        system.parent.is_dir() or folder.resolve().name == "bert"
    ):
        return None
    return system.parent.parent


def count_accelerators(folder: Path, rank_starts: int) -> int | None:
    """Accelerators of a result, from its system description, its run's files, or one init_start per
    rank.
    """
    content = description(folder)
    # The submission's own statement first, then the record of this repository's run, then a guess.
    nodes = count(content.get("number_of_nodes"))
    each = count(content.get("accelerators_per_node"))
    if nodes and each:
        return nodes * each
    ranks, on_gpus = count_ranks(folder)
    # One init_start is no evidence: many trainers log it on rank 0 alone.
    return ranks if ranks and on_gpus else rank_starts if rank_starts > 1 else None


def count_ranks(folder: Path) -> tuple[int | None, bool]:
    """Number of ranks of a run of this repository, and whether it had GPUs."""
    ranks = count(read_json(folder / "config.json", "dist").get("world_size"))
    return ranks, bool(read_json(folder / "environment.json").get("gpus"))


def count(value: Any) -> int | None:
    """A non-negative integer, possibly given as text; else None."""
    # No machine has more: arithmetic with hundreds of digits fails.
    digits = re.fullmatch(r"\s*(\d{1,9})(?:\.0)?\s*", str(value))
    return int(digits[1]) if digits and not isinstance(value, bool) else None


def run(command: Sequence[str], failure: str, timeout: float = 600) -> bytes:
    """Standard output of a command. Raises ReviewError with ``failure`` and the command's first
    error line.
    """
    try:
        # Without input: a tool that asks for a password must fail, not wait.
        ran = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise ReviewError(f"{failure}: {command[0]} is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReviewError(f"{failure}: {error}") from None
    if ran.returncode:
        reasons = ran.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ReviewError(
            f"{failure}: {text(reasons[0]) if reasons else 'no reason given'}"
        )
    return ran.stdout
