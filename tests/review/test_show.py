"""The table of `show` at every width."""

import csv
import io
import json
import re
from dataclasses import asdict

import pytest
from rich.console import Console

from bert.training.evaluate import EvaluationConfig
from review.logs.output import print_parts
from review.results.score import load_results
from review.show import parts
from review.verdict.checking import judge

from .conftest import LogWriter
from .verdict.damage import ALL, of_key, remove


def rendered(target, width):
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    print_parts(parts([*map(judge, load_results(target))]), console)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 120, 200])
def test_labels_and_reasons_are_whole_at_every_width(width, submission):
    LogWriter(target=0.7).write(submission / "result_3.txt")
    shown = rendered(submission, width)
    assert shown.count("no eval_accuracy satisfies the target") == 1
    assert "; the highest is 0.7" in shown
    for target, every in ((0, 5000), (0.72, 0)):  # none: no rule of results applies
        # As the trainer writes it, whatever keys that has.
        evaluate = asdict(EvaluationConfig(target=target, every_samples=every))
        (submission / "config.json").write_text(json.dumps({"evaluate": evaluate}))
        shown = " ".join(rendered(submission, width).splitlines())
        assert "  pretraining runs to the last step; without a target acc" in shown
        assert not re.search("eval_accuracy|unofficial|of 10 runs|fails", shown)
    (submission / "config.json").unlink()
    remove(*ALL[2:])(submission)
    lines = rendered(submission, width).splitlines()
    assert "  unofficial  2 of 10 runs" in lines
    labels = {line[:14].strip() for line in lines if line.startswith("  ")}
    assert labels == {"", "median", "unofficial", "runs", "RCP"}


@pytest.mark.parametrize("width", range(75, 160, 21))
def test_no_row_of_a_table_is_folded_or_wider_than_the_terminal(width, submission):
    lines = rendered(submission, width).splitlines()
    rows = [line.rstrip() for line in lines if line.startswith(" result_")]
    assert len(rows) == 10
    assert all(len(line) <= width for line in rows)
    assert all(row.endswith(("ok", "ok, fastest", "ok, slowest")) for row in rows)


def test_published_scores_are_reproduced_to_the_last_digit(real_folders, command):
    scores = {"nyx_n1_ngc25.04_pytorch": 3.50220711, "tinybox_green": 213.60428958}
    found = command("show", "--json", *real_folders).json
    results = {result["name"]: result for result in found}
    for name, score in scores.items():
        assert results[name]["score_minutes"] == pytest.approx(score, abs=5e-9)
        assert results[name]["official"]


def test_csv_has_a_row_for_each_run_with_its_result(submission, command):
    (result,) = load_results(submission)
    text = command("show", "--csv", submission).out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [float(row["minutes"]) for row in rows] == [r.minutes for r in result.runs]
    scores = {(float(row["score_minutes"]), row["official"]) for row in rows}
    assert scores == {(result.score, "True")}
    assert [row["dropped"] for row in rows].count("fastest") == 1


def test_logs_that_the_rules_reject_still_have_a_raw_mean_that_says_so(submission):
    of_key("cache_clear", how=lambda event: {"key": "cache_cleared"})(submission)
    (result,) = load_results(submission)
    mean = sum(sorted(run.minutes for run in result.runs)[1:-1]) / 8
    assert f"  raw         {mean:.4f} min, not checked" in rendered(submission, 200)


def test_the_readme_s_table_has_the_columns_of_its_width(tmp_path, repository):
    readme = (repository / "README.md").read_text()
    heading = re.search(r"^ run  .*$", readme, re.MULTILINE)[0]
    LogWriter(seed=3812371581).write(tmp_path / "result_0.txt")
    split = re.compile(r"\s{2,}").split
    narrow, wide = (
        split(line.strip())
        for width in (126, 140)
        for line in rendered(tmp_path, width).splitlines()
        if line.startswith(" run ")
    )
    assert split(heading.strip()) == narrow
    assert [name for name in wide if name not in narrow] == ["/accel", "eval %"]
