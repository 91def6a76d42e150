"""A batch holds its sequences unchanged, end to end."""

import dataclasses
import os
import sys

import numpy as np
import pytest
import torch

from bert.data.batch import gather_batch, make_batch
from bert.data.records import DataError
from bert.data.synthetic import synthetic_records

from ...forked import Command
from .samples import sequences_of


def test_batch_is_its_sequences_end_to_end(make_records, batch_of):
    records, chosen = make_records(6), [5, 0, 3]
    batch, found = batch_of(records, chosen), sequences_of(records)
    offsets, masked = batch.cu_seqlens.tolist(), 0
    assert offsets[-1] == batch.num_tokens == len(batch.input_ids)
    for sequence, begin, end in zip(chosen, offsets, offsets[1:], strict=False):
        ids, segments, positions, labels = (part.tolist() for part in found[sequence])
        assert batch.input_ids[begin:end].tolist() == ids
        assert batch.position_ids[begin:end].tolist() == list(range(end - begin))
        assert batch.segment_ids[begin:end].tolist() == segments
        span = slice(masked, masked + len(positions))
        assert (batch.masked_positions[span] - begin).tolist() == positions
        assert batch.masked_labels[span].tolist() == labels
        masked = span.stop
    assert (batch.num_sequences, batch.num_masked) == (3, masked)
    expected = records.next_sentence_labels[chosen].tolist()
    assert batch.next_sentence_labels.tolist() == expected


def test_a_token_beyond_the_vocabulary_is_reported(make_records):
    records = make_records(4)
    largest = int(max(records.input_ids.max(), records.masked_lm_ids.max()))
    line = [records], [np.arange(4)], np.arange(4), 48
    assert gather_batch(*line, largest + 1).num_sequences == 4
    ids = f"token ids .* to {largest} .* vocab_size {largest}: "
    with pytest.raises(DataError, match=ids):
        gather_batch(*line, largest)


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("sequence_offsets", 4, 1 << 40), ("sequence_offsets", 0, -1), ("sequence_offsets", 1, 0),
        ("masked_lm_offsets", 4, 1 << 40), ("masked_lm_offsets", 0, -1), ("masked_lm_offsets", 1, 1 << 20),
        ("segment_b_start", 2, 49), ("segment_b_start", 2, -1), ("sequence_offsets", 3, 10**6),
    ],
)  # fmt: skip
def test_offsets_outside_are_an_error(make_records, field, index, value):
    records = make_records(4)
    offsets = getattr(records, field).copy()
    offsets[index] = value
    damaged = dataclasses.replace(records, **{field: offsets})
    with pytest.raises(DataError, match="verify"):
        make_batch(damaged, np.arange(4), 48)


# In a process that has imported all, wherever it is started.
WITHOUT_NUMBA = """
import sys
assert "torch._dynamo" in sys.modules
sys.modules["numba"] = None
for name in [name for name in sys.modules if name.startswith("bert.data")]:
    del sys.modules[name]
import numpy, torch
from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
records = synthetic_records(4, 512, 1000, packed=True, seed=3)
torch.save(vars(make_batch(records, numpy.arange(records.num_sequences), 512)), "batch.pt")
"""


def _here():
    sys.path.insert(0, os.getcwd())


def test_batches_without_numba_are_the_same_and_a_line_says_so(tmp_path, monkeypatch):
    (tmp_path / "without_numba.py").write_text(WITHOUT_NUMBA)
    monkeypatch.chdir(tmp_path)
    done = Command("without_numba", {"PATH": os.environ["PATH"]}, before=_here).finish()
    assert done.returncode == 0, done.stderr
    assert "bert: warning: data loading runs slower, interpreted" in done.stderr
    records = synthetic_records(4, 512, 1000, packed=True, seed=3)
    batch = make_batch(records, np.arange(records.num_sequences), 512)
    without = torch.load("batch.pt")
    for name, value in vars(batch).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(without[name])), name


def test_a_sequence_without_a_pair_has_no_next_sentence(make_records):
    records = make_records(6, packed=False)
    starts = records.segment_b_start.copy()
    starts[[1, 4]] = records.sequence_lengths[[1, 4]]
    alone = dataclasses.replace(records, segment_b_start=starts)
    batch = make_batch(alone, np.arange(6), 48)
    expected = records.next_sentence_labels.astype(np.int64)
    expected[[1, 4]] = -100
    assert batch.next_sentence_labels.tolist() == expected.tolist()
    begin, end = batch.cu_seqlens[1:3].tolist()
    assert not batch.segment_ids[begin:end].any()
