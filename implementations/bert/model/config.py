"""The shape of a BERT: bert_config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.env import ConfigError, env

# Google's "gelu" is the tanh form (google-research/bert, modeling.py), Hugging Face's the erf form.
_TANH = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_tanh")
GELU_APPROXIMATIONS = dict.fromkeys(_TANH, "tanh") | {"gelu_erf": "none"}
_HUGGING_FACE_ERF = ("gelu", "gelu_python")
# Keys of published configs without effect here: tokens, return values, other heads, saving.
_HARMLESS = {
    "_name_or_path", "_num_labels", "architectures", "attn_implementation", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "cross_attention_hidden_size", "directionality", "dtype",
    "eos_token_id", "finetuning_task", "gradient_checkpointing", "id2label", "label2id", "language", "name",
    "num_labels", "output_all_encoded_layers", "output_attentions", "output_hidden_states", "output_past",
    "pad_token_id", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
}  # fmt: skip
# Keys that change the model, with the only supported value.
_ONLY = {
    "model_type": "bert", "position_embedding_type": "absolute", "tie_word_embeddings": True, "is_decoder": False,
    "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes and rates of a model, under the names of bert_config.json. The defaults are BERT-large,
    uncased.

    hidden_act is Google's name: "gelu" is the tanh form. layer_norm_large_model: Habana's key for
    the Pre-LN layers of BERT-1.5B and 5B (model/encoder.py). next_sentence: ours, False for
    masked-LM alone, without that head and pooler.
    """

    vocab_size: int = 30522
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    # Out of repr, and so of identity: checkpoints older than these keys still match.
    layer_norm_large_model: bool = field(default=False, repr=False)
    next_sentence: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # Not isinstance, by which JSON's true would be the count 1.
            given, default = type(value), getattr(type(self), name)
            right, expected = given is type(default), "true or false"
            if type(default) is float:
                is_rate = name.endswith("_prob")
                right = given in (int, float) and 0 <= value < (
                    1 if is_rate else math.inf
                )
                expected = (
                    "a probability, below 1" if is_rate else "a number of at least 0"
                )
            elif type(default) is int:
                low = 2 if name == "type_vocab_size" else 1  # segment ids are 0 and 1
                right = right and value >= low
                expected = f"an integer of at least {low}"
            elif name == "hidden_act":
                right = right and value in GELU_APPROXIMATIONS
                expected = f"one of {', '.join(GELU_APPROXIMATIONS)}"
            if not right:
                raise ConfigError(f"{name}={value!r}: expected {expected}")
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise ConfigError(
                f"hidden_size={width} is not a multiple of num_attention_heads={heads}"
            )

    @property
    def identity(self) -> str:
        """The model in one line for checkpoints; that of the usual model is the same as in earlier
        versions.
        """
        pre_norm, alone = self.layer_norm_large_model, not self.next_sentence
        return (
            repr(self)
            + " layer_norm_large_model" * pre_norm
            + " masked-LM alone" * alone
        )

    @property
    def head_size(self) -> int:
        """Width H of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: the vocabulary rounded up to a multiple of 8, for the
        GEMMs.
        """
        # 30,522 becomes 30,528, as in NVIDIA's checkpoint, for 16-bit tensor cores.
        return -(-self.vocab_size // 8) * 8

    @property
    def gelu_approximation(self) -> str:
        """The ``approximate`` argument of PyTorch's GELU: "none" (erf) or "tanh"."""
        return GELU_APPROXIMATIONS[self.hidden_act]

    @property
    def gelu_form(self) -> str:
        """Name of the GELU form in messages: "tanh" or "erf"."""
        return "tanh" if self.gelu_approximation == "tanh" else "erf"

    @property
    def hugging_face_hidden_act(self) -> str:
        """hidden_act of this GELU in a Hugging Face config.json."""
        # Under the same word they compute erf.
        return "gelu_new" if self.gelu_approximation == "tanh" else "gelu"

    @classmethod
    def from_json(cls, path: Path) -> BertConfig:
        """Reads Google's bert_config.json, or a Hugging Face config.json, recognized by its
        ``model_type``.

        In Habana's files, recognized by ``layer_norm_large_model``, "gelu" is the erf form, as
        Hugging Face's.

        Raises ConfigError naming the file and the key, also for unknown keys, which might change
        the model.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"BERT_CONFIG={path}: {error.strerror}: give a bert_config.json"
            ) from None
        except ValueError as error:
            raise ConfigError(f"BERT_CONFIG={path}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ConfigError(f"BERT_CONFIG={path}: expected a JSON object")
        for key, only in _ONLY.items():
            if values.get(key, only) not in (only, None):
                raise ConfigError(
                    f"BERT_CONFIG={path}: {key}={values[key]!r}: only {only!r} is supported"
                )
        # Refused rather than ignored: a key nobody knows may be another model's.
        known = cls.__dataclass_fields__.keys() | _HARMLESS | _ONLY.keys()
        if unknown := sorted(values.keys() - known):
            raise ConfigError(
                f"BERT_CONFIG={path}: unknown key {', '.join(unknown)}: remove it if it does not change the model"
            )
        # Without these any JSON object would pass for BERT-large, by the defaults.
        required = "vocab_size", "hidden_size", "num_hidden_layers"
        if missing := [key for key in required if key not in values]:
            raise ConfigError(
                f"BERT_CONFIG={path}: {', '.join(missing)} missing: is this a bert_config.json?"
            )
        settings = {
            key: value
            for key, value in values.items()
            if key in cls.__dataclass_fields__
        }
        is_others = (
            "model_type" in values or values.get("layer_norm_large_model") is True
        )
        if is_others and settings.get("hidden_act", "gelu") in _HUGGING_FACE_ERF:
            settings["hidden_act"] = "gelu_erf"
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError(f"BERT_CONFIG={path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Where a run's bert_config.json is."""

    bert_config: Path | None = env(
        "BERT_CONFIG", None, "bert_config.json; unset: the one in CHECKPOINTDIR_PHASE1"
    )
    phase1: Path | None = env(
        "CHECKPOINTDIR_PHASE1",
        None,
        "folder of bert_config.json, vocab.txt and checkpoint",
    )

    @property
    def bert_config_path(self) -> Path:
        if self.bert_config is not None:
            return self.bert_config
        if self.phase1 is None:
            raise ConfigError(
                "BERT_CONFIG and CHECKPOINTDIR_PHASE1 are both unset: give the bert_config.json"
            )
        return self.phase1 / "bert_config.json"
