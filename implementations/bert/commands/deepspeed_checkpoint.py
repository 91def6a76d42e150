"""``python -m bert deepspeed-checkpoint FOLDER FILE``: a checkpoint of DeepSpeed's as a step_*.pt of our own.

FOLDER: CHECKPOINT_DIR/deepspeed_<step>, as DEEPSPEED_CHECKPOINTS=1 writes it. The other way needs no command: with
RESUME=1 a run goes on from either kind, and writes the kind that it is asked for. Exit status: 0, or 2 for bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bert.core.env import ConfigError
from bert.core.files import whole_file
from bert.deepspeed.checkpoints import INDEX, read


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Converts; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bert deepspeed-checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path, help="step_<step>.pt")
    options = parser.parse_args(arguments)
    try:
        if not (options.folder / INDEX).is_file():
            raise ConfigError(f"{options.folder}: no {INDEX} in it: expected CHECKPOINT_DIR/deepspeed_<step>")
        state = whole(read(options.folder))
        state["model"] = state["optimizer"]["masters"]  # the same tensors, written once
    except ConfigError as error:
        print(f"bert deepspeed-checkpoint: error: {error}", file=sys.stderr)
        return 2
    with whole_file(options.file) as partial, open(partial, "wb") as file:
        torch.save(state, file)
    return 0


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """With every mapping read into a dict."""
    return {
        key: whole(value) if isinstance(value, Mapping) else value for key, value in state.items() if key != "model"
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
