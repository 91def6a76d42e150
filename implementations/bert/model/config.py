"""The shape of a BERT: what bert_config.json says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.env import ConfigError

GELU_APPROXIMATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_tanh": "tanh"}
_SMALLEST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1,
    "type_vocab_size": 2,
}


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes and rates of one model, under the names of bert_config.json. The defaults are BERT-large, uncased."""

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

    def __post_init__(self) -> None:
        for name, low in _SMALLEST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"bert_config: {name}={value!r}: expected an integer of at least {low}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ConfigError(f"bert_config: {name}={value!r}: expected a probability of at least 0, below 1")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"bert_config: hidden_size={self.hidden_size} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.hidden_act not in GELU_APPROXIMATIONS:
            known = ", ".join(GELU_APPROXIMATIONS)
            raise ConfigError(f"bert_config: hidden_act={self.hidden_act!r}: expected one of {known}")

    @property
    def head_size(self) -> int:
        """Width H of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: the vocabulary rounded up to a multiple of 8, which the GEMMs want."""
        return -(-self.vocab_size // 8) * 8

    @property
    def gelu_approximation(self) -> str:
        """The ``approximate`` argument of GELU: "none" (erf) or "tanh"."""
        return GELU_APPROXIMATIONS[self.hidden_act]

    @classmethod
    def from_json(cls, path: Path) -> BertConfig:
        """Reads bert_config.json (Google's or Hugging Face's). Raises ConfigError naming the file and the key."""
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"BERT_CONFIG={path}: {error.strerror}: give a bert_config.json") from None
        except ValueError as error:
            raise ConfigError(f"BERT_CONFIG={path}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ConfigError(f"BERT_CONFIG={path}: expected a JSON object")
        if values.get("position_embedding_type", "absolute") != "absolute":
            raise ConfigError(f"BERT_CONFIG={path}: position_embedding_type must be absolute")
        missing = [key for key in ("vocab_size", "hidden_size", "num_hidden_layers") if key not in values]
        if missing:
            raise ConfigError(f"BERT_CONFIG={path}: {', '.join(missing)} missing: is this a bert_config.json?")
        return cls(**{key: value for key, value in values.items() if key in cls.__dataclass_fields__})
