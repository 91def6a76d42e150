"""The all-reduce test: a failure ends the run before a trial starts, with the reason last."""

import signal

import pytest

from ..waiting import wait_until

AFTER = {"after": "export NCCL_TEST=1"}


def test_it_runs_once_on_all_ranks_before_the_trials(checkout):
    checkout.run(after="export NCCL_TEST=1 NEXP=2", status=0)
    assert sorted(checkout.calls("allreduce")) == ["0", "1"]
    output = (checkout.run_dir / "nccl_test" / "output.txt").read_text()
    assert output.count("success") == 2
    calls = checkout.calls_file.read_text().splitlines()
    kinds = [line.partition(" ")[0] for line in calls]
    assert kinds.index("allreduce") < kinds.index("rank")
    assert not list(checkout.run_dir.glob("running_*"))


@pytest.mark.parametrize("setting", ["NCCL_TEST=0", "NCCL_TEST=1 DGXNGPU=1"])
def test_it_is_skipped_when_switched_off_or_alone(checkout, setting):
    checkout.run(after=f"export {setting}", status=0)
    assert not checkout.calls("allreduce")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("fails:1", "rank 1: wrong sums; see {}/nccl_test, or set NCCL_TEST=0"),
        ("hang", "it did not end in 2 s; see "),
        ("killed:1", "rank 1 on "),
    ],
)
def test_its_failure_ends_the_run_before_any_trial(checkout, outcome, reason):
    if outcome == "hang":  # the others end by themselves, on a slow machine later
        limit = "NCCL_TEST_SECONDS="
        checkout.edit("run/nccl_test.sh", f"{limit}360", f"{limit}2")
    done = checkout.run(**AFTER, ALLREDUCE=outcome, status=1)
    said = reason.format(checkout.run_dir)
    assert done.last_line.startswith(f"run: error: the all-reduce test failed: {said}")
    assert not checkout.ranks()
    assert not list(checkout.run_dir.glob("running_*"))
    assert "warning: restarts on" not in done.stderr


def test_a_rank_that_is_killed_in_it_is_started_once_more(checkout):
    given = {"RESUME": "1", "CHECKPOINT_DIR": str(checkout.root / "saved")}
    done = checkout.run(**AFTER, ALLREDUCE="killed:1", status=0, **given)
    assert "warning: restarts on" in done.stderr


def test_a_signal_ends_it_and_leaves_nothing_half_done(checkout):
    process = checkout.popen(**AFTER, RUN_NAME="stopped", ALLREDUCE="hang")
    log = checkout.logdir / "stopped" / "nccl_test" / "output.txt"
    wait_until(lambda: log.exists() and "hang" in log.read_text())
    process.send_signal(signal.SIGTERM)
    done = checkout.ended(process, 143)
    continues = "RUN_NAME=stopped continues with the missing trials"
    assert done.last_line == f"run: error: interrupted by SIGTERM; {continues}"
    assert not list(checkout.run_dir.glob("running_*"))
