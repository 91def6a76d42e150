"""REHEARSAL=1: one trial, then the verdict, also in the exit status."""

from __future__ import annotations

import pytest


def test_a_rehearsal_is_one_trial_that_is_judged(checkout):
    done = checkout.run(after="export NEXP=10", REHEARSAL="1", NOT_COMPLIANT="result_0.txt",
    status=0)  # fmt: skip
    assert len(checkout.ranks()) == 2
    assert checkout.run_dir.name.endswith("_rehearsal")
    assert f"rehearsal {checkout.run_dir}" in done.stdout.splitlines()
    assert done.last_line == f"run: rehearsal: go: {checkout.run_dir}"


def test_a_rehearsal_outside_the_published_runs_fails_with_that_as_its_last_line(
    checkout,
):
    done = checkout.run(REHEARSAL="1", REVIEW_FAILS="rehearsal", status=1)
    assert f"rehearsal {checkout.run_dir}" in done.stdout.splitlines()
    last = done.last_line
    assert last.startswith("run: error: ")
    assert last.endswith("the rehearsal differs from published runs, see above")


@pytest.mark.parametrize("folder", ["saved", "saved/rehearsal"])
def test_a_rehearsal_has_checkpoints_of_its_own(checkout, tmp_path, folder):
    """Also when it is started again, with the folder that it has."""
    given = str(tmp_path / folder)
    checkout.run(REHEARSAL="1", CHECKPOINT_DIR=given)
    assert {rank["CHECKPOINT_DIR"] for rank in checkout.ranks()} == {
        str(tmp_path / "saved" / "rehearsal")
    }


def test_a_rehearsal_that_crashes_is_not_judged(checkout):
    done = checkout.run(REHEARSAL="1", TRIAL_0="crash:1", status=1)
    assert "the loss is nan at step 3" in done.last_line
    assert f"rehearsal {checkout.run_dir}" not in done.stdout.splitlines()


def test_a_run_is_no_rehearsal_by_default(undisturbed):
    checkout, done = undisturbed
    assert not checkout.run_dir.name.endswith("_rehearsal")
    assert not any(line.startswith("rehearsal") for line in done.stdout.splitlines())
