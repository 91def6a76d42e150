"""Twenty updates of the whole trainer on two ranks, against the reference's formulas written out
again in fp64.

The re-statement takes one sequence at a time, without packing, padding, flat buffers or ranks:
BERT's forward pass (google-research/bert, modeling.py), the losses, clipping of every micro-batch,
LAMB with its list of parameters that are not decayed, and the learning rate with warm-up and
polynomial decay of MLCommons' reference.
"""

import functools
import itertools
import math

import numpy as np
import torch

from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.model.config import BertConfig
from bert.optim import rules
from bert.training.schedule import ScheduleConfig, learning_rate

from ..plain import model_of, step_of
from ..ranks import run_ranks

NUM_STEPS, NUM_RANKS, NUM_MICRO_BATCHES, NUM_ROWS = 20, 2, 2, 1
LENGTH, VOCABULARY, NUM_HEADS = 16, 61, 2
MODEL = BertConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=NUM_HEADS,
                   intermediate_size=32, max_position_embeddings=LENGTH, initializer_range=0.2, hidden_act="gelu",
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
BASE_RATE, WARMUP = 1e-3, 4
BETA_1, BETA_2, EPSILON, DECAY, MAX_NORM = 0.83, 0.925, 1e-6, 0.01, 1.0
KEY_BIAS = "attention.self.key.bias"  # its true gradient is 0


# --- the trainer


@functools.cache
def _batch(step, rank, micro):
    seed = (step * NUM_RANKS + rank) * NUM_MICRO_BATCHES + micro
    records = synthetic_records(NUM_ROWS, LENGTH, VOCABULARY, packed=True, seed=seed)
    return make_batch(records, np.arange(records.num_sequences), LENGTH)


def _model():
    model = model_of(MODEL)
    generator = torch.Generator().manual_seed(1)
    # Biases and norms away from 0 and 1, so that a wrong one shows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.cls.predictions.bias[VOCABULARY:].zero_()
    return model


def _train(world, folder):
    for sharded in (False, True):
        rule = rules.LambConfig(beta1=BETA_1, beta2=BETA_2, eps=EPSILON, weight_decay=DECAY)  # fmt: skip
        given = {"sharded": sharded, "clip": "before", "max_grad_norm": MAX_NORM}
        step = step_of(_model(), "fp32", world, True, lamb=rule, **given)
        rates = {"lr": BASE_RATE, "max_steps": NUM_STEPS + 5, "warmup_steps": WARMUP}
        schedule = ScheduleConfig(**rates)
        losses = []
        for number in range(NUM_STEPS):
            micros = range(NUM_MICRO_BATCHES)
            batches = [_batch(number, world.rank, micro) for micro in micros]
            result = step(batches, learning_rate(number + 1, schedule))
            losses.append([float(loss) for loss in result.losses])
        everyones = [None] * NUM_RANKS
        torch.distributed.all_gather_object(everyones, losses)
        state = step.state_dict()["optimizer"]
        if world.is_main:
            torch.save({"losses": everyones, **state}, folder / f"{int(sharded)}.pt")


# --- the re-statement


def _rate(step):
    """With n steps done before: base n / warm-up, then a line from the base at step 0 to 0 at the end."""
    n = step - 1
    return BASE_RATE * (n / WARMUP if n < WARMUP else 1 - n / (NUM_STEPS + 5))


def _norm(w, name, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    scaled = (x - mean) / torch.sqrt(variance + 1e-12)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _dense(w, name, x):
    return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _encode(w, ids, segments):
    kinds = "word", "position", "token_type"
    tables = [w[f"bert.embeddings.{kind}_embeddings.weight"] for kind in kinds]
    x = tables[0][ids] + tables[1][: len(ids)] + tables[2][segments]
    x = _norm(w, "bert.embeddings.LayerNorm", x)
    for number in range(MODEL.num_hidden_layers):
        layer = f"bert.encoder.layer.{number}."
        q, k, v = (
            _dense(w, f"{layer}attention.self.{part}", x)
            .view(len(ids), NUM_HEADS, -1)
            .transpose(0, 1)
            for part in ("query", "key", "value")
        )
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), dim=-1)
        context = (weights @ v).transpose(0, 1).reshape(len(ids), -1)
        attended = _dense(w, f"{layer}attention.output.dense", context)
        x = _norm(w, f"{layer}attention.output.LayerNorm", x + attended)
        wide = _gelu(_dense(w, f"{layer}intermediate.dense", x))
        narrow = _dense(w, f"{layer}output.dense", wide)
        x = _norm(w, f"{layer}output.LayerNorm", x + narrow)
    return x


def _losses(w, batch):
    """(mean over the masked tokens, mean over the sequences)."""
    offsets, masked = batch.cu_seqlens.tolist(), batch.masked_positions
    words, segments = batch.input_ids.long(), batch.segment_ids.long()
    mlm, nsp = [], []
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        x = _encode(w, words[begin:end], segments[begin:end])
        mine = (begin <= masked) & (masked < end)
        places = masked[mine].long() - begin
        t = _gelu(_dense(w, "cls.predictions.transform.dense", x[places]))
        t = _norm(w, "cls.predictions.transform.LayerNorm", t)
        logits = t @ w["bert.embeddings.word_embeddings.weight"].t()
        logits = (logits + w["cls.predictions.bias"])[:, :VOCABULARY]
        right = logits.gather(1, batch.masked_labels[mine, None])[:, 0]
        mlm.append(torch.logsumexp(logits, 1) - right)
        pooled = torch.tanh(_dense(w, "bert.pooler.dense", x[0]))
        logits = _dense(w, "cls.seq_relationship", pooled)
        right = logits[batch.next_sentence_labels[number]]
        nsp.append(torch.logsumexp(logits, 0) - right)
    return torch.cat(mlm).mean(), torch.stack(nsp).mean()


def _reference():
    """(losses by rank and step, state) in fp64."""
    parameters = _model().named_parameters()
    w = {name: p.detach().double().requires_grad_() for name, p in parameters}
    m, v = ({name: torch.zeros_like(p) for name, p in w.items()} for _ in range(2))
    losses = np.zeros((NUM_RANKS, NUM_STEPS, 2))
    for t in range(1, NUM_STEPS + 1):
        gradient = {name: torch.zeros_like(p) for name, p in w.items()}
        for rank, micro in itertools.product(
            range(NUM_RANKS), range(NUM_MICRO_BATCHES)
        ):
            pair = _losses(w, _batch(t - 1, rank, micro))
            own = torch.autograd.grad(sum(pair), list(w.values()))
            norm = math.sqrt(sum(float(g.square().sum()) for g in own))
            assert norm > MAX_NORM, "nothing to clip"
            for name, g in zip(w, own, strict=True):
                share = MAX_NORM / norm / (NUM_RANKS * NUM_MICRO_BATCHES)
                gradient[name] += g * share
            found = [float(loss.detach()) for loss in pair]
            losses[rank, t - 1] += np.array(found) / NUM_MICRO_BATCHES
        with torch.no_grad():
            for name, p in w.items():
                m[name] = BETA_1 * m[name] + (1 - BETA_1) * gradient[name]
                v[name] = BETA_2 * v[name] + (1 - BETA_2) * gradient[name] ** 2
                first, second = m[name] / (1 - BETA_1**t), v[name] / (1 - BETA_2**t)
                u = first / (torch.sqrt(second) + EPSILON)
                ratio = 1.0
                if not any(word in name for word in ("bias", "LayerNorm")):
                    u = u + DECAY * p
                    ratio = p.norm() / u.norm()
                p -= _rate(t) * ratio * u
    return losses, {"masters": w, "first_moments": m, "second_moments": v}


def test_twenty_updates_equal_the_reference_formulas_in_every_tensor(tmp_path):
    run_ranks(_train, NUM_RANKS, arguments=(tmp_path,))
    losses, expected = _reference()
    for sharded in (False, True):
        found = torch.load(tmp_path / f"{int(sharded)}.pt")
        assert found["num_steps"] == NUM_STEPS
        np.testing.assert_allclose(np.array(found["losses"]), losses, rtol=1e-5)
        worst = {}
        for part, tensors in expected.items():
            for name, tensor in tensors.items():
                error = (found[part][name].double() - tensor).norm()
                if part != "masters" and name.endswith(KEY_BIAS):
                    assert found[part][name].abs().max() < 1e-6
                else:
                    worst[part, name] = float(error / tensor.norm())
        name, error = max(worst.items(), key=lambda item: item[1])
        assert error < 1e-5, f"sharded {sharded}: {name} differs by {error:.1e}"
