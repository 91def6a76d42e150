"""The supervisor's decisions follow from records, whatever words the reasons have."""

import glob
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.env import from_env
from finetune.config import FinetuneConfig, with_defaults

from .captured import captured

RESUMES = {"RESUME": "1", "CHECKPOINT_DIR": "/nowhere"}
SPARE = {"SPARE_NODES": "1"}
PARTS = "source launch/load.sh run/log run/python run/record run/restart run/answers; "


def settings(folder: Path) -> dict[str, str]:
    """Of an attempt whose run is the folder run there."""
    own = {"ATTEMPT_STATUS": str(folder / "records"), "LOGDIR": str(folder)}
    return own | {"RUN_NAME": "run", "DGXNNODES": "3", "PATH": "/usr/bin:/bin"}


def shell(repository: Path, folder: Path, script: str, **env: str) -> list[str]:
    environ = settings(folder) | {"REPO_DIR": str(repository)} | env
    done = captured(["bash", "-uc", PARTS + script], cwd=repository, env=environ)
    return (done.stdout + done.stderr).splitlines()


@pytest.fixture
def launcher(repository, monkeypatch):
    """A module of the launcher, which its programs import from their own folder."""
    monkeypatch.syspath_prepend(str(repository / "launch" / "run"))
    return importlib.import_module


@pytest.fixture
def records(launcher):
    return launcher("records")


@pytest.fixture
def ask(launcher, tmp_path, monkeypatch, capsys) -> Callable[..., list[str]]:
    """ask(*words, **variables): the lines that restart.py prints."""
    restart = launcher("restart")

    def ask(*words: str, **env: str) -> list[str]:
        monkeypatch.setattr(restart, "ENV", settings(tmp_path) | env)
        restart.main(*words)
        return capsys.readouterr().out.splitlines()

    return ask


def write(folder: Path, lines: list[str]) -> None:
    text = "".join(line.replace(" ", "\t") + "\n" for line in lines)
    (folder / "records").write_text(text)


HUNG, UNFIT, KILLED = "missing 3 n2 - hung", "unfit - n2 - slow", "killed 3 n2 7 SIGKILL"  # fmt: skip


@pytest.mark.parametrize(
    ("records", "env", "can", "plan"),
    [
        ([HUNG], SPARE, "1", "hung 3 n2"),
        ([HUNG], RESUMES, "1", "hung 3 n2"),
        ([HUNG], {}, "1", ""),
        ([HUNG], RESUMES, "0", ""),  # where no node can be left out none is blamed
        ([f"missing {rank} n{rank} - hung" for rank in (1, 2, 3)], SPARE, "1", ""),
        ([HUNG, "lost - n1 - gone"], {}, "1", "gone 3 n1"),
        ([UNFIT], SPARE, "1", "slow 3 n2"),
        ([UNFIT], RESUMES, "0", ""),
        (["broken - n2 - disk"], SPARE, "1", "disk 3 n2"),
        (["broken - n2 - disk"], RESUMES, "1", ""),
        ([KILLED], RESUMES, "1", "SIGKILL 1"),
        ([KILLED], SPARE, "1", ""),
        ([KILLED, HUNG], RESUMES, "1", "hung 3 n2"),
        ([KILLED, HUNG], RESUMES, "0", "SIGKILL 1"),
        (["failed 3 n2 7 did_not_come_to"], SPARE | RESUMES, "1", ""),
        (["missing 3 n2"], SPARE, "1", ""),  # a line that was cut off
    ],
)
def test_records_decide_how_a_run_starts_again(ask, tmp_path, records, env, can, plan):
    """Whether, and without which nodes; can: nodes can be left out."""
    write(tmp_path, records)
    assert " ".join(ask("plan", can, **env)) == plan


def test_without_a_scheduler_no_node_can_be_left_out(repository, tmp_path):
    script = "source launch/run/platform.sh; echo $CAN_LEAVE_OUT"
    assert shell(repository, tmp_path, script) == ["0"]


def test_nodes_that_did_not_answer_are_reported_if_others_did(repository, tmp_path):
    stop = "nodes=(n1 n2); answers::die 'STAGE_DIR' $'answer n1\\ndisk full'"
    why = "STAGE_DIR: n2: disk full"
    assert shell(repository, tmp_path, stop)[-1] == f"run: error: {why}"
    assert (tmp_path / "records").read_text() == f"broken\t-\tn2\t-\t{why}\n"


@pytest.mark.parametrize(
    ("left", "status"),
    [
        (["hung 0 n0 3 waits", "ended 4 n3 3 ended"], "hung 0 n0 3 waits"),
        (["hung 0 n0 3 waits", "failed 1 n1 - first"], "failed 1 n1 - first"),
        (["failed 1 n1 - first", "failed 2 n2 9 second"], "failed 1 n1 - first"),
        (["failed 1 n1 - first", "hung 3 n0 3 waits"], "failed 1 n1 - first"),
        (["failed 1 n1 - first", "killed 2 n2 9 third"], "killed 2 n2 9 third"),
        (["killed 2 n2 9 third", "crashed 3 n2 9 fourth"], "crashed 3 n2 9 fourth"),
    ],
)
def test_a_record_is_replaced_by_causes_alone(records, tmp_path, left, status):
    for line in left:
        records.leave(tmp_path, records.Record(*line.split(" ")))
    assert (tmp_path / "status").read_text() == status.replace(" ", "\t") + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["status"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(1, "failed"), (2, "bad_input"), (3, "not_reached"), (4, "hung"), (137, "killed"), (139, "crashed"), (143, "ended")],
)  # fmt: skip
def test_the_exit_status_of_a_rank_is_its_kind(records, tmp_path, status, kind):
    assert records.of_rank(tmp_path, "0", status, "1", "n1").kind == kind


def test_a_record_is_one_line_and_one_that_is_cut_off_is_none(records, tmp_path):
    whole = records.Record("failed", "3", "", "7", "a\tb\nc")
    (tmp_path / "status").write_text(whole.line() + "failed\t3\tn1")
    read = records.read(tmp_path / "status")
    assert read == [whole._replace(node="-", reason="a b c")]
    assert records.read(tmp_path / "none") == []


def test_a_rank_tells_the_reason_of_its_trainer_unless_it_was_killed(records, tmp_path):
    (tmp_path / "error_0.txt").write_text("the loss is nan\n")
    records.explain(tmp_path, "0", records.Record("failed", "1", "n1", "5", "status 1"))
    assert records.first(tmp_path).reason == "the loss is nan"
    records.explain(tmp_path, "0", records.Record("killed", "1", "n1", "5", "SIGKILL"))
    assert records.first(tmp_path).reason == "SIGKILL"
    assert (tmp_path / "error_0.txt").read_text() == "SIGKILL\n"


@pytest.mark.parametrize(
    ("listed", "file", "kills", "step", "told"),
    [
        ("4:memory:/job_7", "memory/job_7/memory.oom_control", 1, "0", True),
        ("1:cpu:/x\n4:memory:/job_7", "memory/job_7/memory.oom_control", 0, "0", False),
        ("4:memory:/job_7", "memory/job_7/memory.oom_control", "of an old kernel", "0", False),
        ("0::/job_7", "job_7/memory.events", 12, "0", True),
        ("0::/job_7", "job_7/memory.events", 12, None, False),
        ("0::/../..", "job_7/memory.events", 12, "0", False),
        ("", "job_7/memory.events", 12, "0", False),
    ],
)  # fmt: skip
def test_memory_is_named_only_where_the_kernel_counts_a_kill_in_the_ranks_step(
    records, monkeypatch, tmp_path, listed, file, kills, step, told
):
    counter = tmp_path / "sys" / "fs" / "cgroup" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(f"oom_kill_disable 1\noom_kill {kills}\n")
    (tmp_path / "groups").write_text(listed)
    monkeypatch.setenv("SYSFS", str(tmp_path / "sys"))
    monkeypatch.setenv("PROC_CGROUP", str(tmp_path / "groups"))
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    found = records.of_rank(tmp_path, "0", 137, "1", "n1")
    assert found.reason.startswith("rank 1 on n1 was killed by SIGKILL")
    assert ("sbatch --mem" in found.reason) == told
    other = records.of_rank(tmp_path, "0", 139, "1", "n1")
    assert "sbatch --mem" not in other.reason


PYENV = f"{Path.home()}/.pyenv/versions"
OLD = [name for name in ("3.6", "3.7", "3.8") if glob.glob(f"{PYENV}/{name}.*")]
PROGRAMS = {
    "restart": "note hung n1", "records": "explain . 0 137 1 n1", "hang": "reason . 0 1 n1 n2", "answers": "why n1",
    "job": "1 7 why TERM n1", "doctor": "gpu", "gpus": "/", "hosts": "hosts", "record": "",
}  # fmt: skip


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_runs_on_old_interpreters(repository, tmp_path, program, version):
    (python,) = glob.glob(f"{PYENV}/{version}.*/bin/python")
    (tmp_path / "hosts").write_text("n1 slots=2\n")
    modules = f"{repository / 'implementations'}:{repository}"
    env = settings(tmp_path) | RESUMES | {"PYTHONPATH": modules, "DEVICE": "cpu"}
    env |= {"SLURM_JOB_NODELIST": "n1", "PATH": os.environ["PATH"]}
    (file,) = (repository / "launch").rglob(f"{program}.py")
    line = [python, "-B", "-s", "-S", str(file), *PROGRAMS[program].split()]
    captured(line, 0, cwd=tmp_path, env=env, input="answer n1\n")


def test_progress_is_that_of_the_trial_that_ran_last(ask, tmp_path):
    """Trial 0 came further; a restart of trial 1 continues from its own checkpoint."""
    saved, run = tmp_path / "saved", tmp_path / "run"
    # One of DeepSpeed's, whose index is missing.
    (saved / "trial_1/step_0000000090").mkdir(parents=True)
    (saved / "trial_1/step_0000000090/rank_00090.pt").touch()
    run.mkdir()
    names = ("step_900", "trial_1/step_0000000040/index", "trial_2/step_70", "rehearsal/step_950")  # fmt: skip
    for number, name in enumerate(names):
        path = saved / f"{name}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        output = run / f"output_{number}.txt"
        output.touch()
        os.utime(output, (1e9, 1e9 + (number == 1)))
    (run / "result_0.txt").touch()

    def progress() -> str:
        ask("note", "why", RESUME="1", CHECKPOINT_DIR=str(saved))
        return (run / "restarts.txt").read_text().splitlines()[-1].split("\t")[1]

    assert progress() == "1 trials, step 40"
    (run / "output_0.txt").touch()
    assert progress() == "1 trials, step 900"
    # DeepSpeed's: whole, and another program's.
    for file in ("global_step1200/index.pt", "global_step1300/bf16_optim_states.pt"):
        (saved / file).parent.mkdir()
        (saved / file).touch()
    assert progress() == "1 trials, step 1200"


@pytest.mark.parametrize("seeds", [{}, {"SEED": "7"}, {"SEED": "7", "SEEDS": "4, 09,5"}])  # fmt: skip
def test_checkpoints_of_fine_tuning_are_those_of_its_trainer(ask, tmp_path, seeds):
    given = seeds | {"TRIAL": "1", "BATCHSIZE": "1", "LR": "1", "EPOCHS": "1"}
    given |= {"TASK": "MRPC", "DATA": "x", "INIT_CHECKPOINT": "x"}
    if "SEED" in given:  # as the launcher exports it to a trial
        given["SEED"] = str(int(given["SEED"]) + 1)
    config = from_env(FinetuneConfig, with_defaults(given))
    folder = tmp_path / "saved" / f"seed_{config.trial_seed}"
    folder.mkdir(parents=True)
    (folder / "step_40.pt").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "output_1.txt").touch()
    own = {"CHECKPOINT_DIR": str(tmp_path / "saved"), "RANK_MODULE": "finetune"}
    told = ask("note", "why", RESUME="1", **own, **seeds)
    assert told == ["why; continues from step 40"]


def test_steps_of_other_trials_are_not_said_to_be_repeated(ask, tmp_path):
    (tmp_path / "run").mkdir()
    for name, text in (("step_0", "900"), ("output_1", "7"), ("step_1", "7")):
        (tmp_path / "run" / f"{name}.txt").write_text(text)
    told = ask("note", "hung", RESUME="1", CHECKPOINT_DIR=str(tmp_path))
    assert told == ["hung; continues from step 0, repeating about 7 steps"]


def test_what_counts_as_a_restart_and_what_the_end_tells(ask):
    for _ in range(3):
        ask("left_out", "bad", "n1")  # at a start
    assert ask("allowed", "1") == []
    assert ask("excluded") == ["n1"]
    ask("note", "hung", "n2", SLURM_JOB_ID="1")  # of an earlier job
    assert ask("allowed", "1", SLURM_JOB_ID="2") == []
    assert ask("excluded", SLURM_JOB_ID="2") == []
    (told,) = ask("told")
    assert told.startswith("run: restarted at ")
    assert told.endswith(", without n2: hung; the trial is repeated")


def test_a_run_gives_up_after_as_many_restarts_without_progress(ask):
    for _ in range(2):
        assert ask("allowed", "2") == []
        ask("note", "hung", "n1")
    gave_up = "gave up: 2 restarts brought no new checkpoint after step 0"
    assert ask("allowed", "2") == [gave_up]


@pytest.mark.parametrize("signal", ["", "USR1"])  # at the time limit
def test_the_last_line_says_that_the_run_gave_up_and_why(repository, tmp_path, signal):
    lines = "missing\t3\tn2\t-\thung\nlast\t-\t-\t-\ttrial 0: hung\n"
    (tmp_path / "records").write_text(lines)
    stubs = 'for name in blame choose requeue why; do eval "platform::$name() { :; }"; done; '
    attempts = "for i in 1 2 3 4; do (supervisor::restart); done"
    begun = f"REPO_DIR=$PWD; source launch/supervisor.sh; {stubs} status=75 signalled={signal}; "
    said = shell(repository, tmp_path, begun + attempts, **RESUMES)
    gave_up = "run: error: gave up: 3 restarts brought no new checkpoint after step 0"
    assert said[-1] == f"{gave_up}; trial 0: hung"


def test_an_attempt_that_asks_in_vain_for_another_ends_with_1(repository, tmp_path):
    (tmp_path / "records").write_text("last\t-\t-\t-\ttrial 0: nan\n")
    begun = "source launch/supervisor.sh; platform::blame() { :; }; status=75; "
    end = "(supervisor::restart); echo ended with $?"
    said = shell(repository, tmp_path, f"REPO_DIR=$PWD; {begun}{end}")
    assert sorted(said) == ["ended with 1", "run: error: trial 0: nan"]


@pytest.mark.parametrize(
    ("env", "continues"),
    [
        ({"RESUME": "1"}, True),
        # The trainer's own rule.
        ({"SUBMISSION_DIVISION": "open"}, True),
        ({"RANK_MODULE": "finetune"}, True),
        ({"SUBMISSION_DIVISION": "closed"}, False),
        ({}, False),
    ],
)
def test_a_restart_says_whether_the_trial_continues(ask, tmp_path, env, continues):
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "step_40.pt").touch()
    (saved / "seed_1").symlink_to(saved)
    told = ask("note", "hung", "n1", CHECKPOINT_DIR=str(saved), **env)
    said = "continues from step 40" if continues else "the trial is repeated"
    assert told == [f"without n1: hung; {said}"]


def test_each_attempt_is_a_process_with_nodes_and_a_name_of_its_own(checkout):
    """What the first one made readonly, as the name of its containers, does not bind the second."""
    says = 'readonly ATTEMPT_NAME PLATFORM=$1; echo "$ATTEMPT_NAME ${*:3}"; exit 75'
    attempt = checkout.root / "launch" / "attempt.sh"
    attempt.write_text(f"#!/usr/bin/env bash\n{says}\n")
    script = "source launch/supervisor.sh; PLATFORM=slurm WORK=trial; "
    script += "nodes=(n1 n2); supervisor::attempt; nodes=(n2 n3); supervisor::attempt"
    said = shell(checkout.root, checkout.root, script, SLURM_JOB_ID="7")
    assert said[:2] == ["bert_7_0 n1 n2", "bert_7_0_1 n2 n3"]
