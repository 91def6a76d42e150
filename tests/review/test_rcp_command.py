"""python -m review rcp: what closed runs of a batch size are held to, before the first one."""

from __future__ import annotations

import json

import pytest

from review.__main__ import main


@pytest.mark.parametrize(
    ("batch_size", "said"),
    [
        ("448", "mean 2,414,421, minimum 2,274,732 samples (exact)"),
        ("64", "mean 2,414,421, minimum 2,274,732 samples (of batch 448, the smallest with one)"),
        ("768", "mean 2,443,934, minimum 2,306,738 samples (between 448 and 4,608)"),
    ],
)
def test_the_reference_point_is_the_one_that_results_are_judged_by(batch_size, said, capsys):
    assert main(["rcp", batch_size]) == 0
    assert capsys.readouterr().out.strip() == said


def test_a_batch_size_above_every_reference_has_none(capsys):
    assert main(["rcp", "16385"]) == 1
    assert "Missing RCP" in capsys.readouterr().out
    assert main(["rcp", "16385", "--json"]) == 1
    assert "mean" not in json.loads(capsys.readouterr().out)


def test_a_batch_size_is_positive(capsys):
    assert main(["rcp", "0"]) == 2
    assert "a positive integer expected" in capsys.readouterr().err
