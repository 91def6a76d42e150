"""The accuracy bands are those of the published runs, interpolated between their points."""

from __future__ import annotations

import pytest

from review.results import published_curves as curves


def test_every_band_says_where_it_is_from_and_rises():
    assert {band.batch_size for band in curves.published()} >= {96, 448, 768, 4608}
    largest = next(band for band in curves.published() if band.batch_size == 768)
    assert largest.runs == 488, (
        "of several recipes, the one with the most published runs comes first"
    )
    for band in curves.published():
        assert band.source.startswith("mlcommons/training_results, ")
        assert band.recipe
        assert all(low <= high for _, low, high in band.points)
        assert [samples for samples, _, _ in band.points] == sorted(
            {samples for samples, _, _ in band.points}
        )


def test_a_band_is_linear_between_two_points_and_ends_a_step_beyond_them():
    band = curves.CurveRange(10, 10, "", ((100, 0.1, 0.2), (200, 0.3, 0.6)), {})

    def at(samples):
        point = band.compare(samples, 0.0)
        return (point.low, point.high) if point else None

    assert at(100) == (0.1, 0.2)
    assert at(150) == pytest.approx((0.2, 0.4))
    assert at(200) == pytest.approx((0.3, 0.6))
    assert at(95) == at(100)
    assert at(205) == pytest.approx((0.3, 0.6))
    assert at(89) is None
    assert at(211) is None
