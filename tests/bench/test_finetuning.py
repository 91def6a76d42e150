"""bench/finetuning.py: samples of both loops and the order of predictions."""

from __future__ import annotations

import argparse
import importlib

import numpy as np
import pytest
import torch

from finetune.batches import Samples


@pytest.fixture
def bench(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "bench"))
    return importlib.import_module("finetuning")


def test_predictions_come_back_in_the_order_of_the_samples(bench):
    """The class depends only on a sequence's first token, not on its batch."""

    class Model:
        def eval(self):
            return self

        train = eval

        def __call__(self, input_ids, attention_mask):
            assert input_ids.shape == attention_mask.shape
            assert (input_ids[attention_mask == 0] == 0).all()
            scores = torch.nn.functional.one_hot(input_ids[:, 0] % 3, 3)
            return argparse.Namespace(logits=scores.float())

    lengths = np.random.default_rng(0).integers(1, 30, 70).astype(np.int32)
    sequences = [
        (np.full(length, number + 1, dtype=np.int32), 1)
        for number, length in enumerate(lengths)
    ]
    samples = Samples(sequences, {"labels": np.zeros(70, np.int64)})
    loop = bench.HuggingFace.__new__(bench.HuggingFace)
    loop.model = Model()
    for by_length in (False, True):
        found = loop.predict(samples, by_length)
        assert found.tolist() == [(number + 1) % 3 for number in range(70)]


def test_a_subset_is_evenly_spaced(bench):
    samples = Samples([(np.zeros(1, np.int32), 1)] * 9, {"labels": np.arange(9)})
    assert bench.some_of(samples, 3).labels["labels"].tolist() == [0, 4, 8]
    assert bench.some_of(samples, 100).labels["labels"].tolist() == list(range(9))
