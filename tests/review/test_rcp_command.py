"""python -m review rcp: the reference convergence point of a batch size."""

from __future__ import annotations

import json
import logging
import re

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from review.__main__ import main
from review.results.score import load_results
from review.rulebook import rcp


@pytest.mark.parametrize(("batch_size", "said"), [
    ("448", "mean 2,414,421, minimum 2,274,732 samples (exact)"),
    ("64", "mean 2,414,421, minimum 2,274,732 samples (of batch 448, the smallest with one)"),
    ("768", "mean 2,443,934, minimum 2,306,738 samples (between 448 and 4,608)"),
])  # fmt: skip
def test_the_reference_point_is_the_one_that_results_are_judged_by(
    batch_size, said, capsys
):
    assert main(["rcp", batch_size]) == 0
    assert capsys.readouterr().out.strip() == said


def test_a_batch_size_above_every_reference_has_none(capsys):
    assert main(["rcp", "16385"]) == 1
    assert "Missing RCP" in capsys.readouterr().out
    assert main(["rcp", "16385", "--json"]) == 1
    assert "mean" not in json.loads(capsys.readouterr().out)


def test_a_batch_size_is_positive(capsys):
    assert main(["rcp", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def official(folder, train_samples):
    """(passed, reason, scaling factor) of the official checker."""
    logging.disable(logging.CRITICAL)
    try:
        return rcp_checker.check_directory(
            str(folder),
            "training",
            "5.0.0",
            False,
            train_samples,
            rcp_pass="pruned_rcps",
        )
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("train_samples", [False, True])
def test_train_samples_are_judged_as_officially(train_samples, submission):
    for index, path in enumerate(
        submission.glob("result_*.txt")
    ):  # train_samples of their own, around the minimum
        path.write_text(
            re.sub(
                r'("train_samples", "value": )\d+',
                rf"\g<1>{2_280_000 + 9_000 * index}",
                path.read_text(),
            )
        )
    (result,) = load_results(submission, train_samples=train_samples)
    test = result.rcp_test
    found = (test.passed, test.reason, pytest.approx(test.scaling_factor, rel=1e-12))
    assert official(submission, train_samples) == found


def test_train_samples_stand_in_for_an_epoch_num_that_counts_epochs(submission, capsys):
    for path in submission.glob("result_*.txt"):
        path.write_text(re.sub(r'"epoch_num": \d+', '"epoch_num": 1', path.read_text()))
    assert main(["check", str(submission), "--json"]) == 1
    capsys.readouterr()
    assert main(["check", str(submission), "--json", "--rcp-bert-train-samples"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_a_failing_result_says_what_is_missing(submission, writer, capsys):
    assert main(["show", str(submission)]) == 0
    assert "short on average" not in capsys.readouterr().out
    for index, path in enumerate(sorted(submission.glob("result_*.txt"))):
        writer(seed=index, evaluations=15).write(path)
    assert main(["show", str(submission)]) == 0
    shown = capsys.readouterr().out
    short = rcp.find(768)[0].minimum - 2_250_000
    said = f"{short:,.0f} short on average, {8 * short:,.0f} over the 8 runs that count"
    assert said in shown
    assert "reference of batch 4,608" in shown


def test_a_batch_size_without_a_reference_says_what_to_run(submission, writer, capsys):
    for index, path in enumerate(sorted(submission.glob("result_*.txt"))):
        writer(seed=index).change("global_batch_size", value=20_000).write(path)
    assert main(["show", str(submission)]) == 0
    assert "run the reference 20 times at 20000" in capsys.readouterr().out
