"""Published runs are within the bands, which are interpolated between their points; a run that converges differently is
reported while it runs; a rehearsal is go if it starts like published ones, else it has the most likely cause.
"""

import pytest

from review.logs.mllog import read_log
from review.results import published_curves as curves
from review.results.run import run_of
from review.results.run_state import RunState
from review.results.score import load_results

from ..conftest import LogWriter


def test_every_band_says_where_it_is_from_and_rises():
    bands = {}
    for band in curves.published():
        bands.setdefault(band.batch_size, band)
        assert band.source.startswith("mlcommons/training_results, ")
        assert band.recipe
        assert all(low <= high for _, low, high in band.points)
        samples = [samples for samples, _, _ in band.points]
        assert samples == sorted({*samples})
    assert bands.keys() >= {96, 448, 768, 4608}
    assert bands[768].runs == 488, "the recipe with the most runs is first"
    ten_runs = {  # of v5.0 at batch 768
        150_000: (0.376, 0.382), 450_000: (0.450, 0.523), 2_100_000: (0.7180, 0.7201),
    }  # fmt: skip
    for samples, (low, high) in ten_runs.items():
        found = bands[768].compare(samples, low)
        assert found.low <= low < high <= found.high


def test_a_band_is_linear_and_ends_a_step_beyond_its_points():
    band = curves.CurveRange(10, 10, "", ((100, 0.1, 0.2), (200, 0.3, 0.6)), {})
    first, last = (0.1, 0.2), (0.3, 0.6)
    limits = {95: first, 100: first, 150: (0.2, 0.4), 200: last, 205: last}
    for samples, expected in limits.items():
        point = band.compare(samples, 0.0)
        assert (point.low, point.high) == pytest.approx(expected)
    assert band.compare(89, 0.0) is band.compare(211, 0.0) is None


def test_published_runs_are_inside_and_would_be_go_but_for_their_start(real_folders):
    for folder in real_folders:
        for run in load_results(folder)[0].runs:
            assert curves.first_deviation(run) is None
            points = curves.rehearsal(run.path).points
            assert all(point.within_range for point in points)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result_0.txt"


def test_a_run_among_the_published_ones_is_not_mentioned(path, command):
    LogWriter().write(path)
    assert curves.first_deviation(run_of(read_log(path))) is None
    status, shown, _ = command("check", path)
    assert (status, "outside the published runs" in shown) == (0, False)


@pytest.mark.parametrize(("samples", "accuracy", "cause"), [
    (300_000, 0.35, "another checkpoint or evaluation set"),
    (1_500_000, 0.7135, "LayerNorm and biases in bf16"),
    (600_000, 0.75, "part of the training data"),
])  # fmt: skip
def test_a_run_outside_is_told_with_its_cause(samples, accuracy, cause, path, command):
    log = LogWriter()
    for line in log.lines:
        if line["key"] == "eval_accuracy" and line["metadata"]["epoch_num"] == samples:
            line["value"] = accuracy
    log.write(path)
    shown = command("check", path).out
    where = f"outside the published runs: {accuracy:.4f} at {samples:,}"
    assert f"{where} samples, of 488 runs" in shown
    assert cause in shown.partition("likely causes: ")[2].partition(";")[0]
    assert where in command("watch", "--once", path).out
    found = command("watch", "--once", "--json", path).json["outside_published"]
    assert found["evaluation"]["samples"] == samples


def test_other_hyper_parameters_are_the_first_cause_and_no_warning(path, command):
    log = LogWriter().change("opt_base_learning_rate", value=0.0004)
    log.change("eval_accuracy", value=0.72).write(path)
    shown = command("check", "--strict", path).out
    assert "note        eval_accuracy is outside the published runs" in shown
    cause = "opt_base_learning_rate is 0.0004, published 0.00096"
    assert f"likely causes: {cause};" in shown


def test_a_run_to_another_target_has_no_published_runs(path):
    LogWriter(division="open", target=0.3, evaluations=3).write(path)
    path.with_name("config.json").write_text('{"evaluate": {"target": 0.3}}')
    (result,) = load_results(path.parent)
    assert RunState(result, 1.75e12).deviation is None


SOUND = {0: 0.3408, 150_000: 0.3790, 300_000: 0.4010}


@pytest.fixture
def rehearsed(path, command):
    """rehearsed(accuracies by samples, batch size, option) -> what is said of a run with them."""

    def run(accuracies, batch_size=768, *options):
        log = LogWriter(division="open").drop("eval_start", "eval_stop")
        log.drop("eval_accuracy", "tracked_stats", "run_stop")
        log.change("global_batch_size", value=batch_size)
        for samples, accuracy in accuracies.items():
            log.log("eval_accuracy", accuracy, epoch_num=samples)
        log.log("run_stop", status="aborted")
        return command("rehearsal", log.write(path).parent, *options)

    return run


def test_a_run_that_starts_as_the_published_ones_is_go(rehearsed):
    status, said, _ = rehearsed(SOUND)
    lines = said.splitlines()
    assert (status, lines[-1][:4]) == (0, "GO: ")
    assert [line.split()[-2:] for line in lines[3:6]] == [["as", "published"]] * 3
    assert "0.3946 to 0.4233  as published" in lines[5]
    status, said, _ = rehearsed(SOUND | {150_000: 0.3700})
    assert (status, "0.3700   0.3713 to 0.3850  near" in said) == (0, True)


BEFORE = "the accuracy before the first step is"


@pytest.mark.parametrize(("accuracies", "first_cause"), [
    (SOUND | {0: 0.30}, f"{BEFORE} 0.3000, but the checkpoint has 0.338 to 0.342: other weights"),
    (SOUND | {0: 0.345}, f"{BEFORE} 0.3450"),
    (SOUND | {150_000: 0.3408, 300_000: 0.3409}, "the accuracy stays at the checkpoint's"),
    (SOUND | {150_000: 0.36, 300_000: 0.37}, "the wrong form of GELU, or no dropout"),
    (SOUND | {300_000: 0.43}, "another evaluation set, or one that is part of the training data"),
    ({150_000: 0.379}, "no evaluation before the first step"),
    ({0: 0.3408, 5_000_000: 0.7}, "no evaluation after the first step"),
])  # fmt: skip
def test_no_go_names_the_likeliest_cause_first(rehearsed, accuracies, first_cause):
    status, said, _ = rehearsed(accuracies)
    lines = said.splitlines()
    assert (status, lines[-1][:7]) == (1, "NO GO: ")
    (first,) = [line for line in lines if line.startswith("1. ")]
    assert first.startswith(f"1. {first_cause}")


def test_json_has_the_same_content(rehearsed):
    said = rehearsed(SOUND | {300_000: 0.37}, 768, "--json")
    found = said.json
    assert (said.status, found["go"], len(found["causes"])) == (1, False, 4)
    band = {"low": 0.39462, "high": 0.4233, "verdict": "low"}
    assert found["points"][2] == {"samples": 300000, "accuracy": 0.37, **band}


@pytest.mark.parametrize(("accuracies", "batch_size", "says"), [
    (SOUND, 8, "fewer than ten published runs have batch size 8: rehearse a config with one of 66, 96, 240"),
    ({5_000_000: 0.7}, 768, "none of its evaluations is at a sample count that published runs cover"),
])  # fmt: skip
def test_what_cannot_be_compared_is_an_error(rehearsed, accuracies, batch_size, says):
    status, _, error = rehearsed(accuracies, batch_size)
    assert (status, says in error, error.count("\n")) == (2, True, 1)


def test_a_folder_without_a_log_is_a_one_line_error(tmp_path, command):
    status, _, error = command("rehearsal", tmp_path)
    assert (status, "no result_*.txt: did the rehearsal finish?" in error) == (2, True)
