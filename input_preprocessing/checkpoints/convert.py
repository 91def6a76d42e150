"""Converts BERT checkpoints: TensorFlow 1 and 2 (model.ckpt-28252) to PyTorch, safetensors and
TensorFlow 2, and between namings.

The source is a TensorFlow checkpoint (its prefix, one of its files or its folder), a .pt or a
.safetensors file; the target's suffix decides its format. Every parameter is accounted for, by name
and shape; optimizer slots are skipped. TensorFlow is not needed.
  .pt           {"model": state dict}, MLPerf's names (--names mlperf), the vocabulary padded to a
                multiple of 8
  .safetensors  the same tensors (--names huggingface for transformers' BertForPreTraining)
  a prefix      with --names tensorflow2: variables of the official BertPretrainer, as
                tf2_encoder_checkpoint_converter.py makes them of a TensorFlow 1 checkpoint
"""

import argparse
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError

from bert.data.format import atomic_file
from bert.data.records import DataError
from input_preprocessing.checkpoints import tf2_names
from input_preprocessing.checkpoints import tf_names as parameters
from input_preprocessing.stage.cli import say
from input_preprocessing.tensorflow_files.bundle import OBJECT_GRAPH, Bundle, prefix_of
from input_preprocessing.tensorflow_files.bundle_writer import write_checkpoint

NAMES = {"mlperf": parameters.to_mlperf, "huggingface": parameters.to_huggingface}
TENSORFLOW2 = "tensorflow2"


class Source(NamedTuple):
    """A checkpoint's parameters by Hugging Face's names, without tied entries.

    left_out: number of other variables by kind; heads: of attention, None if it does not say.
    """

    tensors: parameters.Tensors
    left_out: Mapping[str, int] = MappingProxyType({})
    heads: int | None = None


def read_tensorflow(prefix: Path) -> Source:
    """Reads a TensorFlow 1 or 2 checkpoint: every variable is used, or counted as left out.

    Raises:
        DataError: unreadable, damaged, or with variables (TensorFlow 2) that are not BERT's.
    """
    bundle = Bundle(prefix)
    # Optimizer states and counters; a name that no list knows stays, and is reported as unknown.
    others = {
        name: reason
        for name in bundle.entries
        if (reason := parameters.left_out_as(name))
    }
    wanted = [name for name in bundle.entries if name not in others]
    # TensorFlow 1 has no graph of objects: its keys are the variables' names.
    if OBJECT_GRAPH not in bundle.entries:
        found = (parameters.from_tf1(name, bundle.read(name)) for name in wanted)
        return Source(dict(found), Counter(others.values()))
    known = bundle.variable_names()
    names = {key: known.get(key, "") for key in wanted}
    for key in tf2_names.unused_poolers(names):
        others[key] = "unused pooler"
        del names[key]
    tensors, heads = tf2_names.from_tf2(names, bundle.read, str(prefix))
    return Source(tensors, Counter(others.values()), heads)


def read_pytorch(path: Path) -> parameters.Tensors:
    """Tensors of a .pt (unpickling tensors only) or .safetensors file, under Hugging Face's names.

    Raises:
        DataError: unreadable, or not a state dict.
    """
    try:
        import torch

        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            # MLPerf's files hold {"model": ...}, others the state dict itself.
            state = loaded.get("model", loaded)
        # To fp32, in which the trainer keeps its master weights; NumPy has no bfloat16.
        return parameters.from_pytorch(
            {name: tensor.float().numpy() for name, tensor in state.items()}
        )
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}; check --source"
        ) from error
    except (
        RuntimeError,
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        ValueError,
        SafetensorError,
    ) as error:
        kind = (
            "safetensors file"
            if isinstance(error, SafetensorError)
            else "readable state dict"
        )
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path} is not a {kind} ({reason}); copy or convert it again"
        ) from error


def write_pytorch(path: Path, tensors: parameters.Tensors) -> None:
    """Writes {"model": tensors} (.pt) or the tensors (.safetensors) atomically."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with atomic_file(path) as partial:
        if path.suffix == ".safetensors":
            # save_file leaves a temporary file when killed.
            from safetensors.numpy import save

            partial.write_bytes(save(arrays, metadata={"format": "pt"}))
        else:
            import torch

            # torch.from_numpy() warns of read-only arrays.
            made = {
                id(array): torch.from_numpy(np.require(array, requirements="W"))
                for array in arrays.values()
            }
            # Of tied arrays one is stored.
            state = {name: made[id(array)] for name, array in arrays.items()}
            try:
                with open(partial, "wb") as file:
                    torch.save({"model": state}, file)
            # PyTorch's for a failed write, without the reason.
            except RuntimeError as error:
                raise DataError(
                    f"cannot write {path}; check space and permissions, run again"
                ) from error


def convert(
    source: Path,
    target: Path,
    names: str,
    multiple: int = 8,
    vocab_size: int | None = None,
    bert_config: Path | None = None,
) -> tuple[parameters.Shape, Mapping[str, int]]:
    """Converts a checkpoint; returns the model's sizes and the number of skipped variables by kind.

    Args:
        source: TensorFlow prefix or folder, .pt or .safetensors file.
        target: .pt or .safetensors file, or a prefix for TensorFlow 2.
        names: a key of NAMES, or TENSORFLOW2.
        multiple: of which the padded vocabulary size is a multiple.
        vocab_size: rows of the vocabulary to keep before padding; None: all.
        bert_config: bert_config.json that the checkpoint must match.

    Raises:
        DataError: unreadable source, missing or unknown parameters, sizes of another model, or
        unwritable target.
    """
    to_tensorflow = names == TENSORFLOW2
    if (target.suffix in (".pt", ".safetensors")) == to_tensorflow:
        wanted = "a prefix, such as tf2_ckpt/model.ckpt-28252" if to_tensorflow else ".pt or .safetensors"  # fmt: skip
        raise DataError(f"{target}: with --names {names} the target must be {wanted}")
    if source.suffix in (".pt", ".pth", ".bin", ".safetensors"):
        read = Source(read_pytorch(source))
    else:
        read = read_tensorflow(prefix_of(source))
    shape = parameters.check_complete(read.tensors, str(source))
    size = vocab_size or shape.vocabulary
    if size > shape.vocabulary:
        raise DataError(
            f"--vocab-size {size}: {source} has only {shape.vocabulary} words"
        )
    heads = read.heads
    # Before padding, as the file has the size of the vocabulary.
    if bert_config:
        sizes = shape._replace(vocabulary=size)
        heads = parameters.check_config(sizes, read.heads, bert_config)
    if to_tensorflow:
        if heads is None:
            raise DataError(f"{target}: give --bert-config, which has the number of heads")  # fmt: skip
        tensors = parameters.resize_vocabulary(read.tensors, size)
        write_checkpoint(target, tf2_names.to_tf2(tensors, heads))
    else:
        # 30,522 words become 30,528 rows: tensor cores want sizes that are multiples of 8.
        tensors = parameters.resize_vocabulary(read.tensors, size + -size % multiple)
        write_pytorch(target, NAMES[names](tensors))
    return parameters.check_complete(tensors, str(target)), read.left_out


def main(options: argparse.Namespace) -> None:
    shape, left_out = convert(**vars(options))
    others = ", ".join(
        f"{reason} ({number})" for reason, number in sorted(left_out.items())
    )
    sizes = f"{shape.layers} layers, {shape.hidden} wide, {shape.vocabulary} words"
    summary = f"{sizes}, {len(shape.parameters())} parameters; left out: {others or 'nothing'}"
    say(f"{options.target}: {summary}")
