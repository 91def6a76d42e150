#!/usr/bin/env python3
"""Prints all configs as a table, or the differences between two of them.

configs.py                                                     a row for each config
configs.py DGXH100_4x8x48x1_pack DGXH100_1x8x48x1_pack         variables in which they differ
"""

import difflib
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# All that a config exports, in an environment of its own.
EXPORTS = "source configs/$0; exec env -0 -u PWD -u OLDPWD -u SHLVL -u _ -u PATH"


def exports(name: str) -> "dict[str, str]":
    """Name to value of what a config exports."""
    command = ["bash", "-euc", EXPORTS, f"config_{name}.sh"]
    given = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, cwd=FOLDER.parent, env=given, stdout=subprocess.PIPE, check=True
    )
    entries = [
        entry.split("=", 1) for entry in done.stdout.decode().split("\0") if entry
    ]
    return {name: value for name, value in entries if not name.endswith("_EXPORTS")}


def row(name: str) -> "list[object]":
    """The row of a config."""
    given = exports(name)
    keys = "DGXNNODES", "DGXNGPU", "BATCHSIZE", "GRADIENT_STEPS", "PACKING_FACTOR"
    nodes, gpus, rows, steps, packing = (int(given[key]) for key in keys)
    kind = "packed" if given["PACKED"] == "1" else "unpacked"
    batch = nodes * gpus * rows * steps * packing
    rate = f"{float(given['LR']):.6g}"
    division = given.get("SUBMISSION_DIVISION", "closed")
    return [
        name,
        nodes,
        gpus,
        f"{rows} x {steps} {kind}",
        batch,
        rate,
        given["MAX_STEPS"],
        division,
    ]


def known(given: str) -> str:
    """A config's name, given with or without folder, config_ and .sh."""
    name = Path(given).name
    name = name[len("config_") :] if name.startswith("config_") else name
    name = name[: -len(".sh")] if name.endswith(".sh") else name
    if not (FOLDER / f"config_{name}.sh").is_file():
        sys.exit(f"{given}: no such config; make configs lists them")
    return name


def main(names: "list[str]") -> None:
    """Prints the table, or the differences."""
    if not names:
        headings = [
            "config",
            "nodes",
            "GPUs",
            "rows per GPU",
            "batch",
            "LR",
            "steps",
            "division",
        ]
        configs = [
            path.stem[len("config_") :] for path in sorted(FOLDER.glob("config_*.sh"))
        ]
        for line in (headings, *map(row, configs)):
            print("{:<50} {:>7} {:>5}  {:<18} {:>7} {:>12} {:>8} {:>10}".format(*line))
    elif len(names) == 2:
        lists = [sorted(map("=".join, exports(known(name)).items())) for name in names]
        lines = difflib.unified_diff(*lists, *names, n=0, lineterm="")
        print(*(line for line in lines if not line.startswith("@@")), sep="\n")
    else:
        sys.exit("expected no argument, or the names of two configs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as ended:
        print(f"configs: error: {ended}", file=sys.stderr)
        sys.exit(2)
