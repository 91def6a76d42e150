"""Command lines of the stages, described in options.yaml: one-line errors, option types, number
formatting.
"""

import argparse
import fcntl
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bert.data.records import DataError
from common.options import TYPES, add_options
from common.tables import read_table
from input_preprocessing import STAGES


def run_stage(stage: str) -> None:
    """Runs a stage with the options in sys.argv; user errors become one line on stderr and exit
    code 1.
    """
    module_name, _, function = STAGES[stage][0].rpartition(".")
    # Of all stages only this one is imported, with the libraries that it needs.
    module = importlib.import_module(f"input_preprocessing.{module_name}")
    main = getattr(module, function)
    parser = parser_of(
        stage,
        prog=f"python -m input_preprocessing {stage}",
        description=inspect.cleandoc(main.__doc__ or module.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args()
    try:
        main(options)
    except DataError as error:
        sys.exit(f"{parser.prog}: {error}")
    except OSError as error:
        text = error.strerror or str(error)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            text = "a file is where a folder has to be; move it away"
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(f"{parser.prog}: {where}{text}")


def say(text: str) -> None:
    """What a stage reports: its output goes to files."""
    print(text, file=sys.stderr)


def check_not_source(target: Path, source: Path) -> None:
    """Raises DataError if a stage would overwrite its source."""
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(
            f"{target} is the source and would be overwritten; give another target"
        )


def named_folder(text: str) -> Path:
    """argparse type: a folder; rejects an empty name (an unset shell variable), which would be the
    current one.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; is a variable unset?")
    return Path(text)


def yes_or_no(text: str) -> bool:
    """argparse type: 1 or 0, or true or false like the reference's flags."""
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 or 1")
    return values[text.lower()]


def parse_phases(text: str) -> tuple[tuple[int, int], ...]:
    """argparse type: '128:20,512:80' -> ((128, 20), (512, 80)), maximal tokens and masked tokens of
    a sequence.
    """
    if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        # What --phases without a value stands for.
        published = OPTIONS["prepare"]["--phases"]["const"]
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of LENGTH:MASKED, such as {published}"
        )
    numbers = [int(number) for number in re.split("[:,]", text)]
    phases = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if any(short >= long for (short, _), (long, _) in itertools.pairwise(phases)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: the lengths of the phases are not ascending"
        )
    return phases


def parse_share(text: str) -> float:
    """argparse type: above 0 and at most 0.5."""
    if not 0 < (share := float(text)) <= 0.5:
        raise argparse.ArgumentTypeError(f"{share} is not above 0 and at most 0.5")
    return share


OPTIONS = read_table(__file__, "options.yaml")
_TYPES = TYPES | {
    "folder": named_folder,
    "switch": yes_or_no,
    "phases": parse_phases,
    "share": parse_share,
}


def parser_of(stage: str, **about: Any) -> argparse.ArgumentParser:
    """Parser of a stage, or of a group of shared options; ``about``: arguments of
    ArgumentParser.
    """
    parser = argparse.ArgumentParser(**about)
    add_options(parser, stage, OPTIONS, _TYPES)
    return parser


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keeps two runs from writing to the same folder; the lock ends with the process, even on kill
    -9.

    Raises:
        DataError: another run holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror}; fix it or choose another folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another run is writing to {folder}; wait for it or stop it"
            ) from error
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
