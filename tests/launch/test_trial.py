"""The trial loop: any failure is named on the last line; only complete results look complete."""

import os
import runpy
import signal
import subprocess
from pathlib import Path

import pytest

from ..disks import small_disk
from ..waiting import wait_until
from .captured import captured
from .test_docker import caches_of


def processes(folder: Path) -> str:
    """Running processes with the folder in their command line."""
    return captured(["pgrep", "-f", str(folder)]).stdout


def none_left(folder: Path) -> None:
    """Waits until none runs; each look costs something on a busy machine."""
    wait_until(lambda: not processes(folder), 240, every=0.3)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_trials_that_reach_the_target_leave_numbered_logs(undisturbed):
    checkout, done = undisturbed
    reached = "run: all 2 trials reached the target"
    assert done.last_line == f"{reached}: {checkout.run_dir}"
    assert done.stderr.splitlines()[0] == "run: Python: python"
    names = {path.name for path in checkout.run_dir.iterdir()}
    assert names == {".lock", "config.json", "topology.txt"} | {
        f"{kind}_{trial}.{end}"
        for trial in "01"
        for kind, end in (("result", "txt"), ("output", "txt"), ("compliance", "out"))
    }
    assert (checkout.run_dir / "result_1.txt").read_text() == "MLLOG whole\n"
    assert "run: binding numa on " in done.stdout
    for shown in (done.stdout, (checkout.run_dir / "output_1.txt").read_text()):
        assert "1: rank 1 trains: success" in shown.splitlines()
    assert f"table of {checkout.run_dir}" in done.stdout
    assert not any(line.startswith("rehearsal") for line in done.stdout.splitlines())


def test_ranks_have_their_variables_and_nothing_that_nobody_asked_for(undisturbed):
    checkout, done = undisturbed
    ranks = checkout.ranks()
    numbers = [(rank["TRIAL"], rank["RANK"], rank["WORLD_SIZE"]) for rank in ranks]
    assert sorted(numbers) == [(t, r, "2") for t in "01" for r in "01"]
    folder = f"{checkout.root}/relative/P8000H100_1x8x48x1_pack_"
    assert all(rank["RUN_DIR"].startswith(folder) for rank in ranks), "absolute"
    assert not any(rank["SEED"] for rank in ranks), "each trial takes the system's"
    assert {rank["OMP_WAIT_POLICY"] for rank in ranks} == {"passive"}, "waiting threads"
    assert {rank["CACHE_CLEARED"] for rank in ranks} == {"0"}
    assert "page caches not dropped" in done.stderr
    assert caches_of(ranks[0]) == {}, "without a container each compiler has its own"
    assert [path.name for path in checkout.logdir.iterdir()] == [checkout.run_dir.name]


RESTARTS = [
    ("7", "0 trials, step 4", "node1", "12:00", "without node1: gone"),
    ("7", "", "", "13:00", "the time limit"),
    ("7", "left out", "node2", "12:30", "bad"),
]


def test_one_rank_is_what_the_user_asked_for(checkout):
    """Its threads spin if the user wants that, its lines have no number, and without a target none is
    said to be reached. The end lists every restart, also without a lost node.
    """
    folder = checkout.logdir / "again"
    folder.mkdir(parents=True)
    (folder / "restarts.txt").write_text("".join("\t".join(one) + "\n" for one in RESTARTS))  # fmt: skip
    checkout.size = "DGXNGPU=1"
    given = {"OMP_WAIT_POLICY": "active", "SEED": "", "CLEAR_CACHES": "require"}
    given |= {"DROP_STATUS": "0", "RUN_NAME": "again"}
    done = checkout.run(after="export TARGET_MLM_ACCURACY=0.0", status=0, **given)
    (rank,) = checkout.ranks()
    found = (rank["OMP_WAIT_POLICY"], rank["SEED"], rank["CACHE_CLEARED"])
    assert found == ("active", "", "1")
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert "rank 0 trains: success" in output.splitlines()
    trained = "run: the trial trained to the last step"
    assert done.last_line == f"{trained}: {checkout.run_dir}"
    said = (done.stdout + done.stderr).splitlines()
    assert f"run: binding none on {HOST}" in said
    told = [line for line in said if "restarted at" in line]
    assert told == [f"run: restarted at {at}, {text}" for *_, at, text in RESTARTS[:2]]


HOST = os.uname().nodename
# How a trial goes: its reason.
FAILURES = {
    "crash:1": "the loss is nan at step 3",
    "exit:1": f"rank 1 on {HOST} ended with exit status 7, see output_1.txt",
    "kill:0": f"rank 0 on {HOST} was killed by SIGKILL",
    "no-result": "no rank gave a reason (exit status 1); output_3.txt ends with: ",
    "stopped": "stopped at step 7 (STEPS_THIS_RUN); RESUME=1 continues",
    "not-reached": "the target accuracy 0.72 was not reached",
}


def test_all_failures_are_listed_and_the_other_trials_are_independent(checkout):
    outcomes = {f"TRIAL_{number}": how for number, how in enumerate(FAILURES)}
    done = checkout.run(after="export NEXP=7", status=1, REVIEW="fails", **outcomes)
    assert "no table of results" in done.stderr
    begin, *said = done.last_line.split("trial ")
    assert begin == "run: error: 6 of 7 trials failed: "
    for number, reason in enumerate(FAILURES.values()):
        assert said[number].startswith(f"{number}: {reason}")
    names = [path.name for path in checkout.run_dir.iterdir()]
    kept = sorted(name for name in names if name.startswith(("result", "failed", "running")))  # fmt: skip
    failed = [f"failed_{number}.txt" for number in (0, 1, 2, 4)]
    assert kept == [*failed, "result_5.txt", "result_6.txt"], "what looks complete"
    assert (checkout.run_dir / "result_5.txt").read_text() == "MLLOG whole\n"


def test_a_start_test_that_fails_ends_the_run_before_any_trial(checkout):
    done = checkout.run(START_TEST="1", UNFIT="here", status=1)
    said = "fail: node here: slow; scontrol update nodename=here state=drain reason=slow"  # fmt: skip
    where = f"see {checkout.run_dir / 'start_test'}, or set START_TEST=0"
    assert done.last_line == f"run: error: the start test failed: {said}; {where}"
    assert not checkout.ranks()


def test_trials_follow_a_start_test_that_finds_nothing(checkout):
    """And a table of results that fails hides no success."""
    given = {"UNFIT": "elsewhere", "REVIEW_FAILS": "show"}
    done = checkout.run(START_TEST="1", status=0, **given)
    folder = checkout.run_dir / "start_test"
    command = f"certify {folder} --line --records {folder}/unfit"
    assert f"run: start test: {command}\n" in done.stderr
    assert "no table of results" in done.stderr
    assert checkout.ranks()


def test_bad_input_reported_by_a_rank_ends_the_loop(checkout):
    reason = "trial 0: DATADIR_PHASE2: truncated"
    checkout.failed(reason, trials=5, TRIAL_0="bad-input")
    assert {rank["TRIAL"] for rank in checkout.ranks()} == {"0"}


def test_a_log_that_fails_the_compliance_check_fails_the_run(checkout):
    reason, checkout.size = "trial 1: compliance check failed, see ", "DGXNGPU=1"
    how = {"NOT_COMPLIANT": "result_1.txt", "SEED": "010"}
    done = checkout.failed(reason, trials=2, **how)
    file = checkout.run_dir / "compliance_1.out"
    assert done.last_line.endswith(str(file))
    assert "result_1.txt" in file.read_text()
    assert [rank["SEED"] for rank in checkout.ranks()] == ["10", "11"], "one a trial"


def test_what_is_switched_off_is_not_done(checkout):
    """Also where the folder of compiled kernels went away: it costs time but not the run."""
    checkout.edit("run/preflight.sh", "preflight::record()", "preflight::outputs() { :; }\npreflight::record()")  # fmt: skip
    off = {"CHECK_COMPLIANCE": "0", "CLEAR_CACHES": "0", "DROP_STATUS": "0"}
    off |= {"NOT_COMPLIANT": "result_0.txt", "KERNEL_CACHE": "/proc/no such folder"}
    done = checkout.run(after="export EVAL_ITER_SAMPLES=0", status=0, **off)
    assert not (checkout.run_dir / "compliance_0.out").exists()
    assert {rank["CACHE_CLEARED"] for rank in checkout.ranks()} == {"0"}
    assert "page caches not dropped" not in done.stderr
    assert "run: the trial trained to the last step" in done.last_line
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert output.count("cannot be written: kernels are compiled in each trial") == 1
    assert caches_of(checkout.ranks()[0]) == {}


def test_a_run_is_continued_with_its_missing_trials(checkout):
    """One that missed its target counts: repeating it would be choosing among results."""
    outcomes = {"TRIAL_0": "not-reached", "TRIAL_1": "kill:1"}
    checkout.run(after="export NEXP=2 RUN_NAME=again", status=1, **outcomes)
    kept = (checkout.run_dir / "result_0.txt").stat().st_mtime_ns
    checkout.calls_file.unlink()
    (checkout.run_dir / ".lock").write_text("")  # as earlier versions left it
    checkout.failed("trial 0: the target accuracy", trials=3, RUN_NAME="again")
    assert {rank["TRIAL"] for rank in checkout.ranks()} == {"1", "2"}
    assert (checkout.run_dir / "result_0.txt").stat().st_mtime_ns == kept
    left = [path.name for path in checkout.run_dir.glob("[ef]*_[12].txt")]
    assert not left, "no error_ or failed_"
    output = (checkout.run_dir / "output_1.txt").read_text()
    assert output.count("rank 1 trains") == 2, "of both attempts"


@pytest.mark.parametrize("division", ["closed", "open"])
def test_a_resumed_trial_keeps_its_earlier_metrics(checkout, tmp_path, division):
    """The metrics in the killed trial's folder are newer than those of the earlier, stopped one."""
    folder = checkout.logdir / "figures"
    for number, place in enumerate((folder, folder / "running_0")):
        (place / "tensorboard_0").mkdir(parents=True)
        (place / "tensorboard_0" / f"events.{number}").touch()
        (place / "wandb_0").mkdir()
        (place / "wandb_0" / "run_id").write_text("abc")
        (place / "metrics_0.jsonl").write_text(f"{number}\n")
        os.utime(place / "metrics_0.jsonl", (1e9 + number, 1e9 + number))
    given = {"RUN_NAME": "figures", "CHECKPOINT_DIR": f"{tmp_path}/c"}
    checkout.run(after=f"export RESUME= SUBMISSION_DIVISION={division}", status=0, **given)  # fmt: skip
    names = ("metr", "ev", "run_id")
    kept = {path.name: path.read_text() for path in folder.rglob("*") if path.name.startswith(names)}  # fmt: skip
    assert kept == (
        {"metrics_0.jsonl": "1\n", "events.0": "", "events.1": "", "run_id": "abc"}
        if division == "open"
        else {"metrics_0.jsonl": "0\n"}
    )
    assert not list(folder.glob("*/metrics_0.jsonl"))
    assert not (folder / ".begun_0").exists()


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
    folder = checkout.logdir / "mix"
    folder.mkdir(parents=True)
    (folder / ".lock").write_text(f"{owner} process 1 on a machine\n")
    (folder / "result_0.txt").touch()
    kept = contents(folder)
    second = checkout.run(RANK_MODULE=other, after="export RUN_NAME=mix", status=2)
    kind = owner.replace("bert", "pretraining")
    expected = f"run: error: RUN_NAME=mix: {checkout.run_dir} is of {kind}: choose another name"
    assert second.last_line == expected
    assert contents(checkout.run_dir) == kept


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
        shape = f"^[^ ]* -IS [^ ]*/{victim} {checkout.root}/"
        subprocess.run(["pkill", "-KILL", "-f", shape], check=True)
    checkout.ended(process)
    none_left(checkout.root)
    asked = list(checkout.run_dir.rglob("saved"))
    assert bool(asked) == (outcome == "saves"), "asked before it is killed"


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


def test_after_an_nccl_timeout_the_last_line_names_the_missing_ranks(checkout):
    """Which another abort, of trial 1, is not."""
    dump = "open(os.environ['TORCH_FR_DUMP_TEMP_FILE'] + '0', 'w').close()"
    checkout.before_the_trainer(
        "import os, sys, time\n"
        "if '--check' not in sys.argv:\n"
        "    if os.environ['RANK'] == '0':\n"
        f"        if os.environ['TRIAL'] == '0': {dump}\n"
        "        os.abort()\n"
        "    time.sleep(900)\n"
    )
    done = checkout.run(after="export NEXP=2", DIST_TIMEOUT="20", status=1)
    missing = f"rank 1 on {HOST} did not reach a collective, DIST_TIMEOUT=20 s: "
    assert f"failed: trial 0: {missing}ended, stopped" in done.last_line
    assert f"; trial 1: rank 0 on {HOST} was killed by SIGABRT" in done.last_line


@pytest.mark.parametrize(
    ("waited", "said"),
    [
        ([0, 1, 3], "rank 2 on dgx2 did not reach a collective, DIST_TIMEOUT=600 s: "),
        ([1], "rank 0 on dgx1, rank 2 on dgx2, rank 3 on dgx2 did not reach a collective"),
        ([0, 1, 2, 3], "a rank that lives, see nccl_0_rank_*, did not reach a collective"),
        ([], ""),
    ],
)  # fmt: skip
def test_ranks_without_a_dump_are_missing(waited, said, repository, tmp_path, capsys):
    for rank in waited:
        (tmp_path / f"nccl_0_rank_{rank}").touch()
    program = runpy.run_path(str(repository / "launch" / "run" / "hang.py"))
    program["main"]("reason", str(tmp_path), "0", "2", "dgx1", "dgx2")
    told = capsys.readouterr().out
    assert told.startswith(said)
    hang = tmp_path / "hang_0.txt"
    assert hang.exists() == bool(waited) == bool(told)
    named = hang.read_text().splitlines()[1:] if 0 < len(waited) < 4 else []
    missing = [rank for rank in range(4) if named and rank not in waited]
    assert named == [f"rank {rank}" for rank in missing]
