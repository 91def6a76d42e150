"""The trial loop: any failure fails the run and is named on the last line; only complete results
look complete.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..disks import small_disk
from ..waiting import wait_until
from .captured import captured

LOCAL = "./run_local.sh"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def processes(folder: Path) -> str:
    """Running processes with the folder in their command line."""
    return captured(["pgrep", "-f", str(folder)]).stdout


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_trials_that_reach_the_target_succeed_and_leave_numbered_logs(checkout):
    del checkout.env["BINDING"]
    done = checkout.run(LOCAL, after="export NEXP=2")
    assert done.returncode == 0, done.stderr
    assert "run: binding numa on " in done.stdout
    assert (
        last_line(done.stderr)
        == f"run: all 2 trials reached the target: {checkout.run_dir}"
    )
    names = {path.name for path in checkout.run_dir.iterdir()}
    assert names == {".lock", "config.json", "topology.txt"} | {
        f"{kind}_{trial}.{end}"
        for trial in "01"
        for kind, end in (("result", "txt"), ("output", "txt"), ("compliance", "out"))
    }
    assert (checkout.run_dir / "result_1.txt").read_text() == "MLLOG whole\n"
    assert "rank 1 trains" in (checkout.run_dir / "output_1.txt").read_text()
    assert "rank 1 trains" in done.stdout  # shown live as well
    assert f"table of {checkout.run_dir}" in done.stdout


@pytest.mark.parametrize(("own", "policy"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])  # fmt: skip
def test_threads_that_wait_sleep_unless_the_user_wants_them_to_spin(
    checkout, own, policy
):
    assert checkout.run(LOCAL, after="export NEXP=1", **own).returncode == 0
    assert {rank["OMP_WAIT_POLICY"] for rank in checkout.ranks()} == {policy}


@pytest.mark.parametrize("setting", ["TARGET_MLM_ACCURACY=0.0", "EVAL_ITER_SAMPLES=0"])
def test_a_run_without_a_target_does_not_say_that_it_reached_one(checkout, setting):
    done = checkout.run(LOCAL, after=f"export NEXP=1 RUN_NAME=scratch {setting}")
    assert (
        last_line(done.stderr)
        == f"run: the trial trained to the last step: {checkout.logdir / 'scratch'}"
    )


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
    done = checkout.run(LOCAL, after="export NEXP=2", TRIAL_0=outcome)
    assert done.returncode == 1
    host = os.uname().nodename
    expected = f"run: error: 1 of 2 trials failed: trial 0: {reason.format(host=host)}"
    assert last_line(done.stderr).startswith(expected)
    assert not (checkout.run_dir / "result_0.txt").exists(), (
        "a log of a crashed run must not look complete"
    )
    assert (checkout.run_dir / "result_1.txt").exists(), (
        "the other trials are independent"
    )
    assert (checkout.run_dir / "failed_0.txt").exists() == (outcome != "no-result")
    assert not list(checkout.run_dir.glob("running_*"))


def test_a_run_that_misses_its_target_fails_and_its_complete_log_stays(checkout):
    done = checkout.run(LOCAL, TRIAL_0="not-reached")
    assert done.returncode == 1
    assert last_line(done.stderr).endswith(
        "1 of 1 trials failed: trial 0: the target accuracy 0.72 was not reached"
    )
    assert (checkout.run_dir / "result_0.txt").read_text() == "MLLOG whole\n"


def test_the_last_line_lists_all_failures(checkout):
    done = checkout.run(
        LOCAL, after="export NEXP=3", TRIAL_0="not-reached", TRIAL_2="crash"
    )
    assert done.returncode == 1
    expected = "2 of 3 trials failed: trial 0: the target accuracy 0.72 was not reached; trial 2: the loss is nan at step 3"
    assert last_line(done.stderr) == f"run: error: {expected}"


@pytest.mark.parametrize("unfit", [True, False])
def test_a_start_test_that_fails_ends_the_run_before_any_trial(checkout, unfit):
    done = checkout.run(
        LOCAL, after="export START_TEST=1", UNFIT="here" if unfit else "elsewhere"
    )
    folder = checkout.run_dir / "start_test"
    assert done.returncode == int(unfit), done.stderr
    if unfit:
        said = "fail: node here: slow; scontrol update nodename=here state=drain reason=slow"
        assert (
            last_line(done.stderr)
            == f"run: error: the start test failed: {said}; see {folder}, or set START_TEST=0"
        )
    else:
        assert (
            f"run: start test: certify {folder} --line --records {folder}/unfit\n"
            in done.stderr
        )
    assert bool(checkout.ranks()) != unfit


@pytest.mark.parametrize("setting", ["SPARE_NODES=08", "SEED=1e3", f"SEED={10**18}"])
def test_a_number_that_the_shell_would_misread_is_one_line(checkout, setting):
    done = checkout.run(LOCAL, after=f"export {setting}")
    assert done.returncode == 2
    name, _, value = setting.partition("=")
    assert last_line(done.stderr).startswith(
        f"run: error: {name}='{value}': expected an integer"
    )


def test_bad_settings_stop_before_anything_is_written(checkout):
    done = checkout.run(LOCAL, CHECK="bad")
    assert done.returncode == 2
    assert (
        last_line(done.stderr)
        == "run: error: this configuration cannot run: LR='fast': expected a number"
    )
    assert not checkout.logdir.exists()
    assert not checkout.ranks()


def test_bad_input_reported_by_a_rank_ends_the_loop(checkout):
    done = checkout.run(LOCAL, after="export NEXP=5", TRIAL_0="bad-input")
    assert done.returncode == 1
    assert (
        last_line(done.stderr)
        == "run: error: 1 of 5 trials failed: trial 0: DATADIR_PHASE2: truncated"
    )
    assert {rank["TRIAL"] for rank in checkout.ranks()} == {"0"}


def test_a_log_that_fails_the_compliance_check_fails_the_run(checkout):
    done = checkout.run(LOCAL, after="export NEXP=2", NOT_COMPLIANT="result_1.txt")
    assert done.returncode == 1
    expected = (
        f"trial 1: compliance check failed, see {checkout.run_dir / 'compliance_1.out'}"
    )
    assert last_line(done.stderr) == f"run: error: 1 of 2 trials failed: {expected}"
    assert "result_1.txt" in (checkout.run_dir / "compliance_1.out").read_text()


def test_compliance_is_not_checked_when_it_is_switched_off(checkout):
    done = checkout.run(
        LOCAL, after="export CHECK_COMPLIANCE=0", NOT_COMPLIANT="result_0.txt"
    )
    assert done.returncode == 0, done.stderr
    assert not (checkout.run_dir / "compliance_0.out").exists()


@pytest.mark.parametrize(("outcome", "status"), [("success", 0), ("crash", 1)])
def test_a_failed_results_table_hides_no_status(checkout, outcome, status):
    done = checkout.run(LOCAL, REVIEW="fails", TRIAL_0=outcome)
    assert done.returncode == status
    assert "no table of results" in done.stderr


def test_a_run_is_continued_with_its_missing_trials(checkout):
    first = checkout.run(LOCAL, after="export NEXP=2 RUN_NAME=again", TRIAL_1="kill:1")
    assert first.returncode == 1
    kept = (checkout.run_dir / "result_0.txt").stat().st_mtime_ns
    checkout.calls_file.unlink()
    second = checkout.run(LOCAL, after="export NEXP=3 RUN_NAME=again")
    assert second.returncode == 0, second.stderr
    assert {rank["TRIAL"] for rank in checkout.ranks()} == {"1", "2"}
    assert (checkout.run_dir / "result_0.txt").stat().st_mtime_ns == kept
    assert not list(checkout.run_dir.glob("error_*"))
    assert not list(checkout.run_dir.glob("failed_*"))
    assert (checkout.run_dir / "output_1.txt").read_text().count(
        "rank 1 trains"
    ) == 2  # of both attempts


def test_a_continued_run_still_counts_the_trial_that_missed_its_target(checkout):
    checkout.run(LOCAL, after="export RUN_NAME=again", TRIAL_0="not-reached")
    checkout.calls_file.unlink()
    done = checkout.run(LOCAL, after="export RUN_NAME=again")
    assert done.returncode == 1
    assert not checkout.ranks(), "repeating it would be choosing among results"


@pytest.mark.parametrize(
    ("division", "resume", "trainer"),
    [
        ("closed", "1", "bert"),
        ("closed", "", "bert"),
        ("open", "", "bert"),
        ("closed", "", "finetune"),
    ],
)
def test_a_resumed_trial_keeps_its_earlier_metrics(
    checkout, tmp_path, division, resume, trainer
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
    given = (
        f"RESUME={resume} SUBMISSION_DIVISION={division} CHECKPOINT_DIR={tmp_path}/c"
    )
    after = f"export NEXP=1 RUN_NAME=figures RANK_MODULE={trainer} {given}"
    done = checkout.run(LOCAL, after=after)
    assert done.returncode == 0, done.stderr
    kept = {
        path.name: path.read_text()
        for path in folder.rglob("*")
        if path.name.startswith(("metr", "ev", "run_id"))
    }
    assert kept == (
        {"metrics_0.jsonl": "1\n", "events.0": "", "events.1": "", "run_id": "abc"}
        if resume or division == "open" or trainer == "finetune"
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
    ]
    left_out = ("7", "left out", "node2", "12:30", "bad")
    (folder / "restarts.txt").write_text(
        "".join("\t".join(line) + "\n" for line in (*lines, left_out))
    )
    done = checkout.run(LOCAL, after="export NEXP=1 RUN_NAME=again")
    assert done.returncode == 0, done.stderr
    told = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "restarted at" in line
    ]
    assert told == [f"run: restarted at {at}, {text}" for *_, at, text in lines]


def test_two_launchers_do_not_share_a_folder(checkout):
    folder = checkout.logdir / "same"
    first = checkout.popen(LOCAL, after="export RUN_NAME=same", TRIAL_0="hang")
    wait_until((checkout.logdir / "same" / "running_0" / "result_0.txt").exists)
    second = checkout.run(LOCAL, after="export RUN_NAME=same")
    writer = (folder / ".lock").read_text().strip().removeprefix("bert ")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=240)
    assert second.returncode == 2
    assert writer.startswith("process ")
    assert writer.endswith(f" on {os.uname().nodename}")
    assert last_line(second.stderr) == (
        f"run: error: RUN_NAME=same: {writer} writes to {folder}: wait for it, end it, or choose another name"
    )


@pytest.mark.parametrize(
    ("owner", "other"), [("bert", "finetune"), ("finetune", "bert")]
)
def test_a_folder_of_another_kind_of_run_is_left_as_it_is(checkout, owner, other):
    first = checkout.run(LOCAL, RANK_MODULE=owner, after="export RUN_NAME=mix")
    assert first.returncode == 0, first.stderr
    kept = contents(checkout.run_dir)
    second = checkout.run(LOCAL, RANK_MODULE=other, after="export RUN_NAME=mix")
    assert second.returncode == 2
    kind = owner.replace("bert", "pretraining")
    assert last_line(second.stderr) == (
        f"run: error: RUN_NAME=mix: {checkout.run_dir} is of {kind}: choose another name"
    )
    assert contents(checkout.run_dir) == kept
    (checkout.run_dir / ".lock").write_text("")  # as earlier versions left it
    third = checkout.run(LOCAL, RANK_MODULE=owner, after="export RUN_NAME=mix")
    assert third.returncode == 0, third.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_ends_every_rank_and_says_how_to_continue(checkout, number, status):
    process = checkout.popen(LOCAL, after="export RUN_NAME=stopped", TRIAL_0="hang")
    wait_until((checkout.logdir / "stopped" / "running_0" / "result_0.txt").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == status
    assert last_line(errors) == (
        f"run: error: interrupted by {number.name}; RUN_NAME=stopped continues with the missing trials"
    )
    assert (checkout.run_dir / "failed_0.txt").exists()
    assert (
        checkout.run_dir / "error_0.txt"
    ).read_text() == f"interrupted by {number.name}\n"
    assert not (checkout.run_dir / "result_0.txt").exists()
    wait_until(
        lambda: not processes(checkout.root), 60
    )  # far shorter than those of a rank would live


@pytest.mark.parametrize(
    ("victim", "outcome"),
    [("script", "hang"), ("script", "saves"), ("torchrun.py", "deaf")],
)
def test_a_killed_script_ends_its_ranks(checkout, victim, outcome):
    if (
        outcome == "deaf"
    ):  # it is killed after less than the 20 seconds that a rank has to save
        child = checkout.root / "launch" / "run" / "child.sh"
        text = child.read_text()
        assert "seconds=${3:-20}" in text
        child.write_text(text.replace("seconds=${3:-20}", "seconds=1"))
    process = checkout.popen(LOCAL, after="export RUN_NAME=killed", TRIAL_0=outcome)
    wait_until((checkout.logdir / "killed" / "running_0" / "result_0.txt").exists)
    if victim == "script":
        process.kill()
    else:
        subprocess.run(
            ["pkill", "-KILL", "-f", f"^[^ ]*bash {checkout.root.parent}/bin/python .*{victim}"], check=True,
        )  # fmt: skip
    process.communicate(timeout=240)
    wait_until(lambda: not processes(checkout.root), 60)
    assert bool(list((checkout.logdir / "killed").rglob("saved"))) == (
        outcome == "saves"
    ), "asked before it is killed"


@pytest.mark.parametrize(
    ("seed", "seeds"), [("5", ["5", "6"]), ("08", ["8", "9"]), ("010", ["10", "11"])]
)
def test_each_trial_has_its_own_seed(checkout, seed, seeds):
    checkout.run(LOCAL, after=f"export NEXP=2 SEED={seed}")
    given = [rank["SEED"] for rank in checkout.ranks() if rank["RANK"] == "0"]
    assert given == seeds
    checkout.calls_file.unlink()
    checkout.run(LOCAL, after="export SEED=08 LOGDIR=decimal")
    assert {rank["SEED"] for rank in checkout.ranks()} == {"8"}
    checkout.calls_file.unlink()
    checkout.run(LOCAL, after="export NEXP=2 SEED= LOGDIR=elsewhere")
    assert {rank["SEED"] for rank in checkout.ranks()} == {""}, (
        "unset, so that each takes the system's entropy"
    )


@pytest.mark.parametrize(
    ("setting", "dropped", "told"),
    [("1", True, "1"), ("1", False, "0"), ("0", True, "0"), ("require", True, "1")],
)
def test_the_log_reports_dropped_caches_only_if_they_were(
    checkout, setting, dropped, told
):
    done = checkout.run(
        LOCAL, after=f"export CLEAR_CACHES={setting}", DROP_STATUS=str(int(not dropped))
    )
    assert done.returncode == 0, done.stderr
    assert {rank["CACHE_CLEARED"] for rank in checkout.ranks()} == {told}
    assert ("page caches not dropped" in done.stderr) == (
        setting == "1" and not dropped
    )


def test_required_cache_drops_that_fail_stop_the_run(checkout):
    done = checkout.run(LOCAL, after="export CLEAR_CACHES=require")
    assert done.returncode == 2
    assert "CLEAR_CACHES=require, and the page caches were not dropped" in last_line(
        done.stderr
    )
    assert not checkout.ranks()


def test_ranks_get_an_absolute_folder_and_their_rank_variables(checkout):
    done = checkout.run(LOCAL, after="export LOGDIR=relative; export DGXNGPU=3")
    assert done.returncode == 0, done.stderr
    ranks = checkout.ranks()
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1", "2"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"3"}
    assert all(
        rank["RUN_DIR"].startswith(f"{checkout.root}/relative/P8000H100_1x8x48x1_pack_")
        for rank in ranks
    )


def test_a_full_disk_is_named_although_nothing_could_be_written(checkout, tmp_path):
    """On a file system that fills up as the trials start."""
    results = tmp_path / "small"
    with small_disk(results, 65_536):
        fill = (
            "import os, sys\n"
            "if '--check' not in sys.argv:\n"
            "    f = open(os.environ['RUN_DIR'] + '/f', 'wb', 0)\n"
            "    f.write(b'0' * 99999), f.write(b'0')\n"
        )
        trainer = checkout.root / "implementations" / "bert" / "__main__.py"
        trainer.write_text(fill + trainer.read_text())
        done = checkout.run(LOCAL, after="export NEXP=2", LOGDIR=str(results))
        assert done.returncode == 1
        reason = f"no space left on LOGDIR={results}"
        assert (
            last_line(done.stderr)
            == f"run: error: 2 of 2 trials failed: trial 0: {reason}; trial 1: {reason}"
        )


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
    trainer = checkout.root / "implementations" / "bert" / "__main__.py"
    dump = (
        "open(os.environ['TORCH_FR_DUMP_TEMP_FILE'] + '0', 'w').close(); "
        if dumps
        else ""
    )
    waits = f"    if os.environ['RANK'] == '0': {dump}os.abort()\n"
    alone = f"import os, sys, time\nif '--check' not in sys.argv:\n{waits}    time.sleep(900)\n"
    trainer.write_text(alone + trainer.read_text())
    done = checkout.run(LOCAL, DIST_TIMEOUT="20")
    expected = (
        f"run: error: 1 of 1 trials failed: trial 0: {said.format(os.uname().nodename)}"
    )
    assert last_line(done.stderr).startswith(expected)


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
    waited, said, repository, tmp_path
):
    for rank in waited:
        (tmp_path / f"nccl_0_rank_{rank}").touch()
    program = repository / "launch" / "run" / "hang.py"
    done = captured(
        [sys.executable, program, "reason", tmp_path, "0", "2", "dgx1", "dgx2"],
        env={"PYTHONPATH": f"{repository / 'implementations'}:{repository}"},
        check=True,
    )
    assert done.stdout.startswith(said)
    hang = tmp_path / "hang_0.txt"
    assert hang.exists() == bool(waited) == bool(done.stdout)
    named = hang.read_text().splitlines()[1:] if 0 < len(waited) < 4 else []
    assert named == [
        f"rank {rank}" for rank in range(4) if named and rank not in waited
    ]


def test_a_trainer_asked_to_stop_that_exits_with_0_is_no_result(checkout):
    trainer = checkout.root / "implementations" / "bert" / "__main__.py"
    text = trainer.read_text().replace(
        "    return 0\n\n\nsys.exit",
        "    return fail(folder, trial, 0, 'stopped at step 9')\n\n\nsys.exit",
    )
    trainer.write_text(text)
    done = checkout.run(LOCAL)
    assert done.returncode == 1
    assert (
        last_line(done.stderr)
        == "run: error: 1 of 1 trials failed: trial 0: stopped at step 9"
    )
    assert not (checkout.run_dir / "result_0.txt").exists()
