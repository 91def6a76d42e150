"""Options of command lines, described in YAML files."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """argparse type: an integer from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


TYPES: dict[str, Callable[[str], Any]] = {
    "path": Path,
    "positive": positive,
    "int": int,
    "float": float,
}


def add_options(
    parser: argparse._ActionsContainer,
    name: str,
    described: Mapping[str, Any],
    types: Mapping[str, Callable[[str], Any]] = TYPES,
) -> None:
    """Adds the options of a command: argparse's arguments by flags, or the name of others that are
    "included"; either: mutually exclusive ones.
    """
    # The CPUs of this process: under Slurm or taskset fewer than the machine has.
    cpus = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    for flags, how in described[name].items():
        if how == "included":
            add_options(parser, flags, described, types)
        elif flags == "either":
            group = parser.add_mutually_exclusive_group()
            add_options(group, flags, described[name], types)
        elif flags == "group":
            titled = parser.add_argument_group(how["title"])
            add_options(titled, "options", {**described, **how}, types)
        else:
            kind = {"type": types[how["type"]]} if "type" in how else {}
            usual = {"default": cpus} if flags == "--jobs" else {}
            parser.add_argument(*flags.split(), **how | kind | usual)
