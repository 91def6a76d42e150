"""The runs of sweep.sh: prints the config and the settings of each, separated by a tab. Of the machine's own
Python, from 3.6 on.
"""

import itertools
import os
import re
import sys

FLAGS = ("--local", "--dry-run")


def refuse(problem: str) -> None:
    sys.exit(f"run: error: sweep: {problem}")


def settings(axis: str) -> "list[str]":
    """NAME=VALUE,VALUE; names joined by colons change together."""
    joined, _, values = axis.partition("=")
    names = joined.split(":")
    if not all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in names):
        refuse(f"{axis}: {joined} is not the name of a variable")
    if not values:
        refuse(f"{axis}: no value given")
    chosen = []
    for value in values.split(","):
        parts = value.split(":")
        # It becomes part of a folder's name.
        if not re.fullmatch(r"[\w.:/+-]+", value) or len(parts) != len(names):
            expected = f"expected {len(names)} value(s) joined by colons"
            refuse(f"{axis}: '{value}': {expected}")
        chosen.append(" ".join(map("{}={}".format, names, parts)))
    return chosen


def main(*words: str) -> None:
    rest = [word for word in words if word not in FLAGS]
    configs = [word for word in rest if "=" not in word]
    for config in configs:
        if not os.access(config, os.R_OK):
            refuse(f"{config}: no such config, or option")
    if not configs:
        refuse("no config given: launch/sweep.sh configs/config_....sh NAME=VALUE")
    # All combinations; all errors before the first run starts.
    axes = [settings(word) for word in rest if "=" in word]
    for config, *chosen in itertools.product(configs, *axes):
        print(config, " ".join(chosen), sep="\t")


if __name__ == "__main__":
    main(*sys.argv[1:])
