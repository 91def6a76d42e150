"""The table of `show` at every width."""

from __future__ import annotations

import io
import json

import pytest

from review.__main__ import main
from review.results.score import load_results
from review.show import show

WIDTHS = [40, 80, 120, 160, 200]


def rendered(target, width):
    from rich.console import Console

    out = io.StringIO()
    show(load_results(target), Console(file=out, width=width, highlight=False))
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


@pytest.mark.parametrize("width", range(75, 160, 7))
def test_no_row_of_a_table_is_folded_or_wider_than_the_terminal(width, submission):
    lines = rendered(submission, width).splitlines()
    rows = [line for line in lines if line.startswith(" result_")]
    assert len(rows) == 10
    assert all(len(line) <= width for line in rows)
    assert all(line.rstrip().endswith(("ok", "ok, best", "ok, worst")) for line in rows)


def test_published_scores_are_reproduced_to_the_last_digit(real_folders, capsys):
    scores = {"nyx_n1_ngc25.04_pytorch": 3.50220711, "tinybox_green": 213.60428958}
    assert main(["show", "--json", *map(str, real_folders)]) == 0
    results = {result["name"]: result for result in json.loads(capsys.readouterr().out)}
    for name, score in scores.items():
        assert results[name]["score_minutes"] == pytest.approx(score, abs=5e-9)
        assert results[name]["official"]
