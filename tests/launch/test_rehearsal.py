"""REHEARSAL=1: one trial, then the verdict, also in the exit status."""


def rehearsed(checkout, folder: str, status: int, **how: str):
    """It has checkpoints of its own, also when it is started again, with the folder that it has."""
    given = {"REHEARSAL": "1", "CHECKPOINT_DIR": str(checkout.root / folder)} | how
    done = checkout.run(after="export NEXP=10", status=status, **given)
    own = {rank["CHECKPOINT_DIR"] for rank in checkout.ranks()}
    assert own == {str(checkout.root / "saved" / "rehearsal")}
    judged = f"rehearsal {checkout.run_dir}" in done.stdout.splitlines()
    return judged, done.last_line


def test_a_rehearsal_is_one_trial_that_is_judged(checkout):
    judged, last = rehearsed(checkout, "saved", 0, NOT_COMPLIANT="result_0.txt")
    assert judged
    assert len(checkout.ranks()) == 2
    assert checkout.run_dir.name.endswith("_rehearsal")
    assert last == f"run: rehearsal: go: {checkout.run_dir}"


def test_a_rehearsal_outside_the_published_runs_fails_and_says_so_last(checkout):
    fails = {"REVIEW_FAILS": "rehearsal"}
    judged, last = rehearsed(checkout, "saved/rehearsal", 1, **fails)
    assert judged
    assert last.startswith("run: error: ")
    assert last.endswith("the rehearsal differs from published runs, see above")


def test_a_rehearsal_that_crashes_is_not_judged(checkout):
    judged, last = rehearsed(checkout, "saved", 1, TRIAL_0="crash:1")
    assert not judged
    assert "the loss is nan at step 3" in last
