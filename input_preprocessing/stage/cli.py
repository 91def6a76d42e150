"""What the stages' command lines share: one-line errors, option types, number formatting."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bert.data.records import DataError

Main = Callable[[argparse.Namespace], None]


def run(parser: argparse.ArgumentParser, main: Main, arguments: list[str] | None = None) -> None:
    """Parses the command line and runs `main`; a user's error becomes one line on stderr, exit code 1."""
    options = parser.parse_args(arguments)
    try:
        main(options)
    except (DataError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sys.exit(f"{parser.prog}: {where}{text}")


def stage_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of `python -m input_preprocessing.<module>`; its docstring is the description."""
    return argparse.ArgumentParser(
        prog=f"python -m input_preprocessing.{module}",
        description=(description or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """--jobs: worker processes; the result never depends on it."""
    parser.add_argument(
        "--jobs", type=positive, default=available_cpus(), help="worker processes (default: the %(default)s CPUs here)"
    )


def add_lower_case(parser: argparse.ArgumentParser) -> None:
    """--do-lower-case."""
    parser.add_argument(
        "--do-lower-case", type=_yes_or_no, default=True, metavar="0|1",
        help="0 for a cased vocabulary: keep capitals and accents (default 1)",
    )  # fmt: skip


def _yes_or_no(text: str) -> bool:
    """argparse type: as the reference's flag takes it, or 0 and 1."""
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 or 1")
    return values[text.lower()]


def check_not_source(target: Path, source: Path) -> None:
    """Raises DataError where a stage would write over what it reads."""
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(f"{target} is the source, and would be written over; give another target")


def named_folder(text: str) -> Path:
    """argparse type: a folder; an empty name (a variable of the shell that is not set) would be the current one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; is a variable not set?")
    return Path(text)


def positive(text: str) -> int:
    """argparse type: an integer from 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def part_of(text: str) -> tuple[int, int]:
    """argparse type: '1/4' -> (1, 4), the second of four parts."""
    number, _, count = text.partition("/")
    if not number.isdecimal() or not count.isdecimal() or int(number) >= int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; give I/N with I from 0 to N - 1")
    return int(number), int(count)


@contextmanager
def lock_folder(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Keeps two runs from writing to one folder; the lock ends with the process, kill -9 included.

    Raises:
        DataError: another run holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror}; choose another folder or permit it") from error
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another run is writing to {folder}; wait for it or stop it") from error
        except OSError:  # a file system without locks
            pass
        yield


def available_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def human_bytes(size: float) -> str:
    """1234567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def human_time(seconds: float) -> str:
    """75 -> '1:15'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
