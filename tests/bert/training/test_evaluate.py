"""When a run evaluates and on which sequences; padding does not count."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert.data.batch import PretrainingCapacity, make_batch
from bert.training.evaluate import (
    EvaluationConfig,
    Evaluator,
    _count,
    evaluation_steps,
    share,
)
from bert.training.graph import graph_capacity, static_batch

from ..plain import model_of


@pytest.mark.parametrize(
    ("start", "every", "steps"),
    [(0, 300, {3, 6, 9}), (500, 300, {5, 8}), (100, 300, {1, 4, 7, 10}), (901, 300, {10}), (0, 0, set())],
)  # fmt: skip
def test_evaluations_begin_at_their_start_and_go_on_at_their_interval(
    start, every, steps
):
    config = EvaluationConfig(start_samples=start, every_samples=every)
    assert evaluation_steps(config, 100, 1000) == steps


def test_ranks_share_the_first_examples_alone(make_records):
    records = make_records(41, packed=False)
    parts = [share(records, 30, rank, 4) for rank in range(4)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(30))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_each_rank_tells_the_accuracy_and_losses_of_all_of_them(prepared, tiny):
    torch.manual_seed(0)
    model = model_of(tiny, seed=None)

    def evaluated(rank, size, gather):
        world = SimpleNamespace(
            rank=rank, size=size, device=torch.device("cpu"), agree=lambda *_: None, peers=lambda _: [rank],
            objects=lambda mine: [mine], first_text=str, sum=gather,
        )  # fmt: skip
        folder = Path(prepared["EVALDIR"])
        config = EvaluationConfig(evaldir=folder, num_examples=17, batch_size=4)
        length = tiny.max_position_embeddings
        return Evaluator(config, length, tiny.vocab_size, "", world)(model)

    counts = []
    for rank in range(3):
        evaluated(rank, 3, lambda totals: counts.append(totals) or totals)
    together = evaluated(0, 3, lambda totals: sum(counts))
    whole = dataclasses.astuple(evaluated(0, 1, lambda totals: totals))
    assert dataclasses.astuple(together) == pytest.approx(whole, rel=1e-6)


def test_padding_of_a_fixed_capacity_counts_neither_as_words_nor_as_sequences(
    tiny, make_records
):
    torch.manual_seed(0)
    model = model_of(tiny, seed=None).eval()
    records = make_records(5, packed=False)
    batch = make_batch(records, np.arange(5), tiny.max_position_embeddings)
    room = PretrainingCapacity.of(3 * batch.num_tokens, 9)
    with torch.no_grad():
        exact = _count(model, batch)
        padded = _count(model, static_batch(batch, graph_capacity(room, 3)))
    assert exact[-1] == 5
    torch.testing.assert_close(padded, exact)
