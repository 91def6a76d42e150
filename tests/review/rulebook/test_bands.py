"""The bands of accuracy are those of the published runs, and are read between their points."""

from __future__ import annotations

import pytest

from review.logs.findings import ReviewError
from review.logs.mllog import read_log
from review.results.run import Run
from review.rulebook import bands


@pytest.mark.parametrize(
    ("folder", "batch_size"),
    [("NVIDIA/results/nyx_n1_ngc25.04_pytorch/bert", 768), ("tinycorp/results/tinybox_green/bert", 96)],
)
def test_the_table_is_made_of_the_published_logs(shared, folder, batch_size):
    paths = list((shared / "real_results" / folder).glob("result_*.txt"))
    if not paths:
        pytest.skip(f"no published results in {shared}")
    band = bands.find(batch_size)
    runs = [Run(read_log(path)) for path in paths]
    assert {run.batch_size for run in runs} == {batch_size}
    assert len(runs) == band.runs
    for index, (samples, low, high) in enumerate(band.points):
        there = [run.evaluations[index] for run in runs]
        assert all(abs(one.samples - samples) < 0.01 * samples for one in there)
        accuracies = [round(one.accuracy, 4) for one in there]
        assert (min(accuracies), max(accuracies)) == (low, high)


def test_every_band_says_where_it_is_from_and_rises():
    assert [band.batch_size for band in bands.published()] == [96, 768]
    for band in bands.published():
        assert band.source.startswith("mlcommons/training_results_v5.0, ")
        assert all(low < high for _, low, high in band.points)
        assert [low for _, low, _ in band.points] == sorted(low for _, low, _ in band.points)


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


def test_a_batch_size_that_was_not_published_has_none():
    assert bands.find(448) is None
    assert bands.find(None) is None


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"bands": []}', '{"bands": [{"points": []}]}', "not JSON", '{"bands": [3]}']
)
def test_a_file_without_a_band_is_one_line(tmp_path, text):
    path = tmp_path / "band.json"
    path.write_text(text)
    with pytest.raises(ReviewError, match=r"band\.json: no band of accuracies"):
        bands.read(path)
    with pytest.raises(ReviewError, match="No such file"):
        bands.read(tmp_path / "none.json")
