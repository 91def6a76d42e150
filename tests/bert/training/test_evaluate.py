"""When a run evaluates and on which sequences; padding does not count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bert.data.batch import PretrainingCapacity, make_batch
from bert.training.evaluate import (
    EvaluationConfig,
    _count,
    evaluation_steps,
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
