"""The trial loop: any failure fails the run and is named on the last line; only complete results
look complete.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
from pathlib import Path

import pytest

from ..disks import small_disk
from ..waiting import wait_until
from .captured import captured


def processes(folder: Path) -> str:
    """Running processes with the folder in their command line."""
    return captured(["pgrep", "-f", str(folder)]).stdout


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_trials_that_reach_the_target_succeed_and_leave_numbered_logs(undisturbed):
    checkout, done = undisturbed
    reached = "run: all 2 trials reached the target"
    assert done.last_line == f"{reached}: {checkout.run_dir}"
    names = {path.name for path in checkout.run_dir.iterdir()}
    assert names == {".lock", "config.json", "topology.txt"} | {
        f"{kind}_{trial}.{end}"
        for trial in "01"
        for kind, end in (("result", "txt"), ("output", "txt"), ("compliance", "out"))
    }
    assert (checkout.run_dir / "result_1.txt").read_text() == "MLLOG whole\n"


def test_ranks_are_bound_and_shown_live_each_line_with_its_rank(undisturbed):
    checkout, done = undisturbed
    assert "run: binding numa on " in done.stdout
    for shown in (done.stdout, (checkout.run_dir / "output_1.txt").read_text()):
        assert "1: rank 1 trains: success" in shown.splitlines()
    assert f"table of {checkout.run_dir}" in done.stdout


def test_ranks_get_an_absolute_folder_and_their_rank_variables(undisturbed):
    checkout, _ = undisturbed
    ranks = checkout.ranks()
    numbers = [(rank["TRIAL"], rank["RANK"]) for rank in ranks]
    assert sorted(numbers) == [(t, r) for t in "01" for r in "01"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
    folder = f"{checkout.root}/relative/P8000H100_1x8x48x1_pack_"
    assert all(rank["RUN_DIR"].startswith(folder) for rank in ranks)


def test_a_seed_that_is_not_set_stays_so_that_each_trial_takes_the_systems(undisturbed):
    assert not any(rank["SEED"] for rank in undisturbed[0].ranks())


def test_threads_that_wait_sleep(undisturbed):
    assert {rank["OMP_WAIT_POLICY"] for rank in undisturbed[0].ranks()} == {"passive"}


def test_one_rank_is_what_the_user_asked_for(checkout):
    """Its threads spin if the user wants that, and its lines have no number."""
    checkout.size = "DGXNGPU=1"
    checkout.run(OMP_WAIT_POLICY="active", SEED="", status=0)
    (rank,) = checkout.ranks()
    assert (rank["OMP_WAIT_POLICY"], rank["SEED"]) == ("active", "")
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert "rank 0 trains: success" in output.splitlines()


@pytest.mark.parametrize("setting", ["TARGET_MLM_ACCURACY=0.0", "EVAL_ITER_SAMPLES=0"])
def test_a_run_without_a_target_does_not_say_that_it_reached_one(checkout, setting):
    done = checkout.run(after=f"export {setting}")
    trained = "run: the trial trained to the last step"
    assert done.last_line == f"{trained}: {checkout.run_dir}"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("crash:1", "the loss is nan at step 3"),
        ("exit:1", "rank 1 on {host} ended with exit status 7, see output_0.txt"),
        ("kill:0", "rank 0 on {host} was killed by SIGKILL"),
        ("kill:1", "rank 1 on {host} was killed by SIGKILL"),
        ("no-result", "no rank gave a reason (exit status 1); output_0.txt ends with: "),
    ],
)  # fmt: skip
def test_a_trial_that_fails_makes_the_run_fail_with_its_reason_last(
    checkout, outcome, reason
):
    said = reason.format(host=os.uname().nodename)
    checkout.failed(f"trial 0: {said}", trials=2, TRIAL_0=outcome)
    folder = checkout.run_dir
    assert not (folder / "result_0.txt").exists(), "which must not look complete"
    assert (folder / "result_1.txt").exists(), "the other trials are independent"
    assert (folder / "failed_0.txt").exists() == (outcome != "no-result")
    assert not list(folder.glob("running_*"))


def test_all_failures_are_listed_and_a_log_that_misses_its_target_stays(checkout):
    outcomes = {"TRIAL_0": "not-reached", "TRIAL_2": "crash"}
    done = checkout.run(after="export NEXP=3", status=1, **outcomes)
    missed = "trial 0: the target accuracy 0.72 was not reached"
    expected = f"2 of 3 trials failed: {missed}; trial 2: the loss is nan at step 3"
    assert done.last_line == f"run: error: {expected}"
    assert (checkout.run_dir / "result_0.txt").read_text() == "MLLOG whole\n"


def test_a_start_test_that_fails_ends_the_run_before_any_trial(checkout):
    done = checkout.run(START_TEST="1", UNFIT="here", status=1)
    said = (
        "fail: node here: slow; scontrol update nodename=here state=drain reason=slow"
    )
    where = f"see {checkout.run_dir / 'start_test'}, or set START_TEST=0"
    assert done.last_line == f"run: error: the start test failed: {said}; {where}"
    assert not checkout.ranks()


def test_trials_follow_a_start_test_that_finds_nothing(checkout):
    done = checkout.run(START_TEST="1", UNFIT="elsewhere", status=0)
    folder = checkout.run_dir / "start_test"
    command = f"certify {folder} --line --records {folder}/unfit"
    assert f"run: start test: {command}\n" in done.stderr
    assert checkout.ranks()


def test_bad_input_reported_by_a_rank_ends_the_loop(checkout):
    reason = "trial 0: DATADIR_PHASE2: truncated"
    checkout.failed(reason, trials=5, TRIAL_0="bad-input")
    assert {rank["TRIAL"] for rank in checkout.ranks()} == {"0"}


def test_a_log_that_fails_the_compliance_check_fails_the_run(checkout):
    reason = "trial 1: compliance check failed, see "
    done = checkout.failed(reason, trials=2, NOT_COMPLIANT="result_1.txt")
    file = checkout.run_dir / "compliance_1.out"
    assert done.last_line.endswith(str(file))
    assert "result_1.txt" in file.read_text()


def test_compliance_is_not_checked_when_it_is_switched_off(checkout):
    checkout.run(CHECK_COMPLIANCE="0", NOT_COMPLIANT="result_0.txt", status=0)
    assert not (checkout.run_dir / "compliance_0.out").exists()


@pytest.mark.parametrize(("outcome", "status"), [("success", 0), ("crash", 1)])
def test_a_failed_results_table_hides_no_status(checkout, outcome, status):
    done = checkout.run(REVIEW="fails", TRIAL_0=outcome, status=status)
    assert "no table of results" in done.stderr


def test_a_run_is_continued_with_its_missing_trials(checkout):
    checkout.failed("trial 1: ", trials=2, RUN_NAME="again", TRIAL_1="kill:1")
    kept = (checkout.run_dir / "result_0.txt").stat().st_mtime_ns
    checkout.calls_file.unlink()
    checkout.run(after="export NEXP=3 RUN_NAME=again", status=0)
    assert {rank["TRIAL"] for rank in checkout.ranks()} == {"1", "2"}
    assert (checkout.run_dir / "result_0.txt").stat().st_mtime_ns == kept
    assert not list(checkout.run_dir.glob("error_*"))
    assert not list(checkout.run_dir.glob("failed_*"))
    output = (checkout.run_dir / "output_1.txt").read_text()
    assert output.count("rank 1 trains") == 2, "of both attempts"


def test_a_continued_run_still_counts_the_trial_that_missed_its_target(checkout):
    missed = "trial 0: the target accuracy"
    checkout.failed(missed, RUN_NAME="again", TRIAL_0="not-reached")
    checkout.calls_file.unlink()
    checkout.failed(missed, RUN_NAME="again")
    assert not checkout.ranks(), "repeating it would be choosing among results"


@pytest.mark.parametrize(
    ("division", "resume", "trainer", "continues"),
    [
        ("closed", "1", "bert", True),
        ("closed", "", "bert", False),
        ("open", "", "bert", True),
        ("closed", "", "finetune", True),
    ],
)
def test_a_resumed_trial_keeps_its_earlier_metrics(
    checkout, tmp_path, division, resume, trainer, continues
):
    """The metrics in the killed trial's folder are newer than those of the earlier, stopped one."""
    folder = checkout.logdir / "figures"
    for number, place in enumerate((folder, folder / "running_0")):
        (place / "tensorboard_0").mkdir(parents=True)
        (place / "tensorboard_0" / f"events.{number}").touch()
        (place / "wandb_0").mkdir()
        (place / "wandb_0" / "run_id").write_text("abc")
        (place / "metrics_0.jsonl").write_text(f"{number}\n")
        os.utime(place / "metrics_0.jsonl", (1e9 + number, 1e9 + number))
    given = f"RESUME={resume} SUBMISSION_DIVISION={division} RANK_MODULE={trainer}"
    checkout.run(after=f"export {given}", RUN_NAME="figures", CHECKPOINT_DIR=f"{tmp_path}/c", status=0)  # fmt: skip
    names = ("metr", "ev", "run_id")
    kept = {path.name: path.read_text() for path in folder.rglob("*") if path.name.startswith(names)}  # fmt: skip
    assert kept == (
        {"metrics_0.jsonl": "1\n", "events.0": "", "events.1": "", "run_id": "abc"}
        if continues
        else {"metrics_0.jsonl": "0\n"}
    )
    assert not list(folder.glob("*/metrics_0.jsonl"))
    assert not (folder / ".begun_0").exists()


def test_the_end_lists_every_restart_also_without_a_lost_node(checkout):
    folder = checkout.logdir / "again"
    folder.mkdir(parents=True)
    lines = [
        ("7", "0 trials, step 4", "node1", "12:00", "without node1: gone"),
        ("7", "", "", "13:00", "the time limit"),
        ("7", "left out", "node2", "12:30", "bad"),
    ]
    text = "".join("\t".join(line) + "\n" for line in lines)
    (folder / "restarts.txt").write_text(text)
    done = checkout.run(RUN_NAME="again", status=0)
    said = (done.stdout + done.stderr).splitlines()
    told = [line for line in said if "restarted at" in line]
    assert told == [f"run: restarted at {at}, {text}" for *_, at, text in lines[:2]]


def test_two_launchers_do_not_share_a_folder(checkout):
    first = checkout.started()
    folder = checkout.run_dir
    second = checkout.run(RUN_NAME="stopped", status=2)
    writer = (folder / ".lock").read_text().strip().removeprefix("bert ")
    first.send_signal(signal.SIGTERM)
    checkout.ended(first)
    assert writer.startswith("process ")
    assert writer.endswith(f" on {os.uname().nodename}")
    holds = f"RUN_NAME=stopped: {writer} writes to {folder}: "
    assert second.last_line.startswith(f"run: error: {holds}")


@pytest.mark.parametrize(
    ("owner", "other"), [("bert", "finetune"), ("finetune", "bert")]
)
def test_a_folder_of_another_kind_of_run_is_left_as_it_is(checkout, owner, other):
    checkout.run(RANK_MODULE=owner, after="export RUN_NAME=mix", status=0)
    kept = contents(checkout.run_dir)
    second = checkout.run(RANK_MODULE=other, after="export RUN_NAME=mix", status=2)
    kind = owner.replace("bert", "pretraining")
    expected = f"run: error: RUN_NAME=mix: {checkout.run_dir} is of {kind}: choose another name"
    assert second.last_line == expected
    assert contents(checkout.run_dir) == kept
    (checkout.run_dir / ".lock").write_text("")  # as earlier versions left it
    checkout.run(RANK_MODULE=owner, after="export RUN_NAME=mix", status=0)


@pytest.mark.parametrize(
    ("victim", "outcome"),
    [("script", "hang"), ("script", "saves"), ("torchrun.py", "deaf")],
)
def test_a_killed_script_ends_its_ranks(checkout, victim, outcome):
    if outcome == "deaf":  # killed after less than the seconds that a rank has to save
        checkout.edit("run/child.sh", "seconds=${3:-20}", "seconds=1")
    process = checkout.started(TRIAL_0=outcome)
    if victim == "script":
        process.kill()
    else:
        shape = f"^[^ ]*bash {checkout.root.parent}/bin/python .*{victim}"
        subprocess.run(["pkill", "-KILL", "-f", shape], check=True)
    checkout.ended(process)
    wait_until(lambda: not processes(checkout.root), 60)
    asked = list(checkout.run_dir.rglob("saved"))
    assert bool(asked) == (outcome == "saves"), "asked before it is killed"


@pytest.mark.parametrize(
    ("seed", "seeds"), [("5", ["5", "6"]), ("08", ["8", "9"]), ("010", ["10", "11"])]
)
def test_each_trial_has_its_own_seed(checkout, seed, seeds):
    checkout.size = "DGXNGPU=1"
    checkout.run(after=f"export NEXP=2 SEED={seed}")
    assert [rank["SEED"] for rank in checkout.ranks()] == seeds


@pytest.mark.parametrize(
    ("setting", "dropped", "told"),
    [("1", True, "1"), ("1", False, "0"), ("0", True, "0"), ("require", True, "1")],
)
def test_the_log_reports_dropped_caches_only_if_they_were(
    checkout, setting, dropped, told
):
    given = {"CLEAR_CACHES": setting, "DROP_STATUS": str(int(not dropped))}
    done = checkout.run(status=0, **given)
    assert {rank["CACHE_CLEARED"] for rank in checkout.ranks()} == {told}
    assert ("page caches not dropped" in done.stderr) == (
        setting == "1" and not dropped
    )


def test_required_cache_drops_that_fail_stop_the_run(checkout):
    done = checkout.run(CLEAR_CACHES="require", status=2)
    why = "CLEAR_CACHES=require, and the page caches were not dropped"
    assert why in done.last_line
    assert not checkout.ranks()


def test_a_full_disk_is_named_although_nothing_could_be_written(checkout, tmp_path):
    """On a file system that fills up as the trials start."""
    results = tmp_path / "small"
    with small_disk(results, 65_536):
        checkout.before_the_trainer(
            "import os, sys\n"
            "if '--check' not in sys.argv:\n"
            "    f = open(os.environ['RUN_DIR'] + '/f', 'wb', 0)\n"
            "    f.write(b'0' * 99999), f.write(b'0')\n"
        )
        done = checkout.run(after="export NEXP=2", LOGDIR=str(results), status=1)
        reason = f"no space left on LOGDIR={results}"
        failed = f"2 of 2 trials failed: trial 0: {reason}; trial 1: {reason}"
        assert done.last_line == f"run: error: {failed}"


@pytest.mark.parametrize(
    ("dumps", "said"),
    [
        (True, "rank 1 on {} did not reach a collective, DIST_TIMEOUT=20 s: ended, stopped"),
        (False, "rank 0 on {} was killed by SIGABRT"),
    ],
    ids=["a timeout of NCCL", "another abort"],
)  # fmt: skip
def test_after_an_nccl_timeout_the_last_line_names_the_missing_ranks(
    checkout, dumps, said
):
    dump = "open(os.environ['TORCH_FR_DUMP_TEMP_FILE'] + '0', 'w').close(); "
    waits = f"    if os.environ['RANK'] == '0': {dump if dumps else ''}os.abort()\n"
    checkout.before_the_trainer(f"import os, sys, time\nif '--check' not in sys.argv:\n{waits}    time.sleep(900)\n")  # fmt: skip
    reason = f"trial 0: {said.format(os.uname().nodename)}"
    checkout.failed(reason, DIST_TIMEOUT="20")


@pytest.mark.parametrize(
    ("waited", "said"),
    [
        ([0, 1, 3], "rank 2 on dgx2 did not reach a collective, DIST_TIMEOUT=600 s: "),
        ([1], "rank 0 on dgx1, rank 2 on dgx2, rank 3 on dgx2 did not reach a collective"),
        ([0, 1, 2, 3], "a rank that lives, see nccl_0_rank_*, did not reach a collective"),
        ([], ""),
    ],
)  # fmt: skip
def test_missing_ranks_are_those_without_a_dump_with_their_nodes(
    waited, said, repository, tmp_path, capsys
):
    for rank in waited:
        (tmp_path / f"nccl_0_rank_{rank}").touch()
    program = runpy.run_path(str(repository / "launch" / "run" / "hang.py"))
    program["main"]("reason", str(tmp_path), "0", "2", "dgx1", "dgx2")
    told = capsys.readouterr().out
    assert told.startswith(said)
    hang = tmp_path / "hang_0.txt"
    assert hang.exists() == bool(waited) == bool(told)
    named = hang.read_text().splitlines()[1:] if 0 < len(waited) < 4 else []
    assert named == [
        f"rank {rank}" for rank in range(4) if named and rank not in waited
    ]


def test_a_trainer_asked_to_stop_that_exits_with_0_is_no_result(checkout):
    checkout.failed("trial 0: stopped at step 7", TRIAL_0="stopped")
    assert not (checkout.run_dir / "result_0.txt").exists()
