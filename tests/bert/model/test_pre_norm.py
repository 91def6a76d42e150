"""BERT-1.5B and 5B: Pre-LN layers against a re-statement of their equations, and the published sizes."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert import kernels
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import uninitialized

from ..plain import CPU, NO_DROPOUT, close, model_of

QKV = "query", "key", "value"
SIZES = {
    "bert_base": 110_111_042,
    "bert_large": 336_232_258,
    "bert_1.5b": 1_530_388_930,
    "bert_5b": 6_282_396_202,
    "bert_5b_30522": 5_049_243_970,
}


def _restated(p, config, batch):
    """Sum of the losses by the equations alone: p has the parameters by name; one sequence at a time, no dropout."""

    def norm(name, x):
        scale, shift = p[f"{name}.weight"], p[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], scale, shift, config.layer_norm_eps)

    def dense(name, x):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    hidden = []
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        part = slice(begin, end)
        names = ("word", "position", "token_type")
        tables = [p[f"bert.embeddings.{name}_embeddings.weight"] for name in names]
        ids = batch.input_ids[part], batch.position_ids[part], batch.segment_ids[part]
        rows = (table[i.long()] for table, i in zip(tables, ids, strict=True))
        h = norm("bert.embeddings.LayerNorm", sum(rows))
        stream = torch.zeros_like(h)
        for number in range(config.num_hidden_layers):
            name = f"bert.encoder.layer.{number}"
            heads = []
            for head in range(config.num_attention_heads):
                own = slice(head * config.head_size, (head + 1) * config.head_size)
                names = (f"{name}.attention.self.{part}" for part in QKV)
                q, k, v = (dense(name, h)[:, own] for name in names)
                logits = q @ k.T / math.sqrt(config.head_size)
                heads.append(torch.softmax(logits, dim=-1) @ v)
            attended = torch.cat(heads, dim=1)
            stream = stream + dense(f"{name}.attention.output.dense", attended)
            h = norm(f"{name}.attention.output.LayerNorm", stream)
            inner = F.gelu(dense(f"{name}.intermediate.dense", h))
            stream = stream + dense(f"{name}.output.dense", inner)
            h = norm(f"{name}.output.LayerNorm", stream)
        hidden.append(h)
    h = torch.cat(hidden)
    head = "cls.predictions.transform"
    masked = F.gelu(dense(f"{head}.dense", h[batch.masked_positions]))
    table = p["bert.embeddings.word_embeddings.weight"]
    scores = norm(f"{head}.LayerNorm", masked) @ table.T + p["cls.predictions.bias"]
    words = F.cross_entropy(scores[:, : config.vocab_size], batch.masked_labels.long())
    first = torch.tanh(dense("bert.pooler.dense", h[batch.cu_seqlens[:-1].long()]))
    pairs = dense("cls.seq_relationship", first)
    return words + F.cross_entropy(pairs, batch.next_sentence_labels.long())


@pytest.fixture
def pre_norm(tiny):
    """The tiny model with three Pre-LN layers, without dropout."""
    shape = {"hidden_act": "gelu_erf", "layer_norm_large_model": True}
    return dataclasses.replace(tiny, num_hidden_layers=3, **shape, **NO_DROPOUT)


def test_gradients_are_those_of_the_equations(pre_norm, make_model, packed_batch):
    model, batch = make_model(pre_norm), packed_batch
    losses = model(batch)
    (losses.mlm + losses.nsp).backward()
    named = dict(model.named_parameters())
    copies = {n: p.detach().clone().requires_grad_() for n, p in named.items()}
    expected = _restated(copies, pre_norm, batch)
    expected.backward()
    assert (losses.mlm + losses.nsp).item() == pytest.approx(expected.item(), abs=1e-10)
    found = {name: parameter.grad for name, parameter in named.items()}
    close(found, {name: copy.grad for name, copy in copies.items()}, 1e-10, 1e-10)
    post = make_model(dataclasses.replace(pre_norm, layer_norm_large_model=False))
    assert abs(sum(post(batch)).item() - expected.item()) > 1e-2
    shapes = [(name, p.shape) for name, p in post.named_parameters()]
    assert shapes == [(name, p.shape) for name, p in copies.items()]


def test_fused_layers_equal_plain_ones(pre_norm, make_model, make_records, batch_of):
    pytest.importorskip("triton")
    model = make_model(pre_norm, dtype=torch.float32)
    batch = batch_of(make_records(1), np.arange(2))
    names = {"fused": "dropout_add_layer_norm", "attention": "sdpa_loop"}
    with kernels.triton_support.interpreted():
        choice = kernels.bind_kernels(kernels.KernelsConfig(**names), CPU)
        fused = BertForPreTraining(pre_norm, choice)
        fused.load_state_dict(model.state_dict())
        losses = [sum(either(batch)) for either in (model, fused)]
        sum(losses).backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    pairs = zip(model.named_parameters(), fused.parameters(), strict=True)
    for (name, theirs), ours in pairs:
        scale = max(1e-3, theirs.grad.abs().max().item())
        assert (ours.grad - theirs.grad).abs().max().item() < 1e-4 * scale, name


@pytest.mark.parametrize("name", SIZES)
def test_the_models_have_the_published_numbers_of_parameters(name, repository):
    """With the rows that pad the vocabulary to a multiple of 8, as the publications count them."""
    config = BertConfig.from_json(repository / "configs" / "models" / f"{name}.json")
    with uninitialized():
        model = model_of(config, seed=None)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    assert config.layer_norm_large_model == (name not in ("bert_base", "bert_large"))


def test_a_checkpoint_of_post_norm_layers_is_not_one_of_pre_norm_layers(tiny, pre_norm):
    assert "layer_norm_large_model" in pre_norm.identity
    # As checkpoints of earlier versions have it.
    assert "layer_norm_large_model" not in tiny.identity
