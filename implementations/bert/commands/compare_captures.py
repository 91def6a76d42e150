"""``python -m bert compare-captures A B``: what two runs with CAPTURE computed, module by module.

A and B are files of a capture, or its folders. Exit status: 0 all is equal within --tolerance, 1 something differs (the
first module is named), 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from bert.core.process import hard_exit
from bert.data.records import DataError
from bert.training.capture import differences


def files(path: Path) -> dict[str, Path]:
    """The files of a capture by name; of a single file under no name."""
    if path.is_dir():
        return {found.name: found for found in sorted(path.glob("step_*.safetensors"))}
    return {"": path} if path.is_file() else {}


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Compares; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bert compare-captures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference that counts as none")
    options = parser.parse_args(arguments)
    one, other = files(options.one), files(options.other)
    try:
        if not one or one.keys() != other.keys():
            raise DataError(f"{options.one} and {options.other} hold no captures of the same steps and ranks")
        first = _first_that_differs(one, other, options.tolerance)
    except DataError as error:
        print(f"compare_captures: error: {error}", file=sys.stderr)
        return 2
    print(f"the first that differs: {first}" if first else "equal")
    return 1 if first else 0


def _first_that_differs(one: dict[str, Path], other: dict[str, Path], tolerance: float) -> str | None:
    """Prints every tensor that does. Raises DataError."""
    first = None
    for name, path in one.items():
        for module, absolute, relative in differences(path, other[name]):
            if relative > tolerance:
                first = first or f"{module}{f' of {name}' if name else ''}"
                print(f"{name}  {module:<60} {absolute:10.3g} {relative:10.3g}".lstrip())
    return first


if __name__ == "__main__":
    hard_exit(main(sys.argv[1:], os.environ))
