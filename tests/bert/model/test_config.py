"""bert_config.json of Google and config.json of Hugging Face: the same model, or a one-line
error.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
import transformers

from bert.commands import weights as trained
from bert.model.config import BertConfig
from common.env import ConfigError

GOOGLE = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 256, "max_position_embeddings": 512, "num_attention_heads": 4,
    "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": 97,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def from_values(**values) -> BertConfig:
        path = tmp_path / "bert_config.json"
        path.write_text(json.dumps(values))
        return BertConfig.from_json(path)

    return from_values


@pytest.mark.parametrize(
    ("word", "google", "hugging_face"),
    [
        ("gelu", "tanh", "erf"),
        ("gelu_new", "tanh", "tanh"),
        ("gelu_pytorch_tanh", "tanh", "tanh"),
        ("gelu_erf", "erf", "erf"),
        (None, "tanh", "erf"),
    ],
)
def test_the_form_of_gelu_depends_on_the_kind_of_config(
    word, google, hugging_face, read
):
    values = {**GOOGLE, "hidden_act": word}
    if word is None:
        del values["hidden_act"]
    assert read(**values).gelu_form == google
    assert read(**values, model_type="bert").gelu_form == hugging_face


def test_googles_gelu_is_the_formula_of_its_modeling_py(read):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in fp64."""
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    expected = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    config = read(**GOOGLE)
    ours = F.gelu(x, approximate=config.gelu_approximation)
    torch.testing.assert_close(ours, expected, atol=1e-14, rtol=0)
    erf = F.gelu(x, approximate=read(**GOOGLE, model_type="bert").gelu_approximation)
    assert (erf - expected).abs().max().item() == pytest.approx(4.73e-4, rel=0.01)


@pytest.mark.parametrize("word", ["gelu", "gelu_erf"])
def test_the_name_for_hugging_face_means_the_same_there(word, read):
    config = read(**{**GOOGLE, "hidden_act": word})
    theirs = transformers.activations.ACT2FN[config.hugging_face_hidden_act]
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    ours = F.gelu(x, approximate=config.gelu_approximation)
    torch.testing.assert_close(theirs(x), ours, atol=1e-12, rtol=0)
    named = GOOGLE | {"hidden_act": config.hugging_face_hidden_act}
    assert read(**named, model_type="bert").gelu_form == config.gelu_form


def test_a_config_that_hugging_face_writes_is_read(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    written = transformers.BertConfig(vocab_size=97, **shape)
    written.architectures = ["BertForPreTraining"]
    written.save_pretrained(tmp_path)
    config = BertConfig.from_json(tmp_path / "config.json")
    assert (config.gelu_form, shape | vars(config)) == ("erf", vars(config))
    full = tmp_path / "full.json"
    full.write_text(json.dumps(written.to_dict()))
    assert BertConfig.from_json(full) == config


def test_keys_of_other_heads_and_of_tokens_are_harmless(read):
    extra = {"directionality": "bidi", "pooler_type": "first_token_transform"}
    extra |= {"pad_token_id": 0, "use_cache": True}
    assert read(**GOOGLE, **extra) == read(**GOOGLE)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_size", 32, "unknown key embedding_size: remove it"),
        ("num_hidden_layer", 3, "unknown key num_hidden_layer"),
        ("position_embedding_type", "relative_key", "position_embedding_type='relative_key': only 'absolute'"),
        ("tie_word_embeddings", False, "tie_word_embeddings=False: only True"),
        ("is_decoder", True, "is_decoder=True: only False"),
        ("model_type", "roberta", "model_type='roberta': only 'bert'"),
    ],
)  # fmt: skip
def test_a_key_that_changes_the_model_is_an_error(key, value, message, read):
    with pytest.raises(ConfigError, match=message):
        read(**GOOGLE, **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", 65, "is not a multiple of num_attention_heads=4"),
        ("vocab_size", "97", "expected an integer of at least 1"),
        ("hidden_dropout_prob", 1.0, "expected a probability"),
        ("initializer_range", "0.02", "expected a number of at least 0"),
        ("layer_norm_eps", float("nan"), "expected a number of at least 0"),
        ("hidden_act", ["gelu"], "expected one of gelu"),
        ("layer_norm_large_model", 1, "expected true or false"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_and_key(
    key, value, expected, read, tmp_path
):
    with pytest.raises(ConfigError) as raised:
        read(**{**GOOGLE, key: value})
    start, _, reason = str(raised.value).partition(f": {key}={value!r}")
    assert start == f"BERT_CONFIG={tmp_path / 'bert_config.json'}"
    assert expected in reason


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ({"hidden_size": 65}, "hidden_size=65 is not a multiple"),
        ({"later": 1}, "later"),
    ],
)
def test_a_model_that_a_checkpoint_cannot_have_is_an_error_that_names_it(
    kept, reason, tmp_path
):
    path = tmp_path / "step_0000000001.pt"
    torch.save({"bert_config": kept}, path)
    with pytest.raises(ConfigError, match=rf"^{path}: bert_config: .*{reason}"):
        trained.describe(path)
