"""bert_config.json of Google and config.json of Hugging Face: the same model, or a one-line error."""

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
    def from_values(**values):
        path = tmp_path / "bert_config.json"
        path.write_text(json.dumps(values))
        return BertConfig.from_json(path)

    return from_values


@pytest.mark.parametrize(
    ("words", "google", "hugging_face"),
    [
        ({"hidden_act": "gelu"}, "tanh", "erf"),
        ({"hidden_act": "gelu", "layer_norm_large_model": True}, "erf", "erf"),  # Habana's
        ({"hidden_act": "gelu_new"}, "tanh", "tanh"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "tanh", "tanh"),
        ({"hidden_act": "gelu_erf"}, "erf", "erf"),
        ({}, "tanh", "erf"),
    ],
)  # fmt: skip
def test_the_form_of_gelu_depends_on_the_kind_of_config(words, google, hugging_face, read):  # fmt: skip
    values = {name: GOOGLE[name] for name in GOOGLE.keys() - {"hidden_act"}} | words
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


def test_a_config_that_hugging_face_writes_is_read(tmp_path, read):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    written = transformers.BertConfig(vocab_size=97, **shape)
    written.architectures = ["BertForPreTraining"]
    written.save_pretrained(tmp_path)
    config = BertConfig.from_json(tmp_path / "config.json")
    assert (config.gelu_form, shape | vars(config)) == ("erf", vars(config))
    assert read(**written.to_dict()) == config
    # Keys of other heads and of tokens are harmless.
    extra = {"directionality": "bidi", "pooler_type": "first_token_transform"}
    extra |= {"pad_token_id": 0, "use_cache": True}
    assert read(**GOOGLE, **extra) == read(**GOOGLE)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("embedding_size", 32, "unknown key embedding_size: remove it"),
        ("num_hidden_layer", 3, "unknown key num_hidden_layer"),
        ("position_embedding_type", "relative_key", "{}: only 'absolute'"),
        ("tie_word_embeddings", False, "{}: only True"),
        ("is_decoder", True, "{}: only False"),
        ("model_type", "roberta", "{}: only 'bert'"),
        ("hidden_size", 65, "{} is not a multiple of num_attention_heads=4"),
        ("vocab_size", "97", "{}: expected an integer of at least 1"),
        ("hidden_dropout_prob", 1.0, "{}: expected a probability"),
        ("initializer_range", "0.02", "{}: expected a number of at least 0"),
        ("layer_norm_eps", float("nan"), "{}: expected a number of at least 0"),
        ("hidden_act", ["gelu"], "{}: expected one of gelu"),
        ("layer_norm_large_model", 1, "{}: expected true or false"),
    ],
)
def test_a_wrong_key_or_value_is_named(key, value, said, read, tmp_path):
    with pytest.raises(ConfigError) as raised:
        read(**GOOGLE | {key: value})
    start = f"BERT_CONFIG={tmp_path / 'bert_config.json'}: "
    assert str(raised.value).startswith(start + said.format(f"{key}={value!r}"))


@pytest.mark.parametrize(
    ("kept", "reason"), [({"hidden_size": 65}, "hidden_size=65 is"), ({"later": 1}, "later")]
)  # fmt: skip
def test_an_impossible_model_of_a_checkpoint_is_named(kept, reason, tmp_path):
    path = tmp_path / "step_0000000001.pt"
    torch.save({"bert_config": kept}, path)
    with pytest.raises(ConfigError, match=rf"^{path}: bert_config: .*{reason}"):
        trained.describe(path)
