"""A run's own checkpoints: saved on a thread, whole or not at all, listed, and read."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert.checkpoint import deepspeed_files, huggingface, sharded, sums
from common.env import ConfigError, env
from common.files import damage, object_of
from common.process import one_line, say


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run starts from and which checkpoints it writes."""

    init_checkpoint: Path | None = env(
        "INIT_CHECKPOINT",
        None,
        "initial weights: .pt, .safetensors, folder of step_*, a model of the Hub, or a checkpoint of DeepSpeed's",
    )
    init_optimizer: bool = env(
        "INIT_OPTIMIZER",
        False,
        "1: also take the optimizer's moments from INIT_CHECKPOINT; steps count from 0",
    )
    directory: Path | None = env(
        "CHECKPOINT_DIR", None, "folder of checkpoints to resume from; unset: none"
    )
    every_steps: int = env(
        "CHECKPOINT_EVERY_STEPS", 0, "steps between checkpoints; 0: none", at_least=0
    )
    shards: bool = env(
        "CHECKPOINT_SHARDS",
        False,
        "1: each rank writes its part, to a shared folder; with SHARD_OPTIMIZER=1 or ENGINE=deepspeed",
    )
    keep: int = env("CHECKPOINT_KEEP", 2, "newest checkpoints to keep", at_least=1)
    best: bool = env(
        "CHECKPOINT_BEST",
        False,
        "1: also keep that of the highest accuracy, in CHECKPOINT_DIR/best",
    )
    resume: bool = env(
        "RESUME",
        False,
        "1: resume from the newest checkpoint in CHECKPOINT_DIR, if there is one",
    )

    def __post_init__(self) -> None:
        """Resolves an INIT_CHECKPOINT that is a folder to its newest checkpoint, or its weights."""
        if self.init_checkpoint is not None and self.init_checkpoint.is_dir():
            candidates = [
                *saved_checkpoints(self.init_checkpoint)[-1:],
                huggingface.weights_in(self.init_checkpoint),
                deepspeed_files.found(self.init_checkpoint),
            ]
            found = next(filter(None, candidates), self.init_checkpoint)
            object.__setattr__(self, "init_checkpoint", found)

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint in the folder, if there is one."""
        found = sharded.complete(self.directory) if self.directory else []
        return found[-1] if found else None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after ``step``."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def check(self) -> None:
        """Raises ConfigError if settings contradict each other, or a file is missing."""
        if self.directory is None and (self.every_steps or self.resume or self.best):
            raise ConfigError(
                "CHECKPOINT_EVERY_STEPS, CHECKPOINT_BEST or RESUME is set and CHECKPOINT_DIR is not: give the folder"
            )
        if self.init_optimizer and self.init_checkpoint is None:
            raise ConfigError("INIT_OPTIMIZER=1 needs INIT_CHECKPOINT")
        if self.init_checkpoint is not None:
            check_tensorflow(self.init_checkpoint)
        if self.init_checkpoint is not None and not self.init_checkpoint.is_file():
            path = self.init_checkpoint
            problem = (
                "no step_*, no model.safetensors and no checkpoint of DeepSpeed's in it"
                if path.is_dir()
                else "no such file"
            )
            if (
                not path.exists()
                and not path.is_absolute()
                and not path.suffix
                # owner/name, or a name alone, is how the Hub names a model.
                and len(path.parts) < 3
            ):
                fetch = f"hf download {path} --local-dir {path.name}"
                problem += f" or folder; a model of the Hub is not fetched: {fetch}, then INIT_CHECKPOINT={path.name}"
            raise ConfigError(f"INIT_CHECKPOINT={path}: {problem}")


def check_tensorflow(path: Path) -> None:
    """Raises ConfigError if a path is a TensorFlow checkpoint: its prefix, a file or the folder."""
    prefix = Path(re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", str(path)))
    if path.is_dir() and not list(path.glob("*.safetensors*")):
        prefix = next(path.glob("*.index"), path).with_suffix("")
    if not Path(f"{prefix}.index").is_file():
        return
    target = f"{prefix}.pt"
    raise ConfigError(
        f"INIT_CHECKPOINT={path}: TensorFlow's: python -m input_preprocessing "
        f"convert_checkpoint --source {prefix} --target {target}, then INIT_CHECKPOINT={target}"
    )


def save_checkpoint(config: CheckpointConfig, step: int, state: dict[str, Any]) -> Path:
    """Writes CHECKPOINT_DIR/step_<step>.pt whole or not at all, then removes all but the newest
    ``keep``.
    """
    assert config.directory is not None
    config.directory.mkdir(parents=True, exist_ok=True)
    path = config.directory / f"step_{step:010d}.pt"
    # Old ones go only when the new one is whole: a failed write costs no sound state.
    sharded.save(path, state)
    sharded.prune(config.directory, config.keep, step)
    return path


class Writer:
    """Saves checkpoints on a thread, one at a time, from a copy in host memory.

    If one cannot be written a warning is printed and the run continues; ``error`` is that of the
    last checkpoint.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self.error: Exception | None = None
        # Set if other ranks may never write their shards.
        self.abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self, step: int, state: dict[str, Any], part: sharded.Part | None = None
    ) -> None:
        """Waits for the previous checkpoint, copies the state, and returns while it is being
        written.

        part: this rank's share of a sharded checkpoint; None: this rank writes all of it.
        """
        self.wait()  # one copy in memory at a time
        copy = self._on_host(state, {})
        if torch.cuda.is_initialized():
            # The host waits for the device: after this the next step may overwrite what was copied.
            torch.cuda.synchronize()
        self._thread = threading.Thread(
            target=self._write, args=(step, copy, part), name="checkpoint"
        )
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the last checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _on_host(self, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of nested dicts with tensors on the CPU; repeated objects are copied once.

        Copies from a GPU, to pinned memory, may still be in progress.
        """
        # The masters have two names, in model and optimizer: torch.save writes them once, too.
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, dict):
            copy: Any = {
                key: self._on_host(item, copies) for key, item in value.items()
            }
        elif isinstance(value, Tensor):
            on_gpu, contiguous = value.device.type == "cuda", torch.contiguous_format
            # Pinned, without which a copy is not asynchronous; PyTorch keeps such memory for the
            # next checkpoint.
            memory = torch.empty_like(
                value, device="cpu", pin_memory=on_gpu, memory_format=contiguous
            )
            copy = memory.copy_(value.detach(), non_blocking=on_gpu)
        else:
            return value
        copies[id(value)] = copy
        return copy

    def _write(
        self, step: int, state: dict[str, Any], part: sharded.Part | None
    ) -> None:
        error: Exception | None = None
        try:
            if part is None:
                save_checkpoint(self.config, step, state)
            else:
                assert self.config.directory is not None
                part.write(self.config.directory, step, state, self.config.keep)
        except Exception as failure:  # torch.save reports a full disk as a RuntimeError
            error = failure
        self.note(step, error)

    def note(self, step: int, error: Exception | None, says: bool = True) -> None:
        """Notes whether the checkpoint of ``step`` was written, and warns if not."""
        self.error = error
        if error is None or not says:
            return
        failed = f"the checkpoint of step {step} cannot be written to {self.config.directory}"
        reason = one_line(error)
        say(f"bert: warning: {failed}: {reason}; training continues to the next")


def saved_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first: files, or index.pt of sharded ones; or
    the folder's own.
    """
    if (directory / sharded.INDEX).is_file():
        return [directory / sharded.INDEX]
    paths = sharded.complete(directory)
    return [path / sharded.INDEX if path.is_dir() else path for path in paths]


def step_path(path: Path) -> Path:
    """A checkpoint's path for users: the file, or the folder of its shards."""
    return path.parent if path.name == sharded.INDEX else path


def is_ours(path: Path) -> bool:
    """Whether a weights file is a checkpoint of this trainer, with more than weights in it."""
    return path.match("step_*.pt") or path.name == sharded.INDEX


def read_checkpoint(path: Path, mmap: bool = False) -> Any:
    """The content of a PyTorch file, or of the shards of an index. Raises what torch.load
    raises.
    """
    if path.name == sharded.INDEX:
        return sharded.read(path.parent)
    return sharded.read_file(path, mmap)


def check_checkpoint(path: Path, rank: int = 0, size: int = 1) -> None:
    """Compares a checkpoint with its checksums; of a sharded one each of ``size`` ranks its share.

    Raises ChecksumError, or what zipfile and torch.load raise for a damaged file.
    """
    if path.name == sharded.INDEX:
        sharded.check(path.parent, rank, size)
    else:
        sums.check(path)


def noted_before(directory: Path) -> dict[str, Any]:
    """What earlier versions noted beside the checkpoints of a folder, and not in them."""
    return object_of(directory / ".owner.json")


def facts_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says beside its tensors; empty if it is damaged."""
    try:
        # Mapped, as only the small entries are looked at.
        file = path / sharded.INDEX if path.is_dir() else path
        return noted_before(path.parent) | sharded.read_file(file, mmap=True)
    except Exception:  # of any kind that torch.load raises
        return {}


def load_newest(
    config: CheckpointConfig, is_own: bool = False
) -> dict[str, Any] | None:
    """The newest checkpoint's state, if there is one. Raises ConfigError if it is damaged, or,
    without RESUME=1, not the run's own.
    """
    if (last := config.newest) is None:
        return None
    if not config.resume and not is_own:
        raise foreign(last)
    return load(last)


def load(path: Path, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """A checkpoint as it was written, of whose shards each of ``size`` ranks compares some. Raises
    ConfigError for a damaged one.
    """
    file = path / sharded.INDEX if path.is_dir() else path
    try:
        check_checkpoint(file, rank, size)
        return read_checkpoint(file)
    except ConfigError:
        raise
    except Exception as error:
        raise damaged(path, error) from None


def foreign(path: Path, can_resume: bool = True) -> ConfigError:
    """The error for another run's checkpoint, which names the ways on."""
    ways = "for a new run give another CHECKPOINT_DIR"
    if can_resume:
        ways = f"set RESUME=1 to continue it, or {ways}"
    return ConfigError(
        f"CHECKPOINT_DIR={path.parent} holds {path.name} of another or an earlier run: {ways}"
    )


def damaged(path: Path, error: Exception) -> ConfigError:
    """The error for a checkpoint that cannot be used, which names the one before it."""
    before = [
        earlier.name
        for earlier in sharded.complete(path.parent)
        if sharded.step_of(earlier) < sharded.step_of(path)
    ]
    cure = (
        f"to resume from {before[-1]}, the one before"
        if before
        else "to start anew, as it is the only one"
    )
    return ConfigError(
        f"{path}: damaged checkpoint ({damage(error)}): remove it {cure}"
    )
