"""Command lines of the benchmarks: what cannot be measured is refused in one line, before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Takes the script's docstring for its help; an error is one line, exit status 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see --help\n")


def at_least(least: int) -> Callable[[str], int]:
    """Of an integer."""

    def integer(text: str) -> int:
        if text.isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least {least}")

    return integer


integer = at_least(1)
natural = at_least(0)  # of which 0 leaves something out


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def file(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file: give one that is there")
    return path


def new_folder(text: str) -> Path:
    """A folder to write to, which need not be there."""
    path = Path(text)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: choose a folder that can")
    return path


def folder_with(*names: str, advice: str = "give the folder that has it") -> Callable[[str], Path]:
    """Of a folder in which these files and folders are."""

    def folder(text: str) -> Path:
        path = Path(text)
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise argparse.ArgumentTypeError(f"{text}: no {' and no '.join(missing)} in it: {advice}")
        return path

    return folder
