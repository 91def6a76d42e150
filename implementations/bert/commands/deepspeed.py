"""The `deepspeed` launcher's file of variables, and DeepSpeed's checkpoints as ours."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bert.core import variables
from bert.deepspeed.checkpoints import INDEX, check, read, unreadable
from common.env import ConfigError
from common.files import whole_file

# Set by DeepSpeed's launcher.
PLACE_OF_A_RANK = {
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def deepspeed_config(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """A .deepspeed_env file, by which the `deepspeed` launcher hands what is set here to its nodes.

    python -m bert deepspeed-config --environment >.deepspeed_env
    """
    parser.add_argument(
        "--environment", action="store_true", required=True, help="NAME=value of what is set here"
    )
    parser.parse_args(arguments)
    for line in _environment(environ):
        print(line)
    return 0


def _environment(environ: Mapping[str, str]) -> Iterator[str]:
    """NAME=value of every variable of a run that is set, except the launcher's own.

    The launcher puts values in double quotes on a command line parsed by pdsh and a shell, and strips white space.
    Raises ConfigError for a value that would not arrive unchanged.
    """
    for entries in variables.groups().values():
        for entry in entries:
            value = environ.get(entry.name, "").strip()
            if value and entry.name not in PLACE_OF_A_RANK:
                if odd := sorted(set(value) & set('\n"$`\\%')):
                    what = "a line break" if odd[0] == "\n" else odd[0]
                    raise ConfigError(
                        f"{entry.name} has {what} in it, which DeepSpeed's launcher does not hand on"
                    )
                yield f"{entry.name}={value}"


def deepspeed_checkpoint(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """Converts a DeepSpeed checkpoint to a step_*.pt.

    FOLDER: CHECKPOINT_DIR/deepspeed_<step>, as CHECKPOINT_SHARDS=1 writes it. The reverse needs no command: with
    RESUME=1 a run continues from either kind, and writes the configured kind. Exit status: 0, or 2 for bad input.
    """
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path, help="step_<step>.pt")
    options = parser.parse_args(arguments)
    if not (options.folder / INDEX).is_file():
        raise ConfigError(
            f"{options.folder}: no {INDEX} in it: expected CHECKPOINT_DIR/deepspeed_<step>"
        )

    def as_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
        """Converts all mappings, such as those that read tensors on access, to dicts."""
        # The model is the masters again, and is added below as the same tensors.
        found = {name: value for name, value in state.items() if name != "model"}
        return {
            name: as_dicts(value) if isinstance(value, Mapping) else value
            for name, value in found.items()
        }

    try:
        # As rank 0 of 1: a command alone compares all files, not its share.
        check(options.folder, 0, 1)
    except Exception as error:  # depends on the kind of damage
        raise unreadable(options.folder, error) from None
    state = as_dicts(read(options.folder))
    state["model"] = state["optimizer"]["masters"]  # the same tensors, written once
    with whole_file(options.file) as partial, open(partial, "wb") as file:
        torch.save(state, file)
    return 0
