"""Converts BERT checkpoints: TensorFlow 1 (model.ckpt-28252) to PyTorch and safetensors, and between their names.

The source is a TensorFlow checkpoint (its prefix, one of its files or its folder), a .pt or a .safetensors file; the
target's suffix decides its kind. Every parameter is accounted for, by name and shape; optimizer slots are left out.
TensorFlow is not needed.
  .pt           {"model": state dict}, MLPerf's names (--names mlperf), the vocabulary padded to a multiple of 8
  .safetensors  the same tensors (--names huggingface for transformers' BertForPreTraining)
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path

import numpy as np

from bert.data.format import DataError, atomic_file

from .checkpoint_names import (
    Shape,
    Tensors,
    check_complete,
    from_pytorch,
    from_tf1,
    is_model_variable,
    resize_vocabulary,
    to_huggingface,
    to_mlperf,
)
from .cli import positive, run, stage_parser
from .tf_bundle import Bundle, prefix_of

NAMES = {"mlperf": to_mlperf, "huggingface": to_huggingface}


def read_tensorflow(prefix: Path) -> tuple[Tensors, int]:
    """Model variables of a TensorFlow 1 checkpoint, under Hugging Face's names, and the number of others left out.

    Raises:
        DataError: unreadable, damaged, or not of TensorFlow 1.
    """
    bundle = Bundle(prefix)
    wanted = [name for name in bundle.entries if is_model_variable(name)]
    if any(name.endswith("/.ATTRIBUTES/VARIABLE_VALUE") for name in wanted):
        raise DataError(f"{prefix} is a TensorFlow 2 checkpoint; use the TensorFlow 1 one (tf1_ckpt)")
    return dict(from_tf1(name, bundle.read(name)) for name in wanted), len(bundle.entries) - len(wanted)


def read_pytorch(path: Path) -> Tensors:
    """Tensors of a .pt (only tensors are unpickled) or .safetensors file, under Hugging Face's names.

    Raises:
        DataError: unreadable, or something other than a state dict.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return from_pytorch(load_file(path))
        import torch

        loaded = torch.load(path, map_location="cpu", weights_only=True)
        state = loaded.get("model", loaded)
        return from_pytorch({name: tensor.float().numpy() for name, tensor in state.items()})
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check --source") from error
    except (RuntimeError, pickle.UnpicklingError, AttributeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is no readable state dict ({reason}); copy or convert it again") from error
    except Exception as error:
        if type(error).__module__.startswith("safetensors"):
            raise DataError(f"{path} is no safetensors file ({error}); copy or convert it again") from error
        raise


def write_pytorch(path: Path, tensors: Tensors) -> None:
    """Writes {"model": tensors} (.pt) or the tensors (.safetensors), whole or not at all."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with atomic_file(path) as partial:
        if path.suffix == ".safetensors":
            from safetensors.numpy import save  # save_file leaves a file of its own behind when it is killed

            partial.write_bytes(save(arrays, metadata={"format": "pt"}))
        else:
            import torch

            torch.save({"model": {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}}, partial)


def convert(
    source: Path, target: Path, names: str, multiple: int = 8, vocab_size: int | None = None
) -> tuple[Shape, int]:
    """Converts; returns the model's sizes and the number of variables left out.

    Args:
        source: TensorFlow prefix or folder, .pt or .safetensors file.
        target: .pt or .safetensors file.
        names: a key of NAMES.
        multiple: the vocabulary is padded to.
        vocab_size: rows of the vocabulary to keep, before padding; None: all.

    Raises:
        DataError: unreadable source, parameters missing or left over, or unwritable target.
    """
    if target.suffix not in (".pt", ".safetensors"):
        raise DataError(f"{target}: the target must end in .pt or .safetensors")
    if source.suffix in (".pt", ".pth", ".bin", ".safetensors"):
        tensors, skipped = read_pytorch(source), 0
    else:
        tensors, skipped = read_tensorflow(prefix_of(source))
    size = vocab_size or check_complete(tensors).vocabulary
    tensors = resize_vocabulary(tensors, size + -size % multiple)
    shape = check_complete(tensors)
    write_pytorch(target, NAMES[names](tensors))
    return shape, skipped


def _main(options: argparse.Namespace) -> None:
    shape, skipped = convert(options.source, options.target, options.names, options.pad_vocab_to, options.vocab_size)
    print(
        f"{options.target}: {shape.layers} layers, {shape.hidden} wide, {shape.vocabulary} words, "
        f"{len(shape.parameters())} parameters; {skipped} other variables left out",
        file=sys.stderr,
    )


def main() -> None:
    """Command line."""
    parser = stage_parser("convert_checkpoint", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="TensorFlow prefix or folder, .pt or .safetensors")
    parser.add_argument("--target", type=Path, required=True, help=".pt or .safetensors")
    parser.add_argument("--names", choices=sorted(NAMES), default="mlperf", help="(default %(default)s)")
    parser.add_argument(
        "--pad-vocab-to", type=positive, default=8, help="multiple to pad the vocabulary to (default %(default)s)"
    )
    parser.add_argument("--vocab-size", type=positive, help="words to keep, e.g. 30522 (default: all in the source)")
    run(parser, _main)


if __name__ == "__main__":
    main()
