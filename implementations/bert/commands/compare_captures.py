"""``python -m bert compare-captures``."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from bert.data.records import DataError
from bert.training.debug import differences


def compare_captures(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """Compares what two runs with CAPTURE computed, module by module.

    Exit status: 0 all is equal within --tolerance, 1 something differs (the first module is named),
    2 bad input.
    """
    parser.add_argument("one", type=Path, help="a capture file, or a folder of them")
    parser.add_argument("other", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative difference to ignore"
    )
    options = parser.parse_args(arguments)

    def files(path: Path) -> dict[str, Path]:
        if path.is_dir():
            # By number: step 10 comes after step 2, which it may only follow.
            captures = sorted(
                path.glob("step_*.safetensors"),
                key=lambda file: [
                    int(number) for number in re.findall(r"\d+", file.name)
                ],
            )
            return {capture.name: capture for capture in captures}
        return {"": path} if path.is_file() else {}

    captures, others = files(options.one), files(options.other)
    # Unequal names would compare different steps, or leave out some without a word.
    if not captures or captures.keys() != others.keys():
        raise DataError(
            f"{options.one} and {options.other} hold no captures of the same steps and ranks"
        )
    first_difference = None
    for name, path in captures.items():
        for module, absolute, relative in differences(path, others[name]):
            if relative > options.tolerance:
                # In the order of the computation: what follows the first difference may only
                # inherit it.
                first_difference = (
                    first_difference or f"{module}{f' of {name}' if name else ''}"
                )
                print(
                    f"{name}  {module:<60} {absolute:10.3g} {relative:10.3g}".lstrip()
                )
    print(
        f"the first that differs: {first_difference}" if first_difference else "equal"
    )
    return 1 if first_difference else 0
