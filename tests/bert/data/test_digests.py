"""The sum is that of the sequences hashed one by one, part by part."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert.data import digests
from bert.data.records import Records, offsets_of


def records_of(lengths, counts, seed):
    """Random numbers of all 16 bits, in sequences of these lengths; of an odd seed, some ids of 17
    bits.
    """
    rng = np.random.default_rng(seed)

    def numbers(size):
        return rng.integers(-(2**15), 2**15, size).astype(np.int16)

    def ids(size):
        if not seed % 2:
            return numbers(size)
        return numbers(size).astype(np.int32) + ((rng.random(size) < 0.003) << 16)

    return Records(
        input_ids=ids(sum(lengths)).astype(np.int32 if seed % 2 else np.int16),
        sequence_offsets=offsets_of(lengths),
        segment_b_start=numbers(len(lengths)),
        masked_lm_positions=numbers(sum(counts)),
        masked_lm_ids=ids(sum(counts)).astype(np.int32 if seed % 2 else np.int16),
        masked_lm_offsets=offsets_of(counts),
        next_sentence_labels=numbers(len(lengths)),
    )


def hashed_apart(records):
    total = 0
    for i in range(records.num_sequences):
        begin, end = records.sequence_offsets[i : i + 2]
        first, last = records.masked_lm_offsets[i : i + 2]
        ids, to = records.input_ids[begin:end], records.masked_lm_ids[first:last]
        both = np.concatenate([[0], ids, to])
        dtype = np.int16 if -(2**15) <= both.min() <= both.max() < 2**15 else np.int32
        head = end - begin, last - first, records.segment_b_start[i]
        h = hashlib.blake2b(digest_size=16)
        h.update(np.array([*head, records.next_sentence_labels[i]], np.int16).tobytes())
        h.update(ids.astype(dtype).tobytes())
        h.update(records.masked_lm_positions[first:last].tobytes())
        h.update(to.astype(dtype).tobytes())
        total += int.from_bytes(h.digest(), "little")
    return total % (1 << 128)


SIZES = st.tuples(st.integers(0, 300), st.integers(0, 80))


@settings(max_examples=50, deadline=None)  # the first call compiles
@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(0, 99))
# With a head of four numbers they end where a block does, or nearly.
@example([(60, 0)] * 50, 60)
@example([(61, 0)] * 50, 61)
@example([(123, 0)] * 50, 123)
@example([(124, 0)] * 50, 124)
@example([(125, 0)] * 50, 125)
def test_the_sum_is_that_of_hashlib(sizes, seed):
    records = records_of(*zip(*sizes, strict=True), seed)
    assert digests.sum_of_hashes(records) == hashed_apart(records)


@pytest.mark.parametrize("offsets", [[0, 12, 9], [-1, 3, 10], [0, 5, 11]])
def test_offsets_that_leave_the_arrays_are_refused(offsets):
    records = records_of([5, 5], [2, 2], 0)
    wrong = dataclasses.replace(records, sequence_offsets=np.array(offsets))
    with pytest.raises(ValueError, match="offsets"):
        digests.sum_of_hashes(wrong)
