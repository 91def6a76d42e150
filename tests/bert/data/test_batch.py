"""A batch holds its sequences unchanged, end to end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bert.data.batch import gather_batch, make_batch
from bert.data.records import DataError


def test_batch_is_its_sequences_end_to_end(make_records, batch_of):
    records = make_records(6)
    chosen = [5, 0, 3]
    batch = batch_of(records, chosen)
    assert batch.num_sequences == 3
    offsets = batch.cu_seqlens.tolist()
    assert offsets[-1] == batch.num_tokens == len(batch.input_ids)
    masked = 0
    for place, sequence in enumerate(chosen):
        begin, end = offsets[place], offsets[place + 1]
        o = records.sequence_offsets
        assert (
            batch.input_ids[begin:end].tolist()
            == records.input_ids[o[sequence] : o[sequence + 1]].tolist()
        )
        assert batch.position_ids[begin:end].tolist() == list(range(end - begin))
        start_b = int(records.segment_b_start[sequence])
        assert batch.segment_ids[begin:end].tolist() == [
            int(i >= start_b) for i in range(end - begin)
        ]
        m = records.masked_lm_offsets
        positions = records.masked_lm_positions[m[sequence] : m[sequence + 1]].astype(np.int64)
        count = len(positions)
        assert (
            batch.masked_positions[masked : masked + count].tolist() == (positions + begin).tolist()
        )
        labels = records.masked_lm_ids[m[sequence] : m[sequence + 1]].tolist()
        assert batch.masked_labels[masked : masked + count].tolist() == labels
        masked += count
    assert masked == batch.num_masked
    assert batch.next_sentence_labels.tolist() == records.next_sentence_labels[chosen].tolist()


def test_a_token_beyond_the_vocabulary_is_reported(make_records):
    records = make_records(4)
    largest = int(max(records.input_ids.max(), records.masked_lm_ids.max()))
    line = [records], [np.arange(4)], np.arange(4), 48
    assert gather_batch(*line, largest + 1).num_sequences == 4
    with pytest.raises(DataError, match=f"token ids .* to {largest} .* vocab_size {largest}: "):
        gather_batch(*line, largest)


def test_a_sequence_without_a_pair_has_no_next_sentence(make_records):
    records = make_records(6, packed=False)
    starts = records.segment_b_start.copy()
    starts[[1, 4]] = records.sequence_lengths[[1, 4]]
    batch = make_batch(dataclasses.replace(records, segment_b_start=starts), np.arange(6), 48)
    expected = records.next_sentence_labels.astype(np.int64)
    expected[[1, 4]] = -100
    assert batch.next_sentence_labels.tolist() == expected.tolist()
    assert not batch.segment_ids[int(batch.cu_seqlens[1]) : int(batch.cu_seqlens[2])].any()
