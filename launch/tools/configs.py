#!/usr/bin/env python3
"""Prints all configs as a table."""

import os
import subprocess
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


def main() -> None:
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


if __name__ == "__main__":
    main()
