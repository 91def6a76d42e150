"""Weights to start from, and checkpoints to resume from."""

from __future__ import annotations

import json
import re
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from bert.checkpoint import huggingface as hub
from bert.checkpoint import sharded as shard_files
from bert.checkpoint.sharded import Part, WholeTensors, complete
from bert.core.env import ConfigError, env
from bert.core.files import damage, whole_file
from bert.model.bert import BertForPreTraining
from bert.model.init import Piece, first_weights


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run starts from and what it leaves behind."""

    init_checkpoint: Path | None = env(
        "INIT_CHECKPOINT",
        None,
        doc="weights to start from: .pt, .safetensors, a folder of step_* (the newest) or a model of the Hub",
    )
    init_optimizer: bool = env(
        "INIT_OPTIMIZER", False, doc="1 takes the optimizer's moments from INIT_CHECKPOINT too, and counts steps from 0"
    )
    directory: Path | None = env("CHECKPOINT_DIR", None, doc="folder of checkpoints to resume from; unset writes none")
    every_steps: int = env("CHECKPOINT_EVERY_STEPS", 0, at_least=0, doc="steps between checkpoints; 0: none")
    shards: bool = env(
        "CHECKPOINT_SHARDS",
        False,
        doc="1: every rank writes its own part of a checkpoint, on a folder that all nodes see; with SHARD_OPTIMIZER=1",
    )
    keep: int = env("CHECKPOINT_KEEP", 2, at_least=1, doc="newest checkpoints to keep")
    resume: bool = env("RESUME", False, doc="1 resumes from the newest checkpoint in CHECKPOINT_DIR, if there is one")

    def __post_init__(self) -> None:
        """Settles for the newest checkpoint, or the weights, where INIT_CHECKPOINT is a folder."""
        if self.init_checkpoint is not None and self.init_checkpoint.is_dir():
            found = [*saved(self.init_checkpoint)[-1:], hub.weights_in(self.init_checkpoint)]
            object.__setattr__(self, "init_checkpoint", found[0] or self.init_checkpoint)

    def check(self) -> None:
        """Raises ConfigError where two of the settings contradict each other, or a file is missing."""
        if self.directory is None and (self.every_steps or self.resume):
            raise ConfigError("CHECKPOINT_EVERY_STEPS or RESUME is set and CHECKPOINT_DIR is not: give the folder")
        if self.init_optimizer and self.init_checkpoint is None:
            raise ConfigError("INIT_OPTIMIZER=1 and INIT_CHECKPOINT is not set: give the checkpoint to hand over")
        if self.init_checkpoint is not None and not self.init_checkpoint.is_file():
            what = "no step_* and no model.safetensors in it" if self.init_checkpoint.is_dir() else "no such file"
            raise ConfigError(f"INIT_CHECKPOINT={self.init_checkpoint}: {what}")


_PREFIXES = re.compile(r"^((module|model|bert_model_segment|heads_only_segment)\.)+")
_RENAMES = [(".dense_act.", ".dense."), ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")]
_PADDED = (hub.WORDS, hub.BIAS)  # rows beyond the vocabulary are padding
_DERIVED = {  # entries of a foreign state dict that repeat another one, or hold no weights
    "cls.predictions.decoder.weight": hub.WORDS,
    "cls.predictions.decoder.bias": hub.BIAS,
    "bert.embeddings.position_ids": None,
    "bert.embeddings.token_type_ids": None,
}
_BARE = ("embeddings.", "encoder.", "pooler.")  # of an encoder that was saved by itself
_NEW_HEADS = ("cls.", "bert.pooler.")  # what an encoder may come without
SAMPLE = 256  # numbers of a tensor, about, by which ranks compare their checkpoints


def canonical_name(name: str) -> str:
    """The name in this model (Hugging Face's) of a parameter in an MLPerf-converted or Hugging Face state dict."""
    name = _PREFIXES.sub("", name)
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name


def read_state_dict(path: Path) -> Mapping[str, Tensor]:
    """Tensors by canonical name from a .safetensors file or a PyTorch file (a state dict, or one under "model").

    PyTorch files are read with weights_only; of the Hub's model.safetensors.index.json all files are. Files are mapped:
    a number is read when it is used; a checkpoint in shards gives WholeTensors. Raises ConfigError for a file that
    cannot be read.
    """
    try:
        loaded = _read(path)
    except Exception as error:  # each format has its own errors for a damaged file
        raise ConfigError(f"INIT_CHECKPOINT={path}: not a readable checkpoint ({damage(error)})") from None
    for key in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if isinstance(loaded, WholeTensors):
        return loaded
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ConfigError(f"INIT_CHECKPOINT={path}: expected a state dict (name -> tensor), or one under 'model'")
    named = {canonical_name(name): tensor for name, tensor in loaded.items()}
    return {f"bert.{name}" if name.startswith(_BARE) else name: tensor for name, tensor in named.items()}


def _read(path: Path) -> Any:
    if path.name == shard_files.INDEX:
        return shard_files.read(path.parent)["model"]
    if path.name.endswith(".index.json"):
        files = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        return {name: tensor for file in files for name, tensor in _read(path.parent / file).items()}
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class Loaded(NamedTuple):
    """Parameters that the checkpoint lacks, which stay what they were, and what it has that was not used."""

    new: list[str]
    unused: list[str]

    def __str__(self) -> str:
        return f"new {', '.join(self.new) or 'none'}; not used {', '.join(self.unused) or 'none'}"


def load_weights(model: BertForPreTraining, path: Path, new_heads: bool = False) -> Loaded:
    """Copies a checkpoint's weights into the model; the vocabulary may be padded differently.

    new_heads: heads and pooler may be missing, and heads of other tasks be left over. Raises ConfigError listing every
    other name that is missing or left over, and those of another shape, or at odds with their twin.
    """
    tensors, loaded, problems = _matched(model, path, new_heads)
    copy_weights(dict(model.named_parameters()), tensors, model.config.vocab_size, problems, path)
    return loaded


def pieces_of(
    model: BertForPreTraining, path: Path, seed: int, new_heads: bool, checksum: Checksum
) -> tuple[Iterator[Piece], Loaded]:
    """What ``load_weights`` would load, piece by piece: who takes a part of a piece reads that part of the file alone.

    Only the shapes of ``model`` matter. New heads are those that ``first_weights`` draws with the seed. The checksum
    takes in what is drawn, a sample of each tensor that is read (all of it would mean to read all), and the token of a
    checkpoint in shards. Raises ConfigError as ``load_weights`` does.
    """
    tensors, loaded, problems = _matched(model, path, new_heads)
    parameters = dict(model.named_parameters())
    _raise_misfits(parameters, tensors, model.config.vocab_size, problems, path)

    def pieces() -> Iterator[Piece]:
        if loaded.new:
            yield from checksum.of(piece for piece in first_weights(model, seed) if piece.name in loaded.new)
        if isinstance(tensors, WholeTensors):
            checksum.add("token", torch.tensor(tensors.token))
            yield from (Piece(name, *span) for name in parameters for span in tensors.spans[name])
            return
        for name in parameters:  # in the same order on every rank
            if name not in tensors:
                continue
            numbers = tensors[name].reshape(-1)
            checksum.add(name, numbers[:: max(1, len(numbers) // SAMPLE)])
            yield Piece(name, 0, numbers)

    return pieces(), loaded


def _matched(model: BertForPreTraining, path: Path, new_heads: bool) -> tuple[Mapping[str, Tensor], Loaded, list[str]]:
    """The tensors in a checkpoint; what they lack and have left over, where that is allowed; what is wrong else."""
    tensors = read_state_dict(path)
    problems = _unresolved_twins(tensors, model.config.vocab_size) if isinstance(tensors, dict) else []
    parameters = dict(model.named_parameters())
    missing = [name for name in parameters if name not in tensors]
    left_over = sorted(name for name in tensors if name not in parameters)
    loaded = Loaded([], [])
    is_bert = all(name.startswith(_NEW_HEADS) for name in missing)
    if new_heads and is_bert and not any(name.startswith(("bert.", "cls.")) for name in left_over):
        loaded, missing, left_over = Loaded(missing, left_over), [], []
    problems += [f"{name} is missing" for name in missing]
    problems += [f"{name} is not in this model" for name in left_over]
    return tensors, loaded, problems


@torch.no_grad()
def copy_weights(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], vocab_size: int, problems: list[str], path: Path
) -> None:
    """Copies what both have; a table of the vocabulary may be padded differently.

    Raises ConfigError listing ``problems`` and every tensor of another shape.
    """
    _raise_misfits(parameters, tensors, vocab_size, problems, path)
    for name in parameters.keys() & tensors.keys():
        source, target = tensors[name], parameters[name]
        if source.shape != target.shape:
            target.zero_()
            target = target[: len(source)]
        target.copy_(source)


def _raise_misfits(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], vocab_size: int, problems: list[str], path: Path
) -> None:
    for name in parameters.keys() & tensors.keys():
        source = tensors.shapes[name] if isinstance(tensors, WholeTensors) else tensors[name].shape
        target = parameters[name].shape
        fits_padded = name in _PADDED and source[1:] == target[1:] and vocab_size <= (*source, 0)[0] <= target[0]
        if source != target and not fits_padded:
            problems = [*problems, f"{name} is {tuple(source)}, expected {tuple(target)}"]
    if problems:
        raise ConfigError(f"INIT_CHECKPOINT={path} does not fit BERT_CONFIG: {'; '.join(sorted(problems))}")


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """A checksum (32 bits) of names and contents."""
    sum_so_far = Checksum()
    for name, tensor in tensors.items():
        sum_so_far.add(name, tensor)
    return sum_so_far.value


class Checksum:
    """A checksum (32 bits) of names and contents that come one after the other."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes in one of them."""
        self.value = zlib.crc32(name.encode(), self.value)
        numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        self.value = zlib.crc32(numbers.data, self.value)

    def of(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Hands the pieces through and takes them in."""
        for piece in pieces:
            self.add(piece.name, piece.values)
            yield piece


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
        self.abandoned = threading.Event()  # set where other ranks may never write their parts any more
        self._thread: threading.Thread | None = None

    def start(self, step: int, state: dict[str, Any], part: Part | None = None) -> None:
        """Copies the state, and returns while it is being written; waits for the one before. part: of a checkpoint
        that all ranks write.
        """
        self.wait()
        copy = on_host(state, {})
        self._thread = threading.Thread(target=self._write, args=(step, copy, part), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[str, Any], part: Part | None) -> None:
        self.error = None
        try:
            if part is None:
                save(self.config, step, state)
            else:
                assert self.config.directory is not None
                part.write(self.config.directory, step, state, self.config.keep)
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


def saved(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first: files, and of those in shards, or of one itself, index.pt."""
    if (directory / shard_files.INDEX).is_file():
        return [directory / shard_files.INDEX]
    found = [*checkpoints(directory), *(folder / shard_files.INDEX for folder in complete(directory))]
    return sorted(found, key=lambda path: place(path).stem)


def place(path: Path) -> Path:
    """A checkpoint as its user knows it: the file, or the folder of its shards."""
    return path.parent if path.name == shard_files.INDEX else path


def is_ours(path: Path) -> bool:
    """Whether a file of weights is a checkpoint of this trainer, which says more than weights."""
    return path.match("step_*.pt") or path.name == shard_files.INDEX


def check_vocabulary(config: Config, vocab_md5: str) -> None:
    """Raises ConfigError where a checkpoint to start from was trained with another vocabulary than the data's."""
    path = config.init_checkpoint
    if path is None or not is_ours(path) or not vocab_md5:
        return
    known = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("vocab_md5")
    if known and known != vocab_md5:
        raise ConfigError(
            f"INIT_CHECKPOINT={path}: trained with another vocabulary (md5 {known}) than that of the training data "
            f"({vocab_md5}): prepare the data with the same vocab.txt, or start from other weights"
        )


def newest(config: Config) -> dict[str, Any] | None:
    """The state in the newest checkpoint, or None. Raises ConfigError for one that cannot be read."""
    if config.directory is None or not config.resume:
        return None
    found = saved(config.directory)
    if not found:
        return None
    try:
        if found[-1].name == shard_files.INDEX:
            return shard_files.read(found[-1].parent)
        return torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{place(found[-1])}: damaged checkpoint ({damage(error)}): remove it to resume from the one before"
        ) from None
