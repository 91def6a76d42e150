"""The bands of accuracy are those of the published runs, and are read between their points."""

from __future__ import annotations

import pytest

from review.logs.output import ReviewError
from review.results import gate as bands


def test_every_band_says_where_it_is_from_and_rises():
    assert {band.batch_size for band in bands.published()} >= {96, 448, 768, 4608}
    largest = next(band for band in bands.published() if band.batch_size == 768)
    assert largest.runs == 488, "of several recipes the one that most published runs have comes first"
    for band in bands.published():
        assert band.source.startswith("mlcommons/training_results, ")
        assert band.recipe
        assert all(low <= high for _, low, high in band.points)
        assert [samples for samples, _, _ in band.points] == sorted({samples for samples, _, _ in band.points})


def test_between_two_points_the_band_is_on_their_line_and_ends_a_step_outside():
    band = bands.Band(10, 10, "", ((100, 0.1, 0.2), (200, 0.3, 0.6)))
    assert band.at(100) == (0.1, 0.2)
    assert band.at(150) == pytest.approx((0.2, 0.4))
    assert band.at(200) == pytest.approx((0.3, 0.6))
    assert band.at(95) == band.at(100)
    assert band.at(205) == pytest.approx((0.3, 0.6))
    assert band.at(89) is None
    assert band.at(211) is None
    assert bands.Band(10, 1, "", ((0, 0.1, 0.2),)).at(0) == (0.1, 0.2)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"bands": []}', '{"bands": [{"points": []}]}', "not JSON", '{"bands": [3]}']
)
def test_a_file_without_a_band_is_one_line(tmp_path, text):
    path = tmp_path / "band.json"
    path.write_text(text)
    with pytest.raises(ReviewError, match=r"band\.json: (no band of accuracies|is not JSON|a JSON object is expected)"):
        bands.read(path)
    with pytest.raises(ReviewError, match="No such file"):
        bands.read(tmp_path / "none.json")
