"""The table of `show` at every width."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from bert.training.evaluate import EvaluationConfig
from review.__main__ import main
from review.logs.output import print_parts
from review.results.score import load_results
from review.show import parts
from review.verdict.checking import judge

WIDTHS = [40, 120, 200]


def rendered(target, width):
    from rich.console import Console

    out = io.StringIO()
    print_parts(
        parts([*map(judge, load_results(target))]),
        Console(file=out, width=width, highlight=False),
    )
    return out.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_label_is_separated_from_its_text(width, submission):
    for index in range(2, 10):
        (submission / f"result_{index}.txt").unlink()
    lines = rendered(submission, width).splitlines()
    assert "  unofficial  2 of 10 runs" in lines
    labels = {line[:14].strip() for line in lines if line.startswith("  ")}
    assert labels == {"", "median", "unofficial", "runs", "RCP"}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_failing_run_shows_its_reason_at_every_width(width, submission, writer):
    writer(target=0.7).write(submission / "result_3.txt")
    shown = rendered(submission, width)
    assert shown.count("no eval_accuracy satisfies the target") == 1
    assert "; the highest is 0.7" in shown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("target", "every"), [(0, 5000), (0.72, 0)])
def test_a_run_without_a_target_is_subject_to_no_rule_of_results(
    width, target, every, submission, writer
):
    # As the trainer writes it, whatever keys that has.
    evaluate = asdict(EvaluationConfig(target=target, every_samples=every))
    writer(target=0.7).write(submission / "result_3.txt")
    (submission / "config.json").write_text(json.dumps({"evaluate": evaluate}))
    shown = rendered(submission, width)
    line = "  pretraining runs to the last step; without a target accuracy there is no score"
    assert line in " ".join(shown.splitlines())
    assert not re.search("eval_accuracy|unofficial|of 10 runs|fails", shown)


@pytest.mark.parametrize("width", range(75, 160, 21))
def test_no_row_of_a_table_is_folded_or_wider_than_the_terminal(width, submission):
    lines = rendered(submission, width).splitlines()
    rows = [line for line in lines if line.startswith(" result_")]
    assert len(rows) == 10
    assert all(len(line) <= width for line in rows)
    assert all(
        line.rstrip().endswith(("ok", "ok, fastest", "ok, slowest")) for line in rows
    )


def test_published_scores_are_reproduced_to_the_last_digit(real_folders, capsys):
    scores = {"nyx_n1_ngc25.04_pytorch": 3.50220711, "tinybox_green": 213.60428958}
    assert main(["show", "--json", *map(str, real_folders)]) == 0
    results = {result["name"]: result for result in json.loads(capsys.readouterr().out)}
    for name, score in scores.items():
        assert results[name]["score_minutes"] == pytest.approx(score, abs=5e-9)
        assert results[name]["official"]


def test_csv_has_a_row_for_each_run_with_its_result(submission, capsys):
    (result,) = load_results(submission)
    assert main(["show", "--csv", str(submission)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["minutes"]) for row in rows] == [
        run.minutes for run in result.runs
    ]
    assert {(float(row["score_minutes"]), row["official"]) for row in rows} == {
        (result.score, "True")
    }
    assert [row["dropped"] for row in rows].count("fastest") == 1


def test_logs_that_the_rules_reject_still_have_a_raw_mean_that_says_so(submission):
    for path in submission.glob("result_*.txt"):
        path.write_text(path.read_text().replace('"cache_clear"', '"cache_cleared"'))
    (result,) = load_results(submission)
    minutes = sorted(run.minutes for run in result.runs)[1:-1]
    assert f"  raw         {sum(minutes) / 8:.4f} min, not checked" in rendered(
        submission, 200
    )


def test_the_table_in_the_readme_has_the_columns_that_a_terminal_of_its_width_shows(
    tmp_path, writer
):
    readme = Path(__file__).resolve().parents[2].joinpath("README.md").read_text()
    heading = re.search(r"^ run  .*$", readme, re.MULTILINE)[0]
    writer(seed=3812371581).write(tmp_path / "result_0.txt")
    split = re.compile(r"\s{2,}").split
    shown = [
        split(line.strip())
        for width in (126, 140)
        for line in rendered(tmp_path, width).splitlines()
        if line.startswith(" run ")
    ]
    assert split(heading.strip()) == shown[0]
    assert [name for name in shown[1] if name not in shown[0]] == ["/accel", "eval %"]
