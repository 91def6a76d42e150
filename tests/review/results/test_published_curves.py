"""Published runs are within the bands; a run that converges differently is reported while it
runs.
"""

from __future__ import annotations

import json

import pytest

from review.__main__ import main
from review.logs.mllog import read_log
from review.results import published_curves
from review.results.run import run_of
from review.results.run_state import RunState
from review.results.score import load_results


def test_the_table_holds_ten_runs_of_one_system():
    band = next(band for band in published_curves.published() if band.batch_size == 768)
    spans = {150_000: (0.376, 0.382), 450_000: (0.450, 0.523)}
    spans[2_100_000] = 0.7180, 0.7201
    for samples, (low, high) in spans.items():
        found = band.compare(samples, low)
        assert found.low <= low < high <= found.high, "ten runs of v5.0 at batch 768"


def test_published_runs_are_inside(real_folders):
    for folder in real_folders:
        (result,) = load_results(folder)
        assert not any(map(published_curves.first_deviation, result.runs))


def test_a_run_among_the_published_ones_is_not_mentioned(writer, tmp_path, capsys):
    path = writer().write(tmp_path / "result_0.txt")
    assert published_curves.first_deviation(run_of(read_log(path))) is None
    assert main(["check", str(path)]) == 0
    assert "outside the published runs" not in capsys.readouterr().out


@pytest.mark.parametrize(("samples", "accuracy", "cause"), [
    (300_000, 0.35, "another checkpoint or evaluation set"),
    (1_500_000, 0.7135, "LayerNorm and biases in bf16"),
    (600_000, 0.75, "part of the training data"),
])  # fmt: skip
def test_a_run_outside_is_reported_with_its_samples_and_the_likeliest_cause(
    samples, accuracy, cause, writer, tmp_path, capsys
):
    log = writer()
    for line in log.lines:
        if line["key"] == "eval_accuracy" and line["metadata"]["epoch_num"] == samples:
            line["value"] = accuracy
    path = log.write(tmp_path / "result_0.txt")
    main(["check", str(path)])
    shown = capsys.readouterr().out
    where = f"outside the published runs: {accuracy:.4f} at {samples:,}"
    assert f"{where} samples, of 488 runs" in shown
    assert cause in shown.partition("likely causes: ")[2].partition(";")[0]
    assert main(["watch", "--once", str(path)]) == 0
    assert where in capsys.readouterr().out
    assert main(["watch", "--once", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)["outside_published"]
    assert found["evaluation"]["samples"] == samples


def test_other_hyper_parameters_are_the_first_cause_and_no_warning(
    writer, tmp_path, capsys
):
    log = writer().change("opt_base_learning_rate", value=0.0004)
    log.change("eval_accuracy", value=0.72)
    path = log.write(tmp_path / "result_0.txt")
    main(["check", "--strict", str(path)])
    shown = capsys.readouterr().out
    assert "note        eval_accuracy is outside the published runs" in shown
    cause = "opt_base_learning_rate is 0.0004, published 0.00096"
    assert f"likely causes: {cause};" in shown


def test_a_run_to_another_target_has_no_published_runs(writer, tmp_path):
    writer(division="open", target=0.3, evaluations=3).write(tmp_path / "result_0.txt")
    (tmp_path / "config.json").write_text('{"evaluate": {"target": 0.3}}')
    (result,) = load_results(tmp_path)
    assert RunState(result, 1.75e12).deviation is None
