"""Weights from other programs load under their names, and nothing is ignored silently."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
import transformers

from bert.checkpoint.weights import canonical_name, load_weights
from common.env import ConfigError

from ..states import same

WORDS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"


@pytest.fixture
def model(tiny, make_model):
    return make_model(tiny, seed=1, dtype=torch.float32)


def _same(model, other):
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))


def _unpadded(state, vocab_size):
    padded = WORDS, "cls.predictions.bias"
    cut = {name: state[name][:vocab_size].clone() for name in padded}
    return state | cut


def _mlperf(state):
    """The names of NVIDIA's converted model.ckpt-28252.pt: fused dense-and-activation layers, the
    decoder repeated.
    """
    dense = (".intermediate.dense.", "pooler.dense.", "transform.dense.")
    renamed = {}
    for name, tensor in state.items():
        for part in dense:
            name = name.replace(part, part.replace("dense", "dense_act"))
        renamed[name] = tensor
    return {"model": renamed | {DECODER: state[WORDS].clone()}}


def _segmented(state):
    """As of two models in one."""
    kinds = {True: "bert_model_segment.", False: "heads_only_segment."}
    return {kinds[name.startswith("bert.")] + name: t for name, t in state.items()}


def _save_as_hugging_face(config, state, folder):
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    settings["hidden_act"] = config.hugging_face_hidden_act
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**settings))
    theirs.load_state_dict(_unpadded(state, config.vocab_size), strict=False)
    theirs.tie_weights()
    theirs.save_pretrained(folder)


@pytest.mark.parametrize(
    "form",
    ["own", "mlperf", "mlperf-unpadded", "segmented", "safetensors", "hugging-face"],
)
def test_weights_of_every_supported_form_load(tiny, model, make_model, tmp_path, form):
    target = make_model(tiny, seed=2, dtype=torch.float32)
    state = dict(model.state_dict())
    path = tmp_path / "model.safetensors"
    if form == "safetensors":
        safetensors.torch.save_file(state, path)
    elif form == "hugging-face":
        _save_as_hugging_face(tiny, state, tmp_path)
    else:
        forms = {
            "own": state,
            "mlperf": _mlperf(state),
            "mlperf-unpadded": _mlperf(_unpadded(state, tiny.vocab_size)),
            "segmented": _segmented(state),
        }
        torch.save(forms[form], path := tmp_path / "weights.pt")
    load_weights(target, path)
    if form in ("mlperf-unpadded", "hugging-face"):
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight[tiny.vocab_size :] = 0
    _same(model, target)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("module.bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
        ("bert.encoder.layer.0.output.LayerNorm.beta", "bert.encoder.layer.0.output.LayerNorm.bias"),
    ],
)  # fmt: skip
def test_old_layer_norm_names_are_understood(old, new):
    assert canonical_name(old) == new


def _refused(model, state, folder) -> str:
    """What is said of a file of these weights; the model is left as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "w.pt")
    with pytest.raises(ConfigError) as caught:
        load_weights(model, folder / "w.pt")
    assert before.keys() == model.state_dict().keys()
    return str(caught.value)


def test_weights_that_are_not_finite_are_refused(model, tmp_path):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["cls.predictions.bias"][2] = float("nan")
    said = _refused(model, state, tmp_path)
    assert "cls.predictions.bias holds NaN or infinity: start from other" in said


def test_every_unmatched_name_is_listed(model, tmp_path):
    state = dict(model.state_dict())
    removed = [name for name in state if ".layer.1." in name]
    for name in removed:
        del state[name]
    state["bert.encoder.layer.7.extra"] = torch.zeros(1)
    state["cls.seq_relationship.bias"] = torch.zeros(3)
    said = _refused(model, state, tmp_path)
    for name in removed:
        assert f"{name} is missing" in said
    assert "bert.encoder.layer.7.extra is not in this model" in said
    assert "cls.seq_relationship.bias is (3,), expected (2,)" in said


def test_an_untied_decoder_is_refused(model, tmp_path):
    state = dict(model.state_dict())
    state[DECODER] = state[WORDS] + 1
    assert "decoder.weight differs" in _refused(model, state, tmp_path)
