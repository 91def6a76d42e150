"""Weights from other programs load under their names, and nothing is ignored silently."""

import re

import pytest
import torch

from bert.checkpoint.weights import load_weights
from common.env import ConfigError

from ..conftest import VOCABULARY
from ..states import same

WORDS = "bert.embeddings.word_embeddings.weight"
BIAS, DECODER = "cls.predictions.bias", "cls.predictions.decoder.weight"


@pytest.fixture
def model(tiny, make_model):
    return make_model(tiny, seed=1, dtype=torch.float32)


def _unpadded(state):
    cut = {name: state[name][:VOCABULARY].clone() for name in (WORDS, BIAS)}
    return state | cut


def _mlperf(state):
    """The names of NVIDIA's converted model.ckpt-28252.pt: fused dense-and-activation layers, the decoder repeated."""
    renamed = {}
    for name, tensor in state.items():
        for part in (".intermediate.dense.", "pooler.dense.", "transform.dense."):
            name = name.replace(part, part.replace("dense", "dense_act"))
        renamed[name] = tensor
    return {"model": renamed | {DECODER: state[WORDS].clone()}}


def _old(state):
    gamma, beta = "LayerNorm.gamma", "LayerNorm.beta"
    short = {"LayerNorm.weight": gamma, "LayerNorm.bias": beta}
    return {
        "module." + re.sub(r"LayerNorm\.\w+", lambda norm: short[norm[0]], name): tensor
        for name, tensor in state.items()
    }


def _segmented(state):
    """As of two models in one."""
    kinds = {True: "bert_model_segment.", False: "heads_only_segment."}
    return {kinds[name.startswith("bert.")] + name: t for name, t in state.items()}


FORMS = {
    "own": dict,
    "MLPerf's": _mlperf,
    "MLPerf's, unpadded": lambda state: _mlperf(_unpadded(state)),
    "old": _old,
    "segmented": _segmented,
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_every_supported_form_load(tiny, model, make_model, tmp_path, form):
    target = make_model(tiny, seed=2, dtype=torch.float32)
    state = dict(model.state_dict())
    torch.save(FORMS[form](state), tmp_path / "weights.pt")
    load_weights(target, tmp_path / "weights.pt")
    if "unpadded" in form:
        state[WORDS][VOCABULARY:] = 0
    assert same(dict(target.state_dict()), state)


def _refused(model, state, folder):
    """What is said of a file of these weights."""
    torch.save(state, folder / "w.pt")
    with pytest.raises(ConfigError) as caught:
        load_weights(model, folder / "w.pt")
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
