"""Loading weights, from our own or foreign files, into the model; their checksum."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from bert.checkpoint import deepspeed_files
from bert.checkpoint.huggingface import BIAS, WEIGHTS, WORDS
from bert.checkpoint.save import check_checkpoint, is_ours, read_checkpoint
from bert.checkpoint.sharded import ShardedTensors, read_file
from bert.data.digests import digest_of_tensors
from bert.model.bert import BertForPreTraining
from bert.model.init import Chunk, first_weights
from common.env import ConfigError
from common.files import damage

# Of wrappers: DistributedDataParallel's, and those of NVIDIA's model in segments.
_PREFIXES = re.compile(r"^((module|model|bert_model_segment|heads_only_segment)\.)+")
# NVIDIA's dense layer fused with its activation; LayerNorm's names in TensorFlow.
_RENAMES = [
    (".dense_act.", ".dense."),
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
]
# In a foreign state dict.
_TIED = {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": BIAS}
# Buffers of indices, which older versions of transformers saved along.
_NO_WEIGHTS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_BARE = ("embeddings.", "encoder.", "pooler.")  # of an encoder saved by itself
_NEW_HEADS = ("cls.", "bert.pooler.")  # may be missing in an encoder's file
# Absent from masked-LM alone.
_NEXT_SENTENCE = "bert.pooler.", "cls.seq_relationship."
# Approximate count of numbers per tensor in the checksum that ranks compare.
SAMPLE = 256


def canonical_name(name: str) -> str:
    """The name in this model (Hugging Face's) of a parameter in an MLPerf-converted or Hugging Face
    state dict.
    """
    name = _PREFIXES.sub("", name)
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name


def read_state_dict(
    path: Path, share: tuple[int, int] = (0, 1)
) -> Mapping[str, Tensor]:
    """Tensors by canonical name from a .safetensors file or a PyTorch file (a state dict, or one
    under "model").

    PyTorch files are read with weights_only; for the Hub's model.safetensors.index.json all its
    files are read. Files are memory-mapped; a sharded checkpoint gives ShardedTensors. Raises
    ConfigError for a file that cannot be read, or is not as this trainer wrote it.

    share: rank and number of ranks, each of which compares its part of a sharded checkpoint.
    """
    try:
        if is_ours(path):
            check_checkpoint(path, *share)
        loaded = _read(path)
    except Exception as error:  # each format has its own errors for a damaged file
        if path.suffix in (".txt", ".json", ".tsv") and not path.name.endswith(
            ".index.json"
        ):
            raise ConfigError(
                f"INIT_CHECKPOINT={path}: no weights: give a .pt or .safetensors, or a folder"
            ) from None
        raise ConfigError(
            f"INIT_CHECKPOINT={path}: not a readable checkpoint ({damage(error)})"
        ) from None
    for key in ("model", "state_dict"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if isinstance(loaded, ShardedTensors):
        return loaded
    if not isinstance(loaded, Mapping) or not all(
        isinstance(value, Tensor) for value in loaded.values()
    ):
        raise ConfigError(
            f"INIT_CHECKPOINT={path}: expected a state dict (name -> tensor), or one under 'model'"
        )
    named = {canonical_name(name): tensor for name, tensor in loaded.items()}
    return {
        f"bert.{name}" if name.startswith(_BARE) else name: tensor
        for name, tensor in named.items()
    }


def _read(path: Path) -> Any:
    if path.name.endswith(".index.json"):
        files = sorted(
            set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        )
        return {
            name: tensor
            for file in files
            for name, tensor in _read(path.parent / file).items()
        }
    if path.name.endswith(deepspeed_files.MODEL):
        shapes, spans = deepspeed_files.weights(path)
        return dict(ShardedTensors(shapes, spans))
    return (
        safetensors.torch.load_file(path)
        if path.suffix == ".safetensors"
        else read_checkpoint(path, mmap=True)
    )


def identity(path: Path) -> str:
    """Digest of a file's weights, independent of format and padding. Reads all of it; raises as
    read_state_dict.
    """
    # Whether tied weights and index buffers are written depends on the format, not on the weights.
    kept = (
        (name, t)
        for name, t in read_state_dict(path).items()
        if name not in (*_TIED, *_NO_WEIGHTS)
    )
    return digest_of_tensors((name, tensor.float().numpy()) for name, tensor in kept)


class Loaded(NamedTuple):
    """Parameters missing in the checkpoint, which keep their values, and those of it that were not
    used.
    """

    new: list[str]
    unused: list[str]

    def __str__(self) -> str:
        return f"new {', '.join(self.new) or 'none'}; not used {', '.join(self.unused) or 'none'}"


def load_weights(
    model: BertForPreTraining, path: Path, new_heads: bool = False
) -> Loaded:
    """Copies a checkpoint's weights into the model; the vocabulary may be padded differently.

    new_heads: heads and pooler may be missing, and heads of other tasks are ignored. Raises
    ConfigError listing every other name that is missing, unexpected, of another shape, or different
    from its tied weight.
    """
    tensors, loaded = _matched(model, path, new_heads)
    copy_weights(dict(model.named_parameters()), tensors, path)
    return loaded


def chunks_of(
    model: BertForPreTraining,
    path: Path,
    seed: int,
    new_heads: bool,
    checksum: Checksum,
    share: tuple[int, int] = (0, 1),
) -> tuple[Iterator[Chunk], Loaded]:
    """The weights of ``load_weights`` as parameter chunks, of which only the parts used are read.

    Only the shapes of ``model`` matter. New heads are drawn by ``first_weights`` with the seed. The
    checksum covers the drawn weights, a sample of each tensor in the file (not all, to avoid
    reading all), and the token of a sharded checkpoint. Raises ConfigError as ``load_weights``
    does. share: see ``read_state_dict``.
    """
    tensors, loaded = _matched(model, path, new_heads, share)
    parameters = dict(model.named_parameters())

    def chunks() -> Iterator[Chunk]:
        if loaded.new:
            yield from checksum.of(
                chunk
                for chunk in first_weights(model, seed)
                if chunk.name in loaded.new
            )
        if isinstance(tensors, ShardedTensors):
            checksum.add("token", torch.tensor(tensors.token))
            for name in parameters:
                if name not in loaded.new:
                    yield from (Chunk(*span) for span in tensors.of(name))
            return
        for name in parameters:  # in the same order on every rank
            if name in tensors:
                numbers = tensors[name].reshape(-1)
                checksum.add(name, numbers[:: max(1, len(numbers) // SAMPLE)])
                yield Chunk(name, 0, numbers)

    return chunks(), loaded


def _matched(
    model: BertForPreTraining,
    path: Path,
    new_heads: bool,
    share: tuple[int, int] = (0, 1),
) -> tuple[Mapping[str, Tensor], Loaded]:
    """The tensors in a checkpoint, and what may differ: parameters that it lacks, which are drawn
    anew, and tensors that are left over, which are ignored. Raises ConfigError for all others.
    """
    tensors, vocab_size = read_state_dict(path, share), model.config.vocab_size
    # A sharded checkpoint is ours, which has each weight once.
    problems = _untie(tensors, vocab_size) if isinstance(tensors, dict) else []
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    missing = [name for name in shapes if name not in tensors]
    left_over = sorted(name for name in tensors if name not in shapes)
    # Masked-LM alone starts from a usual checkpoint too, and leaves its other head behind.
    unused = [
        name
        for name in left_over
        if name.startswith(_NEXT_SENTENCE) and not model.config.next_sentence
    ]
    loaded = Loaded([], unused)
    if new_heads and _is_encoder(missing, set(left_over).difference(unused)):
        loaded = Loaded(missing, left_over)
    problems += misfits(shapes, tensors, vocab_size, loaded.new + loaded.unused)
    if problems:
        raise ConfigError(
            f"INIT_CHECKPOINT={path} does not fit BERT_CONFIG: {'; '.join(sorted(problems))}"
        )
    return tensors, loaded


def _untie(tensors: dict[str, Tensor], vocab_size: int) -> list[str]:
    """Removes a foreign file's second copies of tied weights, and what is no weight. Returns which
    copies differ.
    """
    for name in _NO_WEIGHTS:
        tensors.pop(name, None)
    problems = []
    for name, weight in _TIED.items():
        if (copy := tensors.pop(name, None)) is None:
            continue
        # A file may hold the decoder's copy alone, which then serves as the embeddings.
        kept = tensors.setdefault(weight, copy)
        if not torch.equal(copy[:vocab_size], kept[:vocab_size]):  # padding may differ
            problems.append(f"{name} differs from {weight}, and this model ties them")
    return problems


def _is_encoder(missing: Iterable[str], left_over: Iterable[str]) -> bool:
    """Whether a file has all of an encoder: it may lack our heads and have those of other tasks,
    but leftovers of the model's own names are another model.
    """
    lacks_heads_alone = all(name.startswith(_NEW_HEADS) for name in missing)
    return lacks_heads_alone and not any(
        name.startswith(("bert.", "cls.")) for name in left_over
    )


def misfits(
    shapes: Mapping[str, torch.Size],
    tensors: Mapping[str, Tensor],
    vocab_size: int = 0,
    excused: Collection[str] = (),
) -> list[str]:
    """What is missing, unexpected or of another shape; with a vocab_size its rows may be padded
    differently.
    """
    problems = [
        f"{name} is missing"
        for name in shapes
        if name not in tensors and name not in excused
    ]
    problems += [
        f"{name} is not in this model"
        for name in tensors
        if name not in shapes and name not in excused
    ]
    for name in shapes.keys() & tensors.keys():
        source = (
            tensors.shapes[name]
            if isinstance(tensors, ShardedTensors)
            else tensors[name].shape
        )
        target, padded = shapes[name], vocab_size and name in (WORDS, BIAS)
        if source != target and not (
            # (*source, 0)[0]: a tensor without dimensions has no rows.
            padded
            and source[1:] == target[1:]
            and vocab_size <= (*source, 0)[0] <= target[0]
        ):
            problems.append(f"{name} is {tuple(source)}, expected {tuple(target)}")
    return problems


@torch.no_grad()
def copy_weights(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path
) -> None:
    """Copies what both have; padding rows of the vocabulary become 0. Raises ConfigError for
    weights not finite.
    """
    for name in parameters.keys() & tensors.keys():
        source, target = tensors[name], parameters[name]
        if source.shape != target.shape:
            target.zero_()
            target = target[: len(source)]
        target.copy_(source)
    # After the copy: a number beyond the range of fp16 has become infinite only there.
    check_finite(
        ((name, parameters[name]) for name in parameters.keys() & tensors.keys()), path
    )


def check_finite(tensors: Iterable[tuple[str, Tensor]], path: Path | None) -> None:
    """Raises ConfigError naming the first tensor with NaN or infinity."""
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise ConfigError(
                f"{path}: {name} holds NaN or infinity: start from other weights, or from an earlier checkpoint"
            )


class Checksum:
    """Running checksum (32 bits) of names and contents."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.value = zlib.crc32(name.encode(), self.value)
        # As bytes, since NumPy has no bf16.
        numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        self.value = zlib.crc32(numbers.data, self.value)

    def of(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Adds the chunks as they pass through."""
        for chunk in chunks:
            self.add(chunk.name, chunk.values)
            yield chunk


def checksum_of(tensors: Mapping[str, Tensor]) -> int:
    """Checksum (32 bits) of names and contents."""
    checksum = Checksum()
    for name, tensor in tensors.items():
        checksum.add(name, tensor)
    return checksum.value


def vocabulary_of(path: Path) -> str:
    """md5 of the vocabulary the weights were trained with; in the Hub's layout of vocab.txt beside;
    "" if unknown.
    """
    beside = path.parent / "vocab.txt"
    if is_ours(path):
        return read_file(path, mmap=True).get("vocab_md5") or ""
    return (
        hashlib.md5(beside.read_bytes()).hexdigest()
        if path.name in WEIGHTS and beside.is_file()
        else ""
    )


def check_vocabulary(path: Path | None, vocab_md5: str) -> None:
    """Raises ConfigError if the checkpoint to start from was trained with another vocabulary than
    the data's.
    """
    if (
        path is not None
        and vocab_md5
        and (known := vocabulary_of(path))
        and known != vocab_md5
    ):
        differs = f"trained with another vocabulary (md5 {known}) than that of the training data ({vocab_md5})"
        raise ConfigError(
            f"INIT_CHECKPOINT={path}: {differs}: prepare the data with the same vocab.txt, or start from other weights"
        )
