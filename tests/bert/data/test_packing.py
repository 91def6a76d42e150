"""Packing: rows hold each sequence once, keep their limits, and are as full as promised."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.data.packing import pack, plan
from bert.data.records import DataError
from bert.data.synthetic import wikipedia_like_lengths


def wikipedia_lengths(num_sequences):
    """Lengths like MLPerf's Wikipedia: mean 254.5, 23.5% of 512 tokens, the others Beta(1.1, 2.164) on 5 to 511."""
    x = (np.arange(5, 512) - 4.5) / 507
    density = x**0.1 * (1 - x) ** 1.164
    shares = np.append(0.765 * density / density.sum(), 0.235)
    counts = np.floor(shares * num_sequences).astype(int)
    counts[-1] += num_sequences - counts.sum()
    lengths = np.repeat(np.arange(5, 513), counts)
    return np.random.default_rng(0).permutation(lengths)


def assert_rows(lengths, order, rows, max_tokens, most):
    """Checks rows; returns their share of real tokens."""
    assert np.array_equal(np.sort(order), np.arange(len(lengths)))
    assert (rows[0], rows[-1]) == (0, len(lengths))
    per_row = np.diff(rows)
    assert 1 <= per_row.min(initial=1) <= per_row.max(initial=1) <= most
    tokens = np.diff(np.concatenate([[0], np.cumsum(lengths[order])])[rows])
    assert tokens.max(initial=0) <= max_tokens
    return float(lengths.sum() / (max_tokens * max(1, len(per_row))))


@pytest.mark.parametrize(("most", "full"), [(3, 0.999), (4, 0.9995)])
def test_wikipedia_packs_as_full_as_promised(most, full):
    lengths = wikipedia_lengths(60_000)
    order, rows = pack(lengths, 512, most)
    assert assert_rows(lengths, order, rows, 512, most) >= full


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_any_lengths_pack_within_the_limits(lengths, most):
    array = np.array(lengths, dtype=np.int64)
    assert_rows(array, *pack(array, 64, most), 64, most)


def test_packing_is_deterministic_and_tells_equal_lengths_by_their_place():
    lengths = wikipedia_lengths(5_000)
    assert all(map(np.array_equal, pack(lengths), pack(lengths)))
    counts = np.bincount(lengths, minlength=513)
    patterns, amounts = plan(counts, 512, 3)
    assert (patterns.sum(axis=1) <= 512).all()
    slots = np.bincount(patterns.reshape(-1), np.repeat(amounts, 3), minlength=513)[1:]
    at_least = np.cumsum(slots[::-1])[::-1] - np.cumsum(counts[1:][::-1])[::-1]
    assert (at_least >= 0).all(), "fewer slots than sequences of some length or more"


@pytest.mark.parametrize(
    ("lengths", "most", "rows"),
    [
        ([512] * 7, 3, 7), ([256] * 8, 3, 4), ([170] * 9, 3, 3), ([1] * 9, 3, 3), ([], 3, 0),
        ([128] * 8, 4, 2), ([100] * 5, 1, 5), ([500, 12, 300, 212], 3, 2),
    ],
)  # fmt: skip
def test_small_cases_take_the_fewest_rows(lengths, most, rows):
    assert len(pack(np.array(lengths, dtype=np.int64), 512, most)[1]) - 1 == rows


@pytest.mark.parametrize("lengths", [[0, 5], [5, 513], [-1]])
def test_a_length_out_of_range_is_refused(lengths):
    with pytest.raises(DataError, match="do not fit"):
        pack(lengths)


@pytest.mark.parametrize("count", [192, 768, 10_000])
def test_best_fit_packs_nearly_as_full_without_scipy(count, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    lengths = wikipedia_like_lengths(count, 512, np.random.default_rng(0))
    order, rows = pack(lengths, 512, 3, program=False)
    assert_rows(lengths, order, rows, 512, 3)
    assert len(rows) - 1 <= 1.014 * max(lengths.sum() / 512, count / 3) + 1
    with pytest.raises(ImportError):
        pack(lengths, 512, 3)
