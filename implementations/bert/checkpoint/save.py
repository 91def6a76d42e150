"""A run's own checkpoints: saved on a thread, whole or not at all, listed, and read to resume from."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert.checkpoint import huggingface, sharded
from bert.core.env import ConfigError, env
from bert.core.files import damage, whole_file


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run starts from and what it leaves behind."""

    init_checkpoint: Path | None = env(
        "INIT_CHECKPOINT",
        None,
        doc="weights to start from: .pt, .safetensors, folder of step_* or a model of the Hub",
    )
    init_optimizer: bool = env(
        "INIT_OPTIMIZER", False, doc="1 takes the optimizer's moments from INIT_CHECKPOINT too, and counts steps from 0"
    )
    directory: Path | None = env("CHECKPOINT_DIR", None, doc="folder of checkpoints to resume from; unset writes none")
    every_steps: int = env("CHECKPOINT_EVERY_STEPS", 0, at_least=0, doc="steps between checkpoints; 0: none")
    shards: bool = env(
        "CHECKPOINT_SHARDS", False, doc="1: each rank writes its part, to a shared folder; with SHARD_OPTIMIZER=1"
    )
    keep: int = env("CHECKPOINT_KEEP", 2, at_least=1, doc="newest checkpoints to keep")
    resume: bool = env("RESUME", False, doc="1 resumes from the newest checkpoint in CHECKPOINT_DIR, if there is one")

    def __post_init__(self) -> None:
        """Resolves an INIT_CHECKPOINT that is a folder to its newest checkpoint, or its weights."""
        if self.init_checkpoint is not None and self.init_checkpoint.is_dir():
            found = [*saved_checkpoints(self.init_checkpoint)[-1:], huggingface.weights_in(self.init_checkpoint)]
            object.__setattr__(self, "init_checkpoint", found[0] or self.init_checkpoint)

    def check(self) -> None:
        """Raises ConfigError where two of the settings contradict each other, or a file is missing."""
        if self.directory is None and (self.every_steps or self.resume):
            raise ConfigError("CHECKPOINT_EVERY_STEPS or RESUME is set and CHECKPOINT_DIR is not: give the folder")
        if self.init_optimizer and self.init_checkpoint is None:
            raise ConfigError("INIT_OPTIMIZER=1 needs INIT_CHECKPOINT")
        if self.init_checkpoint is not None and not self.init_checkpoint.is_file():
            path = self.init_checkpoint
            what = "no step_* and no model.safetensors in it" if path.is_dir() else "no such file"
            if not path.exists() and not path.is_absolute() and not path.suffix and len(path.parts) < 3:
                fetch = f"hf download {path} --local-dir {path.name}"
                what += f" or folder; a model of the Hub is not fetched: {fetch}, then INIT_CHECKPOINT={path.name}"
            raise ConfigError(f"INIT_CHECKPOINT={path}: {what}")


def save_checkpoint(config: Config, step: int, state: dict[str, Any]) -> Path:
    """Writes CHECKPOINT_DIR/step_<step>.pt whole or not at all, then removes all but the newest ``keep``."""
    assert config.directory is not None
    config.directory.mkdir(parents=True, exist_ok=True)
    path = config.directory / f"step_{step:010d}.pt"
    with whole_file(path, sharded.num_bytes(state)) as partial, open(partial, "wb") as file:
        torch.save(state, file)
    sharded.prune(config.directory, config.keep)
    return path


class Writer:
    """Saves checkpoints on a thread, one at a time, from a copy in host memory.

    One that cannot be written is a warning, and the run continues to the next; ``error`` is that of the last one.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.error: Exception | None = None
        self.abandoned = threading.Event()  # set where other ranks may never write their shards any more
        self._thread: threading.Thread | None = None

    def start(self, step: int, state: dict[str, Any], part: sharded.Part | None = None) -> None:
        """Copies the state, and returns while it is being written; waits for the one before.

        part: this rank's share of a checkpoint that all ranks write; None: this rank writes all of it.
        """
        self.wait()
        copy = _on_host(state, {})
        self._thread = threading.Thread(target=self._write, args=(step, copy, part), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[str, Any], part: sharded.Part | None) -> None:
        self.error = None
        try:
            if part is None:
                save_checkpoint(self.config, step, state)
            else:
                assert self.config.directory is not None
                part.write(self.config.directory, step, state, self.config.keep)
        except Exception as error:  # torch.save reports a full disk as a RuntimeError
            self.error = error
            failed = f"the checkpoint of step {step} cannot be written to {self.config.directory}"
            reason = " ".join(str(error).split())
            print(f"bert: warning: {failed}: {reason}; training continues to the next", file=sys.stderr, flush=True)


def _on_host(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of nested dicts with tensors on the CPU; what occurs in them twice is copied once."""
    if id(value) not in copies:
        if isinstance(value, Tensor):
            copies[id(value)] = value.detach().to("cpu", copy=True)
        elif isinstance(value, dict):
            copies[id(value)] = {key: _on_host(item, copies) for key, item in value.items()}
        else:
            return value
    return copies[id(value)]


def saved_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first: files, and of those in shards, or of one itself, index.pt."""
    if (directory / sharded.INDEX).is_file():
        return [directory / sharded.INDEX]
    found = [*directory.glob("step_*.pt"), *directory.glob(f"step_*/{sharded.INDEX}")]
    return sorted(found, key=lambda path: step_path(path).stem)


def step_path(path: Path) -> Path:
    """A checkpoint as its user knows it: the file, or the folder of its shards."""
    return path.parent if path.name == sharded.INDEX else path


def is_ours(path: Path) -> bool:
    """Whether a file of weights is a checkpoint of this trainer, which says more than weights."""
    return path.match("step_*.pt") or path.name == sharded.INDEX


def read_checkpoint(path: Path, mmap: bool = False) -> Any:
    """The content of a PyTorch file, or of the shards of an index. Raises what torch.load raises."""
    if path.name == sharded.INDEX:
        return sharded.read(path.parent)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def load_newest(config: Config) -> dict[str, Any] | None:
    """The state in the newest checkpoint, where the run is to resume from one. Raises ConfigError for a damaged one."""
    found = saved_checkpoints(config.directory) if config.directory is not None and config.resume else []
    if not found:
        return None
    try:
        state: dict[str, Any] = read_checkpoint(found[-1])
        return state
    except Exception as error:
        raise ConfigError(
            f"{step_path(found[-1])}: damaged checkpoint ({damage(error)}): remove it to resume from the one before"
        ) from None
