"""What Slurm says about a job, in words, whatever clock its nodes have."""

import os
import time

import pytest

from .captured import captured

JOB = "JobId=7 JobState={state} Reason={reason} Restarts={restarts} TimeLimit=00:30:00 BatchHost=n1 NodeList={left}"


@pytest.fixture
def ask(repository, tmp_path):
    """ask(command, *words, **fields of the job): what job.py prints."""

    def run(
        *words: str, times: str = "", states: str = "", names: str = "", known: str = "", **fields: str
    ) -> str:  # fmt: skip
        given = {"state": "RUNNING", "reason": "None", "restarts": "0", "left": "n1 n2"}
        shown = JOB.format(**given | fields) + times
        hosts = f"printf '%s\\n' {fields.get('left', 'n1 n2')}"
        for name, text in {
            "scontrol": f"case $* in *hostnames*) {hosts} ;; *) echo '{shown}' ;; esac",
            "sinfo": f"printf '{states}'",
            "squeue": f"printf '%s\\n' {known}",
        }.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "ATTEMPT": "2",
            "SUPERVISOR_BEGAN": str(time.time() - 100), "SLURM_RESTART_COUNT": fields.get("started", "0"),
        }  # fmt: skip
        line = ["python3", "-B", repository / "launch/slurm/job.py", "9", "7", *words]
        return captured(line, env=env, check=True, input=names).stdout.strip()

    return run


@pytest.mark.parametrize(
    ("signal", "fields", "said"),
    [
        ("USR1", {}, "the job reached its time limit of 00:30:00"),
        ("TERM", {"state": "TIMEOUT"}, "the job reached its time limit of 00:30:00"),
        ("TERM", {"restarts": "1"}, "the job was requeued"),
        ("TERM", {"state": "REQUEUED", "left": "n1"}, "the job was requeued (n2: down or not responding)"),
        ("TERM", {"state": "CANCELLED", "left": "n1"}, "the job was cancelled"),
        ("TERM", {"state": "PREEMPTED"}, "the job was preempted"),
        ("TERM", {"state": "COMPLETING", "reason": "TimeLimit"}, "the job reached its time limit of 00:30:00"),
        ("TERM", {"state": "NODE_FAIL", "states": "n1 allocated*\nn9 down\n"},
         "a node of the job failed (n1: down or not responding)"),
        ("TERM", {}, "interrupted by SIGTERM"),
    ],
)  # fmt: skip
def test_why_a_job_ends_is_said_in_words(ask, signal, fields, said):
    assert ask("why", signal, "n1", "n2", **fields) == said


@pytest.mark.parametrize("hours", [0, 1, -1])
def test_the_time_that_is_left_is_right_on_a_node_whose_clock_is_off(ask, hours):
    theirs = time.time() + 3600 * hours
    shape = "%Y-%m-%dT%H:%M:%S"
    start, end = (time.strftime(shape, time.localtime(theirs + s)) for s in (-100, 120))
    left = int(ask("left", times=f" StartTime={start} EndTime={end} "))
    assert 60 < left <= 121
    assert ask("left", times=" StartTime=Unknown EndTime=Unknown ") == "0"


@pytest.mark.parametrize(
    ("left", "node", "lost"),
    [("n2 n3", "n2", "n1"), ("n2 n3", "n3", ""), ("n1 n2", "n1", ""), ("", "n2", "")],
)
def test_the_first_node_left_acts_for_a_job_without_a_script(ask, left, node, lost):
    assert ask("orphaned", node, left=left) == lost


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("Aborting, io error and missing step on node 1", "n2"),
        ("Aborting, step missing and io error on node 0", "n1"),
        ("Aborting, can not test connection to node 1.", "n2"),
        ("step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1", "n2"),
        ("Cannot communicate with node 2.  Aborting job.", "7x"),
        ("Node failure on n2", "n2"),
        ("Task launch for StepId=1.7 failed on node 7x: Communication connection failure", "7x"),
        ("Cannot communicate with node 3.  Aborting job.", ""),
        ("n2: task 1: Killed", ""),
    ],
)  # fmt: skip
def test_a_node_that_srun_gave_up_is_lost(ask, said, lost):
    around = f"1: Aborting, on node 0\nsrun: error: {said}\nsrun: Job step aborted\n"
    record = f"lost\t-\t{lost}\t-\tlost by srun" if lost else ""
    assert ask("aborted", "n1", "n2", "7x", names=around) == record


LEFT = "pyxis_bert_5_9 bert_6_0 pyxis_7_bert_7_0_1 bert_7_1 bert_7_1_1 bert_7_1_2 bert_7_1_3 bert_70_0 bert_x_0 other"


@pytest.mark.parametrize(
    ("known", "dead"),
    [
        ("6 7", "pyxis_bert_5_9 pyxis_7_bert_7_0_1 bert_7_1 bert_7_1_1 bert_70_0"),
        ("7 70", "pyxis_bert_5_9 bert_6_0 pyxis_7_bert_7_0_1 bert_7_1 bert_7_1_1"),
        ("", ""),  # without an answer from Slurm
        ("7; exit 1", ""),
    ],
)
def test_what_dead_jobs_and_earlier_attempts_of_this_one_left_is_told(ask, known, dead):
    names = LEFT.replace(" ", "\n")
    assert ask("dead", names=names, known=known, started="1").split() == dead.split()
