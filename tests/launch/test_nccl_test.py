"""The all-reduce test before the trials: a failure ends the run before a trial starts, with the
reason last.
"""

from __future__ import annotations

import signal

import pytest

from ..waiting import wait_until

LOCAL = "./run_local.sh"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_it_runs_once_on_all_ranks_before_the_trials(checkout):
    done = checkout.run(LOCAL, after="export NCCL_TEST=1 NEXP=2")
    assert done.returncode == 0, done.stderr
    assert sorted(checkout.calls("allreduce")) == ["0", "1"]
    output = (checkout.run_dir / "nccl_test" / "output.txt").read_text()
    assert output.count("success") == 2
    kinds = [
        line.partition(" ")[0] for line in checkout.calls_file.read_text().splitlines()
    ]
    assert kinds.index("allreduce") < kinds.index("rank")
    assert not list(checkout.run_dir.glob("running_*"))


@pytest.mark.parametrize("setting", ["NCCL_TEST=0", "NCCL_TEST=1 DGXNGPU=1"])
def test_it_is_skipped_when_switched_off_or_alone(checkout, setting):
    done = checkout.run(LOCAL, after=f"export {setting}")
    assert done.returncode == 0, done.stderr
    assert not checkout.calls("allreduce")


def test_wrong_sums_end_the_run_before_any_trial(checkout):
    done = checkout.run(LOCAL, after="export NCCL_TEST=1", ALLREDUCE="fails:1")
    assert done.returncode == 1
    folder = checkout.run_dir / "nccl_test"
    expected = f"the all-reduce test failed: rank 1: wrong sums; see {folder}, or set NCCL_TEST=0"
    assert last_line(done.stderr) == f"run: error: {expected}"
    assert not checkout.ranks()
    assert not list(checkout.run_dir.glob("running_*"))


@pytest.mark.parametrize("resume", ["0", "1"])
def test_a_rank_that_is_killed_in_it_is_started_once_more(checkout, resume):
    settings = {"RESUME": resume, "CHECKPOINT_DIR": str(checkout.root / "saved")}
    after = "export NCCL_TEST=1 NEXP=1"
    done = checkout.run(LOCAL, after=after, ALLREDUCE="killed:1", **settings)
    assert done.returncode == (resume == "0"), done.stderr
    assert ("warning: restarts on" in done.stderr) == (resume == "1")
    if resume == "0":
        assert "the all-reduce test failed: rank 1 on" in last_line(done.stderr)
        assert "was killed by SIGKILL; see" in last_line(done.stderr)


def test_ranks_that_hang_are_ended_by_the_launcher(checkout):
    (checkout.root / "launch" / "run" / "nccl_test.sh").write_text(
        (checkout.root / "launch" / "run" / "nccl_test.sh") .read_text() .replace("NCCL_TEST_SECONDS=360", "NCCL_TEST_SECONDS=2"),
    )  # fmt: skip
    done = checkout.run(LOCAL, after="export NCCL_TEST=1", ALLREDUCE="hang")
    assert done.returncode == 1
    assert "the all-reduce test failed: it did not end in 2 s; see " in last_line(
        done.stderr
    )
    assert not checkout.ranks()


def test_a_signal_ends_it_and_leaves_nothing_half_done(checkout):
    process = checkout.popen(
        LOCAL, after="export NCCL_TEST=1 RUN_NAME=stopped", ALLREDUCE="hang"
    )
    log = checkout.logdir / "stopped" / "nccl_test" / "output.txt"
    wait_until(lambda: log.exists() and "hang" in log.read_text())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143
    assert last_line(errors) == (
        "run: error: interrupted by SIGTERM; RUN_NAME=stopped continues with the missing trials"
    )
    assert not list(checkout.run_dir.glob("running_*"))
