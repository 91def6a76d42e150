"""Models in the layout of Hugging Face's Hub: a folder of config.json, weights and tokenizer
files.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from bert.data.records import DataError
from bert.data.tokens import words_of
from bert.model.config import BertConfig
from common.env import ConfigError
from common.files import object_of, whole_file, write_json, write_text

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
WORDS, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
PRE_LN = "Hugging Face's BERT cannot hold this Pre-LN model (layer_norm_large_model)"
_CONFIGS = ("bert_config.json", "config.json")


def weights_in(folder: Path) -> Path | None:
    """The weights file in a folder of the Hub's layout, or the index of several."""
    return next((path for name in WEIGHTS if (path := folder / name).is_file()), None)


def config_beside(weights: Path) -> Path | None:
    """The model's config beside its weights: Google's, or Hugging Face's."""
    return next(
        (path for name in _CONFIGS if (path := weights.parent / name).is_file()), None
    )


def lower_case(vocab_file: Path) -> bool:
    """Whether text is lower-cased for this vocabulary: by tokenizer_config.json beside it, or by
    its words.
    """
    given = object_of(vocab_file.parent / "tokenizer_config.json").get("do_lower_case")
    if isinstance(given, bool):
        return given
    # [CLS] and its like are upper case in every vocabulary.
    return all(
        word == word.lower() or (word[0], word[-1]) == ("[", "]")
        for word in _words(vocab_file)
    )


def _words(vocab_file: Path) -> list[str]:
    try:
        return words_of(vocab_file)
    except DataError as error:
        raise ConfigError(f"{error}: give the model's vocab.txt") from None


def check_vocabulary(vocab_file: Path, config: BertConfig, md5: str = "") -> None:
    """Raises ConfigError for a vocabulary that is not the model's: of another size, or another md5,
    if known.

    A model may have padding rows beyond its words, up to a multiple of 128.
    """
    number = len(_words(vocab_file))
    if config.vocab_size not in {
        -(-number // multiple) * multiple for multiple in (1, 2, 4, 8, 16, 32, 64, 128)
    }:
        raise ConfigError(
            f"{vocab_file} has {number} words, and the model {config.vocab_size}: give its own vocab.txt"
        )
    md5_of_file = hashlib.md5(vocab_file.read_bytes()).hexdigest()
    if md5 and md5_of_file != md5:
        raise ConfigError(
            f"{vocab_file} has md5 {md5_of_file}, and the model was trained with {md5}: give its own vocab.txt"
        )


def config_values(config: BertConfig, architecture: str) -> dict[str, Any]:
    """config.json for Hugging Face's class of that name; of a Pre-LN model, which they lack, for
    ours alone.

    Without a model_type their classes refuse it rather than compute another model.
    """
    values = dataclasses.asdict(config) | {"hidden_act": config.hugging_face_hidden_act}
    del values["next_sentence"]  # follows from the class, and from the weights
    if values.pop("layer_norm_large_model"):
        return values | {"layer_norm_large_model": True}
    return values | {
        "architectures": [architecture],
        "model_type": "bert",
        "pad_token_id": 0,
    }


def write(
    folder: Path, tensors: Mapping[str, Tensor], config: BertConfig, values: Mapping[str, Any], vocab_file: Path,
    lower_case: bool,
) -> None:  # fmt: skip
    """Writes weights in fp32, without the vocabulary's padding rows, ``values`` as config.json, and
    the tokenizer.

    Each file appears whole. Raises OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".tmp*"):  # left by safetensors when killed
        left.unlink()
    kept = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    for name in kept.keys() & {WORDS, BIAS}:
        # transformers compares the rows with vocab_size, which counts words.
        kept[name] = kept[name][: config.vocab_size].clone()
    with whole_file(folder / "model.safetensors") as partial:
        partial.touch()
        mode = partial.stat().st_mode
        safetensors.torch.save_file(kept, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # the usual mode: safetensors writes for its user alone
    if vocab_file.suffix == ".json":
        write_text(folder / "vocab.txt", "\n".join(_words(vocab_file)) + "\n")
    elif vocab_file.resolve() != (folder / "vocab.txt").resolve():
        with whole_file(folder / "vocab.txt") as partial:
            shutil.copyfile(vocab_file, partial)
    tokenizer: dict[str, Any] = {"tokenizer_class": "BertTokenizer"}
    tokenizer["model_max_length"] = config.max_position_embeddings
    # What the vocabulary's owner says of it stays, but for the casing that this model was trained
    # with.
    tokenizer |= object_of(vocab_file.parent / "tokenizer_config.json")
    tokenizer["do_lower_case"] = lower_case
    for name, content in (
        ("tokenizer_config.json", tokenizer),
        ("config.json", values),
    ):
        write_json(folder / name, content)
