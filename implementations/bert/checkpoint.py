"""Weights to start from, and checkpoints to resume from."""

from __future__ import annotations

import re
import sys
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from bert.env import ConfigError, env
from bert.files import whole_file
from bert.model.bert import BertForPreTraining


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run starts from and what it leaves behind."""

    init_checkpoint: Path | None = env(
        "INIT_CHECKPOINT",
        None,
        doc="weights to start from (.pt, .safetensors, or a folder of step_*.pt: the newest); unset: random",
    )
    init_optimizer: bool = env(
        "INIT_OPTIMIZER", False, doc="1 takes the optimizer's moments from INIT_CHECKPOINT too, and counts steps from 0"
    )
    directory: Path | None = env("CHECKPOINT_DIR", None, doc="folder of checkpoints to resume from; unset writes none")
    every_steps: int = env("CHECKPOINT_EVERY_STEPS", 0, at_least=0, doc="steps between checkpoints; 0: none")
    keep: int = env("CHECKPOINT_KEEP", 2, at_least=1, doc="newest checkpoints to keep")
    resume: bool = env("RESUME", False, doc="1 resumes from the newest checkpoint in CHECKPOINT_DIR, if there is one")

    def __post_init__(self) -> None:
        """Settles for the newest checkpoint where INIT_CHECKPOINT is a folder of them."""
        if self.init_checkpoint is not None and (found := checkpoints(self.init_checkpoint)):
            object.__setattr__(self, "init_checkpoint", found[-1])

    def check(self) -> None:
        """Raises ConfigError where two of the settings contradict each other, or a file is missing."""
        if self.directory is None and (self.every_steps or self.resume):
            raise ConfigError("CHECKPOINT_EVERY_STEPS or RESUME is set and CHECKPOINT_DIR is not: give the folder")
        if self.init_optimizer and self.init_checkpoint is None:
            raise ConfigError("INIT_OPTIMIZER=1 and INIT_CHECKPOINT is not set: give the checkpoint to hand over")
        if self.init_checkpoint is not None and not self.init_checkpoint.is_file():
            raise ConfigError(f"INIT_CHECKPOINT={self.init_checkpoint}: no such file")


_PREFIXES = re.compile(r"^((module|model|bert_model_segment|heads_only_segment)\.)+")
_RENAMES = [(".dense_act.", ".dense."), ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")]
_PADDED = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")  # rows beyond the vocabulary are padding
_DERIVED = {  # entries of a foreign state dict that repeat another one, or hold no weights
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "bert.embeddings.position_ids": None,
    "bert.embeddings.token_type_ids": None,
}


def canonical_name(name: str) -> str:
    """The name in this model (Hugging Face's) of a parameter in an MLPerf-converted or Hugging Face state dict."""
    name = _PREFIXES.sub("", name)
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by canonical name from a .safetensors file or a PyTorch file (a state dict, or one under "model").

    PyTorch files are read with weights_only. Raises ConfigError for a file that cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            loaded: Any = safetensors.torch.load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # each format has its own errors for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"INIT_CHECKPOINT={path}: not a readable checkpoint ({reason})") from None
    for key in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ConfigError(f"INIT_CHECKPOINT={path}: expected a state dict (name -> tensor), or one under 'model'")
    return {canonical_name(name): tensor for name, tensor in loaded.items()}


def load_weights(model: BertForPreTraining, path: Path) -> None:
    """Copies a checkpoint's weights into the model; the vocabulary may be padded differently.

    Raises ConfigError listing every name that is missing, left over, of another shape, or at odds with its twin.
    """
    tensors = read_state_dict(path)
    problems = _unresolved_twins(tensors, model.config.vocab_size)
    parameters = dict(model.named_parameters())
    problems += [f"{name} is missing" for name in parameters if name not in tensors]
    problems += [f"{name} is not in this model" for name in tensors if name not in parameters]
    copy_weights(parameters, tensors, model.config.vocab_size, problems, path)


@torch.no_grad()
def copy_weights(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], vocab_size: int, problems: list[str], path: Path
) -> None:
    """Copies what both have; a table of the vocabulary may be padded differently.

    Raises ConfigError listing ``problems`` and every tensor of another shape.
    """
    for name in parameters.keys() & tensors.keys():
        source, target = tensors[name], parameters[name]
        rows = source.shape[0] if source.ndim else 0
        if name in _PADDED and vocab_size <= rows <= target.shape[0] and source.shape[1:] == target.shape[1:]:
            target.zero_()
            target[:rows].copy_(source)
        elif source.shape == target.shape:
            target.copy_(source)
        else:
            problems = [*problems, f"{name} is {tuple(source.shape)}, expected {tuple(target.shape)}"]
    if problems:
        raise ConfigError(f"INIT_CHECKPOINT={path} does not fit BERT_CONFIG: {'; '.join(sorted(problems))}")


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A checksum (32 bits) of names and contents."""
    value = 0
    for name, tensor in tensors.items():
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return value


def _unresolved_twins(tensors: dict[str, Tensor], vocab_size: int) -> list[str]:
    """Removes entries that repeat another one, in place; a message for each that differs from it."""
    problems = []
    for name, twin in _DERIVED.items():
        tensor = tensors.pop(name, None)
        if tensor is None or twin is None:
            continue
        if twin not in tensors:
            tensors[twin] = tensor
        elif not torch.equal(tensor[:vocab_size], tensors[twin][:vocab_size]):
            problems.append(f"{name} differs from {twin}, and this model ties them")
    return problems


def save(config: Config, step: int, state: dict[str, Any]) -> Path:
    """Writes CHECKPOINT_DIR/step_<step>.pt whole or not at all, then removes all but the newest ``keep``."""
    assert config.directory is not None
    config.directory.mkdir(parents=True, exist_ok=True)
    path = config.directory / f"step_{step:010d}.pt"
    with whole_file(path) as partial, open(partial, "wb") as file:
        torch.save(state, file)
    for old in checkpoints(config.directory)[: -config.keep]:
        old.unlink()
    return path


class Writer:
    """Writes checkpoints on a thread, one at a time, from a copy in host memory.

    One that cannot be written is a warning, and the run continues to the next; ``error`` is that of the last one.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Copies the state, and returns while it is being written; waits for the one before."""
        self.wait()
        copy = on_host(state, {})
        self._thread = threading.Thread(target=self._write, args=(step, copy), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[str, Any]) -> None:
        self.error = None
        try:
            save(self.config, step, state)
        except Exception as error:  # torch.save reports a full disk as a RuntimeError
            self.error = error
            reason = " ".join(str(error).split())
            print(
                f"bert: warning: the checkpoint of step {step} cannot be written to {self.config.directory}: {reason}; "
                "training continues to the next",
                file=sys.stderr,
                flush=True,
            )


def on_host(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of nested dicts with tensors on the CPU; what stands in them twice is copied once."""
    if id(value) not in copies:
        if isinstance(value, Tensor):
            copies[id(value)] = value.detach().to("cpu", copy=True)
        elif isinstance(value, dict):
            copies[id(value)] = {key: on_host(item, copies) for key, item in value.items()}
        else:
            return value
    return copies[id(value)]


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(directory.glob("step_*.pt"))


def newest(config: Config) -> dict[str, Any] | None:
    """The state in the newest checkpoint, or None. Raises ConfigError for one that cannot be read."""
    if config.directory is None or not config.resume:
        return None
    found = checkpoints(config.directory)
    if not found:
        return None
    try:
        return torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{found[-1]}: damaged checkpoint ({reason}): remove it to resume from the one before"
        ) from None
