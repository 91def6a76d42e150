"""Damaged result folders are never accepted; ``python -m tests.review.mutations`` tries
hundreds.
"""

from __future__ import annotations

import json

import pytest

from .mutations import KINDS, RECORD, judge, run_one


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_all_commands_have_one_verdict_on_a_damaged_folder(number, tmp_path):
    assert run_one(tmp_path, 1, number)[1] == ""


def test_the_judge_of_mutations_sees_what_is_wrongly_accepted(submission, monkeypatch):
    (submission / "config.json").write_text(json.dumps(RECORD))
    assert judge(submission) == ""
    (submission / "config.json").write_text(
        json.dumps({**RECORD, "model": {"hidden_size": 2}})
    )
    assert judge(submission) == ""
    monkeypatch.setattr("review.results.score.departures", lambda *_: [])
    assert (
        judge(submission)
        == "official, but not for check or the official tools, or of another model"
    )
