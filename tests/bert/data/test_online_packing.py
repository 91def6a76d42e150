"""The online packer: each sequence once per epoch, bounded waits, rows as full as promised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.data.online_packing import OnlinePacker
from bert.data.records import DataError
from bert.data.synthetic import wikipedia_like_lengths


def packer(
    lengths: np.ndarray, max_tokens: int, max_sequences: int, buffer_size: int, piece: int = 7
) -> OnlinePacker:
    """A packer of an endless stream of the lengths, epoch after epoch (= file), in pieces."""

    def stream():
        for epoch in itertools.count():
            for begin in range(0, len(lengths), piece):
                yield epoch, np.arange(begin, min(begin + piece, len(lengths)))

    return OnlinePacker(
        stream(), lambda _, numbers: lengths[numbers], max_tokens, max_sequences, buffer_size
    )


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=50),
    st.integers(1, 5),
    st.integers(1, 20),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_sequence_comes_once_an_epoch_in_rows_within_the_limits(
    lengths, most, buffer_size, data
):
    lengths = np.array(lengths)
    rows_of = packer(lengths, 40, most, min(buffer_size, len(lengths)))
    seen: list[tuple[int, int]] = []
    while len(seen) < 3 * len(lengths):
        files, numbers, offsets = rows_of.rows(data.draw(st.integers(1, 9)))
        assert np.diff(offsets).min() >= 1
        assert np.diff(offsets).max() <= most
        assert np.add.reduceat(lengths[numbers], offsets[:-1]).max() <= 40
        seen += list(zip(files.tolist(), numbers.tolist(), strict=True))
    assert len(set(seen)) == len(seen), "a sequence came twice in one epoch"
    arrival = {
        pair: place
        for place, pair in enumerate(itertools.product(range(len(seen) + 1), range(len(lengths))))
    }
    last = max(arrival[pair] for pair in seen)
    missing = [pair for pair, place in arrival.items() if place <= last and pair not in set(seen)]
    assert len(missing) <= buffer_size, "sequences were lost"


def test_rows_do_not_depend_on_how_they_are_asked_for_or_on_the_pieces():
    lengths = wikipedia_like_lengths(3_000, 512, np.random.default_rng(0))
    whole = packer(lengths, 512, 3, 64).rows(500)
    parts = packer(lengths, 512, 3, 64, piece=1001)
    pieces = [parts.rows(count) for count in (1, 99, 400)]
    assert np.array_equal(whole[1], np.concatenate([numbers for _, numbers, _ in pieces]))
    assert np.array_equal(
        np.diff(whole[2]), np.concatenate([np.diff(offsets) for _, _, offsets in pieces])
    )


@pytest.mark.parametrize(("most", "full"), [(3, 0.999), (4, 0.9995)])
def test_wikipedia_fills_rows_as_promised_and_no_sequence_waits_long(most, full):
    lengths = wikipedia_like_lengths(200_000, 512, np.random.default_rng(0))
    files, numbers, offsets = packer(lengths, 512, most, 256, piece=5_000).rows(80_000)
    assert lengths[numbers].sum() / (80_000 * 512) >= full
    arrived = files * len(lengths) + numbers
    assert (np.maximum.accumulate(arrived) - arrived).max() < 3 * 256
    assert offsets[-1] == len(numbers)


@pytest.mark.parametrize("length", [0, 41, -3])
def test_a_length_out_of_range_is_an_error(length):
    with pytest.raises(DataError, match="do not fit rows of 40"):
        packer(np.array([5, length]), 40, 3, 2).rows(1)
