"""The statistics agree with scipy, and with themselves."""

from __future__ import annotations

import math
from random import Random

import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from review.compare import LEVEL, ratio, trimmed_mean

PAIRS = st.lists(
    st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=4, max_size=12
)
MINUTES = st.lists(st.floats(1, 100), min_size=4, max_size=12)


@settings(max_examples=100, deadline=None)
@given(pairs=PAIRS)
def test_of_means_that_lie_close_the_test_is_the_trimmed_one_of_scipy(pairs):
    first, second = (
        [1000 + value / 100 for value in values] for values in zip(*pairs, strict=True)
    )
    a, b = trimmed_mean(first), trimmed_mean(second)
    assume(a.error2 > 1e-9 and b.error2 > 1e-9)
    expected = scipy.stats.ttest_ind(
        first, second, equal_var=False, trim=1 / len(pairs) + 1e-12
    )
    assert ratio(a, b).p == pytest.approx(expected.pvalue, rel=0.02, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(first=MINUTES, second=MINUTES)
def test_a_ratio_turned_over_has_the_interval_turned_over(first, second):
    a, b = trimmed_mean(first), trimmed_mean(second)
    found, other = ratio(a, b), ratio(b, a)
    assume(found.low is not None)
    assert found.low > 0
    assert (1 / found.low, 1 / found.high, found.p) == pytest.approx(
        (other.high, other.low, other.p)
    )


@settings(max_examples=200, deadline=None)
@given(first=MINUTES, second=MINUTES)
def test_the_interval_leaves_out_1_exactly_where_the_test_is_significant(first, second):
    a, b = trimmed_mean(first), trimmed_mean(second)
    assume(a.error2 > 1e-9 and b.error2 > 1e-9)
    found = ratio(a, b)
    assume(found.low is not None and abs(found.p - (1 - LEVEL)) > 1e-9)
    assert found.low <= found.value <= found.high
    assert found.significant == (not found.low <= 1 <= found.high)


@settings(max_examples=100, deadline=None)
@given(first=MINUTES, second=MINUTES, factor=st.floats(0.01, 100))
def test_a_ratio_knows_no_units(first, second, factor):
    found = ratio(trimmed_mean(first), trimmed_mean(second))
    scaled = ratio(
        trimmed_mean([factor * x for x in first]),
        trimmed_mean([factor * x for x in second]),
    )
    assert scaled.value == pytest.approx(found.value)


def test_coverage_of_the_interval_is_its_level():
    random = Random(0)
    hits, trials = 0, 400
    for _ in range(trials):
        first = trimmed_mean([random.gauss(10, 1) for _ in range(10)])
        second = trimmed_mean([random.gauss(8, 2) for _ in range(10)])
        found = ratio(first, second)
        hits += found.low <= 10 / 8 <= found.high
    assert abs(hits / trials - LEVEL) < 0.03


def test_a_failed_run_is_the_worst_and_changes_nothing_but_the_trimming():
    values = [3.0, 3.5, 3.6, 3.7, 4.0, 4.2, 4.3, 4.4, 4.5]
    failed, slow = trimmed_mean([*values, math.inf]), trimmed_mean([*values, 1e6])
    assert failed == slow
    assert failed.value == pytest.approx(sum(values[1:]) / 8)


def test_too_few_values_have_no_interval_and_none_no_mean():
    single = trimmed_mean([2.0], trim=0)
    found = ratio(single, trimmed_mean([1.0, 3.0], trim=0))
    assert (found.value, found.low, found.p) == (1.0, None, None)
    with pytest.raises(ValueError, match="nothing"):
        trimmed_mean([1.0, 2.0])
    with pytest.raises(ValueError, match="nothing"):
        trimmed_mean([1.0, math.inf, math.inf])
