#!/usr/bin/env python3
"""Prints all configs as a table."""

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# All that a config exports, in an environment of its own.
EXPORTS = "source configs/$0; exec env -0"
ROW = "{:<50} {:>7} {:>5}  {:<18} {:>7} {:>12} {:>8} {:>10}"
HEADINGS = "config,nodes,GPUs,rows per GPU,batch,LR,steps,division"
COUNTS = "DGXNNODES DGXNGPU BATCHSIZE GRADIENT_STEPS PACKING_FACTOR"


def exports(file: str) -> "dict[str, str]":
    """Name to value of what a config exports."""
    command = ["bash", "-euc", EXPORTS, file]
    given = {"PATH": os.environ["PATH"]}
    shown = subprocess.check_output(command, cwd=str(FOLDER.parent), env=given)
    entries = [entry.partition("=") for entry in shown.decode().split("\0")]
    return {name: value for name, _, value in entries}


def main() -> None:
    print(ROW.format(*HEADINGS.split(",")))
    for path in sorted(FOLDER.glob("config_*.sh")):
        given = exports(path.name)
        nodes, gpus, rows, steps, packing = (
            int(given[name]) for name in COUNTS.split()
        )
        kind = "packed" if given["PACKED"] == "1" else "unpacked"
        batch = nodes * gpus * rows * steps * packing
        rate = f"{float(given['LR']):.6g}"
        division = given.get("SUBMISSION_DIVISION", "closed")
        name, shape = given["DGXSYSTEM"], f"{rows} x {steps} {kind}"
        row = (name, nodes, gpus, shape, batch, rate, given["MAX_STEPS"], division)
        print(ROW.format(*row))


if __name__ == "__main__":
    main()
