"""From DeepSpeed to our own engine: converts its JSON to exports, and its checkpoints to ours."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bert.core import variables
from bert.deepspeed import ds_config
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
    """A DeepSpeed JSON as exports for our own engine, and a .deepspeed_env file.

        python -m bert deepspeed-config ds.json --ranks 8        what to export instead of ENGINE=deepspeed
        python -m bert deepspeed-config --environment            what is set here, for the `deepspeed` launcher's nodes

    Exit status: 0, or 2 for a JSON that our own engine does not support.
    """
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, help="DeepSpeed's JSON")
    what.add_argument(
        "--environment",
        action="store_true",
        help="NAME=value of what is set here, for .deepspeed_env",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs of the run, by which train_batch_size is divided"
    )
    options = parser.parse_args(arguments)
    lines = list(
        _environment(environ) if options.environment else _exports(options.file, options.ranks)
    )
    if lines:  # the launcher cannot read an empty line
        print("\n".join(lines))
    return 0


def _exports(path: Path, ranks: int) -> Iterator[str]:
    """Shell exports. Raises ConfigError, naming the entry, for what our own engine does not support."""
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}: expected at least 1")
    found = ds_config.read(path)
    meanings, zero = ds_config.meanings(found, ranks), found.get("zero_optimization", {})
    # Both spellings: cpu_offload is that of DeepSpeed's older versions.
    offloads = [
        (zero.get(key) or {}).get("device", "cpu" if zero.get(older) else "none") != "none"
        for key, older in (
            ("offload_optimizer", "cpu_offload"),
            ("offload_param", "cpu_offload_param"),
        )
    ]
    # Refused, not translated to less: a model that needs these would not fit without them.
    if zero.get("stage") == 3 or any(offloads):
        missing = "our own engine has no stage 3 and no offload"
        raise ConfigError(f"{path}: zero_optimization: {missing}: set ENGINE=deepspeed")
    for key, name, value, explicit in meanings:
        yield f"export {name}={shlex.quote(value)} # {key}{'' if explicit else ', the default'}"
    for key in ds_config.deepspeed_only(found):
        yield f"# {key}: used by DeepSpeed alone, without a variable here"


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
