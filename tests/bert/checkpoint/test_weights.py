"""Weights from other programs load under their names, and nothing is ignored silently."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
import transformers

from bert.checkpoint.weights import canonical_name, load_weights
from common.env import ConfigError


def _same(model, other):
    for (name, a), (_, b) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def _unpadded(state, vocab_size):
    padded = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
    return {
        name: tensor[:vocab_size].clone() if name in padded else tensor
        for name, tensor in state.items()
    }


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
    renamed["cls.predictions.decoder.weight"] = state[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    return {"model": renamed}


@pytest.mark.parametrize(
    "form",
    ["own", "mlperf", "mlperf-unpadded", "segmented", "safetensors", "hugging-face"],
)
def test_weights_of_every_supported_form_load(tiny, make_model, tmp_path, form):
    source, target = (
        make_model(tiny, seed=1, dtype=torch.float32),
        make_model(tiny, seed=2, dtype=torch.float32),
    )
    state = dict(source.state_dict())
    path = tmp_path / (
        "weights.safetensors"
        if form in ("safetensors", "hugging-face")
        else "weights.pt"
    )
    if form == "own":
        torch.save(state, path)
    elif form == "mlperf":
        torch.save(_mlperf(state), path)
    elif form == "mlperf-unpadded":
        torch.save(_mlperf(_unpadded(state, tiny.vocab_size)), path)
    elif form == "segmented":
        torch.save(
            {
                (
                    "bert_model_segment."
                    if n.startswith("bert.")
                    else "heads_only_segment."
                )
                + n: t
                for n, t in state.items()
            },
            path,
        )
    elif form == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        settings = {name: getattr(tiny, name) for name in tiny.__dataclass_fields__}
        settings["hidden_act"] = tiny.hugging_face_hidden_act
        hugging_face = transformers.BertForPreTraining(
            transformers.BertConfig(**settings)
        )
        hugging_face.load_state_dict(_unpadded(state, tiny.vocab_size), strict=False)
        hugging_face.tie_weights()
        hugging_face.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
    load_weights(target, path)
    word = source.bert.embeddings.word_embeddings.weight
    if form in ("mlperf-unpadded", "hugging-face"):
        with torch.no_grad():
            word[tiny.vocab_size :] = 0
    _same(source, target)


def test_old_layer_norm_names_are_understood():
    assert (
        canonical_name("module.bert.embeddings.LayerNorm.gamma")
        == "bert.embeddings.LayerNorm.weight"
    )
    assert (
        canonical_name("bert.encoder.layer.0.output.LayerNorm.beta")
        == "bert.encoder.layer.0.output.LayerNorm.bias"
    )


def test_weights_that_are_not_finite_are_refused(tiny, make_model, tmp_path):
    state = dict(make_model(tiny, dtype=torch.float32).state_dict())
    state["cls.predictions.bias"][2] = float("nan")
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(
        ConfigError,
        match=r"cls.predictions.bias holds NaN or infinity: start from other weights",
    ):
        load_weights(make_model(tiny, dtype=torch.float32), tmp_path / "w.pt")


def test_every_unmatched_name_is_listed(tiny, make_model, tmp_path):
    model = make_model(tiny, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = dict(model.state_dict())
    removed = [name for name in state if ".layer.1." in name]
    for name in removed:
        del state[name]
    state["bert.encoder.layer.7.extra"] = torch.zeros(1)
    state["cls.seq_relationship.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ConfigError) as caught:
        load_weights(model, tmp_path / "w.pt")
    message = str(caught.value)
    for name in removed:
        assert f"{name} is missing" in message
    assert "bert.encoder.layer.7.extra is not in this model" in message
    assert "cls.seq_relationship.bias is (3,), expected (2,)" in message
    assert before.keys() == model.state_dict().keys()


def test_an_untied_decoder_is_refused(tiny, make_model, tmp_path):
    model = make_model(tiny, dtype=torch.float32)
    state = dict(model.state_dict())
    state["cls.predictions.decoder.weight"] = (
        state["bert.embeddings.word_embeddings.weight"] + 1
    )
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"decoder\.weight differs"):
        load_weights(model, tmp_path / "w.pt")
