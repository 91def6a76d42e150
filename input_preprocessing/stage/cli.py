"""Shared by the stages' command lines: one-line errors, option types, number formatting."""

from __future__ import annotations

import argparse
import fcntl
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bert.data.records import DataError
from input_preprocessing import STAGES

UNSAID = {"do_lower_case": True, "nsp": True}  # options that data sets of before there was a choice say nothing of


def run_stage(stage: str) -> None:
    """Runs a stage with the options in sys.argv; a user's error becomes one line on stderr, exit code 1."""
    module_name, _, function = STAGES[stage][0].rpartition(".")
    module = importlib.import_module(f"input_preprocessing.{module_name}")
    main = getattr(module, function)
    parser = argparse.ArgumentParser(
        prog=f"python -m input_preprocessing {stage}",
        description=inspect.cleandoc(main.__doc__ or module.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        main(parser)
    except (DataError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        sys.exit(f"{parser.prog}: {where}{text}")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--jobs", type=positive, default=cpus, help="worker processes (default: the %(default)s CPUs)")


def add_switch(parser: argparse.ArgumentParser, flag: str, told: str) -> None:
    """An option that is on unless it is 0."""

    def yes_or_no(text: str) -> bool:
        values = {"1": True, "true": True, "0": False, "false": False}  # the reference's flag takes words
        if text.lower() not in values:
            raise argparse.ArgumentTypeError(f"{text!r}: expected 0 or 1")
        return values[text.lower()]

    parser.add_argument(flag, type=yes_or_no, default=True, metavar="0|1", help=f"{told} (default 1)")


def add_lower_case(parser: argparse.ArgumentParser) -> None:
    add_switch(parser, "--do-lower-case", "0 for a cased vocabulary: keep capitals and accents")


def check_not_source(target: Path, source: Path) -> None:
    """Raises DataError where a stage would write over what it reads."""
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(f"{target} is the source, and would be written over; give another target")


def named_folder(text: str) -> Path:
    """argparse type: a folder; an empty name (a shell variable that is not set) would be the current one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; is a variable not set?")
    return Path(text)


def positive(text: str) -> int:
    """argparse type: an integer from 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


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
