"""run.sub with stand-ins for Slurm's commands: situations that the test cluster cannot produce."""

import datetime
import os
import re
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from ..waiting import wait_until
from . import platforms
from .captured import Done, captured
from .platforms import scontrol, srun
from .test_trial import none_left


def ended(
    slurm, number: int, *, job: str, trial: str = "hang", kill_wait: int = 30,
    first: Callable[[int], None] = lambda _: None,
) -> str:  # fmt: skip
    """The last line of a job that gets this signal while its trial runs; ``job`` is the answer of
    ``scontrol show job``.

    first: what happens before to the process of this number, that of the script.
    """
    scontrol(slurm, f"*'show job'*) {job}")
    process = slurm.started(TRIAL_0=trial, KILL_WAIT=str(kill_wait))
    first(process.pid)
    os.kill(process.pid, number)
    return slurm.ended(process, 143).last_line


def signal_the_ranks_shell(script: int) -> None:
    """Kills the parent of the ranks' processes, if possible; gives the script time to notice."""
    children = captured(["pgrep", "-P", str(script)], status=0)
    for child in children.stdout.split():  # the other one is the watcher of the ranks
        os.kill(int(child), signal.SIGTERM)
    time.sleep(0.5)


@pytest.fixture
def slurm(checkout):
    """A job of one node without gres."""
    return platforms.job(checkout)


@pytest.fixture
def pyxis(checkout):
    """The same with an image and pyxis' options."""
    return platforms.pyxis(checkout)


def training_step(slurm) -> str:
    """The only step of ranks."""
    (step,) = [call for call in slurm.calls("srun") if "--kill-on-bad-exit" in call]
    return step


OF_SBATCH = ("GPUS_PER_TASK", "CPU_BIND", "NTASKS", "NTASKS_PER_NODE")


@pytest.mark.parametrize(
    ("plugin", "bound", "wanted", "broken", "used"),
    [
        ("task/affinity,task/cgroup", True, "pmix", "", "pmix"),
        ("task/cgroup", False, "pmix", "pmix", "none"),
        ("task/none", False, "", "", "none"),
    ],
)
def test_steps_have_what_works(slurm, plugin, bound, wanted, broken, used):
    """A task of an array, whose SLURM_JOB_ID may be the array's, is asked for by its own number."""
    del slurm.env["BINDING"]
    slurm.stand_in("date", "echo today")
    seen = "|".join(OF_SBATCH[:2] + OF_SBATCH[3:])
    srun(slurm, f'env | grep -E "^SLURM_({seen})=" >&2 && exit 1')
    given = {f"SLURM_{name}": "1" for name in OF_SBATCH}
    given |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    given |= {"TASK_PLUGIN": plugin, "SLURM_MPI_TYPE": wanted, "SRUN_BROKEN": broken}
    done = slurm.run(status=0, **given)
    assert slurm.run_dir.name == "P8000H100_1x8x48x1_pack_today_7"
    assert {rank["WORLD_SIZE"] for rank in slurm.ranks()} == {"2"}
    shown = [call for call in slurm.calls("scontrol") if "--oneliner' 'show' 'job" in call]  # fmt: skip
    assert {call.split()[-1] for call in shown} == {"'7_1'"}
    assert f"'--mpi={used}'" in training_step(slurm)
    warned = "warning: SLURM_MPI_TYPE=" in done.stderr
    assert warned == (bool(wanted) and wanted != used)
    steps = [call for call in slurm.calls("srun") if "--ntasks" in call]
    asked = [call for call in steps if "true" not in call]
    assert all(("'--cpu-bind=none'" in call) == bound for call in asked)


@pytest.mark.parametrize("script", ["run.sub", "certify.sub"])
def test_a_job_finds_its_commands_repository(repository, tmp_path, script):
    for name in ("spool", "command", "submission", "bin"):
        (tmp_path / name / "launch").mkdir(parents=True)
    for name in ("command", "submission"):
        begin = tmp_path / name / "launch" / "load.sh"
        begin.write_text("echo $REPO_DIR; exit")
    copy = shutil.copy(repository / script, tmp_path / "spool")
    scontrol = tmp_path / "bin" / "scontrol"
    told = f"   Command={tmp_path}/command/{script}"
    scontrol.write_text(f"#!/bin/sh\necho '{told}'\necho '{told}'")  # of two tasks
    scontrol.chmod(0o755)

    def found() -> Done:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        submitted = {"PATH": path, "SLURM_SUBMIT_DIR": f"{tmp_path}/submission"}
        return captured(["bash", copy], cwd=tmp_path, env=os.environ | submitted)

    assert found().stdout.strip() == str(tmp_path / "command")
    scontrol.unlink()
    assert found().stdout.strip() == str(tmp_path / "submission")
    shutil.rmtree(tmp_path / "submission")
    lost = found()
    assert lost.returncode == 2
    assert f"sees no repository in {tmp_path}/submission" in lost.last_line


@pytest.mark.parametrize("unknown", ["node0", ""])
def test_a_step_refused_for_nodes_not_known_yet_is_tried_again(slurm, unknown):
    """Any other error of srun is final."""
    once = '(set -o noclobber && : >"$0.{0}") 2>/dev/null'
    slurm.stand_in("sinfo", f"if {once.format('asked')}; then echo {unknown}; fi")
    refuse = 'echo "srun: error: refused" >&2; exit "$SLURM_EXIT_ERROR"'
    first = f'[[ "$*" == *--check* ]] && {once.format("asked")}'
    srun(slurm, f"if {first}; then {refuse}; fi")
    done = slurm.run()
    assert (done.returncode == 0) == bool(unknown), done.stderr
    if not unknown:
        assert done.last_line.endswith("cannot run: refused")


TWO = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node0,node1"}
THREE = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node0,node1,node2"}


def restarted(slurm) -> str:
    """The only restart of the run."""
    (noted,) = (slurm.run_dir / "restarts.txt").read_text().splitlines()
    return noted


def test_a_node_that_slurm_took_from_the_job_is_lost_even_if_it_is_back(slurm):
    """No step waits for it, and the run goes on without it."""
    taken = '$(test -e "$FAKE_CALLS.taken" || echo ,node1)'
    scontrol(slurm, f"*'show job'*) echo \"JobId=7 BatchHost=node0 NodeList=node0{taken} \"")  # fmt: skip
    slurm.stand_in("sbatch", "")
    slurm.edit("slurm/step.sh", "TRY=20", "TRY=1")
    ranks = '"$*" == *" --ntasks=2 "*--kill-on-bad-exit*'
    busy = 'touch "$FAKE_CALLS.taken"; sleep 2; exit "$SLURM_EXIT_ERROR"'
    srun(slurm, f"if [[ {ranks} ]]; then {busy}; fi")
    slurm.size = "DGXNNODES=2 DGXNGPU=1"
    done = slurm.run(status=1, **TWO)
    assert any("'requeue'" in call for call in slurm.calls("scontrol")), done.stderr
    assert restarted(slurm).endswith("without node1: lost by Slurm; the trial is repeated")  # fmt: skip


def test_a_node_that_srun_gave_up_is_left_out_by_this_attempts_output_alone(slurm):
    """Slurm misses no node. The second attempt's ranks are killed in silence."""
    scontrol(slurm, "*'show job'*) echo \"NodeList=node0,node1,node2 \"")
    says = 'set -o noclobber && : >"$FAKE_CALLS.said" && echo "srun: error: Aborting, io error and missing step on node 1"'
    srun(slurm, f'if [[ "$*" == *--kill-on-bad-exit* ]]; then ({says}); exit 137; fi')
    slurm.size = "DGXNNODES=2 DGXNGPU=1"
    done = slurm.run(SPARE_NODES="1", status=1, **THREE)
    assert restarted(slurm).endswith("without node1: lost by srun; the trial is repeated")  # fmt: skip
    assert "restarts on node0 node2" in done.stderr


def test_ranks_whose_launcher_does_not_end_after_a_failure_are_ended(slurm):
    slurm.edit("run/ranks.sh", "OUTLIVE=90", "OUTLIVE=1")
    slurm.edit("run/ranks.sh", '"$1" 20; fi', '"$1" 1; fi')
    srun(slurm, """[[ "$*" != *--kill-on-bad-exit* ]] || trap 'sleep 600' EXIT""")
    slurm.failed("trial 0: the loss is nan at step 3", TRIAL_0="crash:0")


# Containers are kept where pyxis puts them, not where the user's own variable says.
ENROOT = """[[ ! ${ENROOT_DATA_PATH:-} ]] || { echo "elsewhere"; exit; }
if [[ $1 == list ]]; then printf '%s\\n' $CONTAINERS; fi"""


def test_a_job_removes_leftovers_of_dead_jobs_and_of_its_own_starts(pyxis):
    """Which these are, job.py decides; and the guard what is still there at the end."""
    pyxis.stand_in("enroot", ENROOT)
    pyxis.stand_in("squeue", "printf '7\n70\n'")
    left = "pyxis_bert_7_0 pyxis_bert_70_0 pyxis_bert_7_1 pyxis_7_bert_5_3 other pyxis_bert_x_0"
    users = {"ENROOT_DATA_PATH": "/scratch/me", "ENROOT_CACHE_PATH": "/scratch/me"}
    pyxis.run(SLURM_RESTART_COUNT="1", CONTAINERS=left, status=0, **users)
    calls = [call for call in pyxis.calls("enroot") if call != "'list'"]
    removed = list(dict.fromkeys(call.split("'")[-2] for call in calls))
    gone = ["pyxis_bert_7_0", "pyxis_7_bert_5_3"]
    assert removed == [*gone, "pyxis_bert_7_1"], "the last at its own end"


NOT_STARTED = "srun: error: task 0 launch failed: Plugin initialization failed"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("--mpi=none --ntasks=1", "a step with .* does not start: task 0 launch failed: Plugin init"),
        ("--container-image", "CONT=mlperf-bert: its container could not be created on every node: task 0 launch"),
        ("--check", "this configuration cannot run: task 0 launch failed: Plugin initialization failed"),
        ("--kill-on-bad-exit", "the all-reduce test failed: .*task 0 launch failed: Plugin initialization failed; see"),
        ("drop_caches", "CLEAR_CACHES=require, and the page caches were not dropped"),
        ("power_sampler", "POWER=1: not every node can measure its power: task 0 launch failed: Plugin"),
    ],
)  # fmt: skip
def test_a_preflight_that_did_not_run_fails_with_srun_at_0(pyxis, step, message):
    """As in Slurm 22.05 if a plugin fails on a node: nothing runs, and srun exits with 0."""
    nothing = f'echo "{NOT_STARTED}" >&2; exit 0'
    srun(pyxis, f'if [[ "$*" == *"{step}"* ]]; then {nothing}; fi')
    pyxis.stand_in("ipmitool", "echo Instantaneous power reading: 5 Watts")
    done = pyxis.run(NCCL_TEST="1", CLEAR_CACHES="require", POWER="1", DROP_STATUS="0")
    assert done.returncode in (1, 2), done.stderr
    assert re.search(message, done.last_line), done.stderr
    assert not pyxis.ranks()


@pytest.mark.parametrize("suffix", ["", "_rehearsal"])
def test_a_requeued_job_finds_its_folder(slurm, suffix):
    slurm.stand_in("date", "echo later")
    folder = slurm.logdir / f"P8000H100_1x8x48x1_pack_earlier_7{suffix}"
    folder.mkdir(parents=True)
    slurm.run(REHEARSAL=str(int(suffix != "")), SLURM_RESTART_COUNT="1")
    assert slurm.run_dir == folder


PYXIS_SAYS = "slurmstepd: error: pyxis: "


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("child 17 failed with error code: 1\nP    [INFO] Extracting squashfs filesystem...\nP    FATAL ERROR: File system corruption detected",
         "FATAL ERROR: File system corruption detected"),
        ("    [INFO] Querying registry for permission grant\nP    curl: (6) Could not resolve host: registry-1.docker.io",
         "curl: (6) Could not resolve host: registry-1.docker.io"),
        ("mkdir: No space left on device", "mkdir: No space left on device"),
        ("    [ERROR] No space left on device\nanswer dgx1", "dgx2: [ERROR] No space left on device"),
        ("[ERROR] no\nsrun: error: dgx2: task 1: Exited with exit code 1", "dgx2: [ERROR] no"),
    ],
)  # fmt: skip
def test_why_a_node_cannot_use_an_image_is_told(repository, said, reason):
    parts = "source launch/load.sh run/python run/answers container/runtimes/pyxis"
    names = "nodes=(dgx1 dgx2); export DGXNNODES=2"
    line = f'{parts}; {names}; answers::why "$1" "${{pyxis_causes[@]}}"'
    text = PYXIS_SAYS + said.replace("\nP", f"\n{PYXIS_SAYS}")
    done = captured(["bash", "-c", line, "-", text], 0, cwd=repository)
    assert done.stdout == f"{reason}\n"


def test_a_job_that_slurm_ends_says_why_last_and_in_the_trials_error(slurm):
    """Which cause it is, job.py decides."""
    slurm.stand_in("sinfo", "echo node0 'allocated*'; echo node2 down")
    job = "echo 'JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1'"
    said = ended(slurm, signal.SIGTERM, job=job)
    why = "the job was requeued (node0: down or not responding)"
    assert said.startswith(f"run: error: {why}; ")
    assert (slurm.run_dir / "error_0.txt").read_text() == f"{why}\n"


def test_the_last_line_waits_for_ranks_whose_shell_gets_the_signal_first(slurm):
    job, first = "echo 'JobId=7 x JobState=CANCELLED'", signal_the_ranks_shell
    said = ended(slurm, signal.SIGTERM, job=job, trial="saves", first=first)
    assert said.startswith("run: error: the job was cancelled; ")
    assert (slurm.run_dir / "saved").exists()


def test_nothing_that_hangs_delays_the_last_line_until_slurm_kills_the_job(slurm):
    """Neither a silent controller nor a rank."""
    busy = f"[[ ! -e '{slurm.logdir}/stopped/running_0' ]] || exec sleep 300"
    said = ended(slurm, signal.SIGTERM, job=busy, trial="deaf", kill_wait=3)
    why = "interrupted by SIGTERM (Slurm's controller did not say why)"
    assert said.startswith(f"run: error: {why}; RUN_NAME=stopped continues ")
    # the watcher of the ranks checks once a second whether it is still needed
    none_left(slurm.root)


def test_before_the_time_limit_the_ranks_may_save_for_longer_than_killwait(slurm):
    now = datetime.datetime.now()
    end = now + datetime.timedelta(seconds=120)
    job = f"echo 'JobId=7 StartTime={now:%FT%T} EndTime={end:%FT%T}'"
    said = ended(slurm, signal.SIGUSR1, job=job, trial="saves", kill_wait=3)
    assert said.startswith("run: error: the job reached its time limit; ")
    assert (slurm.run_dir / "saved").exists()
    # At SIGTERM srun would end the step by itself.
    assert slurm.calls("srun_got") == ["USR1"]


def test_a_lost_node_is_excluded_also_if_slurm_kills_the_other_ranks(slurm):
    scontrol(slurm, "'requeue 7')")
    slurm.stand_in("sinfo", "echo node0 down")
    slurm.stand_in("sbatch", "")
    srun(slurm, 'if [[ "$*" == *--kill-on-bad-exit* ]]; then exit 137; fi')
    process = slurm.popen(RUN_NAME="lost")
    wait_until(lambda: "'requeue' '7'" in slurm.calls("scontrol"))
    process.terminate()
    done = slurm.ended(process, 143)
    requeued = "job 7 is requeued, without node0: lost by Slurm; the trial is repeated"
    assert done.last_line == f"run: warning: {requeued}"


@pytest.mark.parametrize(
    ("states", "updates"),
    [("RUNNING COMPLETING PENDING", 3), ("COMPLETING GONE", 2), ("RUNNING RESTARTED", 2)],
)  # fmt: skip
def test_nodes_are_excluded_once_the_job_is_pending_if_ever(slurm, states, updates):
    turns = slurm.root / "turns"
    state = f'states=({states}); turn=$(cat "{turns}" 2>/dev/null || echo 0); state=${{states[turn]}}\n'
    shown = 'echo "JobId=7 JobState=$state Restarts=0 X=1"'
    answers = f"""if [[ $1 == update ]]; then [[ $state == PENDING ]] && exit; exit 1; fi
echo $((turn + 1)) >"{turns}"
case $state in GONE) exit 1 ;; RESTARTED) echo "JobId=7 JobState=RUNNING Restarts=1 X=1" ;; *) {shown} ;; esac"""
    slurm.stand_in("scontrol", state + answers)
    slurm.stand_in("sleep", "")
    command = ["launch/slurm/exclude.sh", "7", "0", "node1,node2", "2-3"]
    done = captured(command, cwd=slurm.root, env=slurm.env)
    assert (done.returncode == 0) == ("PENDING" in states), done.stderr
    asked = [call for call in slurm.calls("scontrol") if "update" in call]
    assert len(asked) == updates
    assert "ExcNodeList=node1,node2" in asked[-1]


def test_ranks_that_are_killed_without_a_record_are_started_once_more(slurm):
    """srun aborts a step whose connection is reset, and kills what would leave a record."""
    killed = slurm.root / "killed"
    first = f'[[ "$*" == *--kill-on-bad-exit* && ! -e "{killed}" ]]'
    srun(slurm, f'if {first}; then touch "{killed}"; exit 137; fi')
    done = slurm.run(status=0, CHECKPOINT_DIR=str(slurm.root / "saved"), RESUME="1")
    assert "the ranks were killed (SIGKILL); " in done.stderr


@pytest.fixture
def spare(slurm):
    """A job of two nodes, of which one is a spare."""
    slurm.env |= TWO | {"SPARE_NODES": "1"}
    return slurm


def test_a_node_on_which_no_step_starts_is_left_out_if_there_is_a_spare(spare):
    busy = 'echo "srun: error: Unable to create step: Requested nodes are busy" >&2; exit 1'
    there = '"$*" == *--nodes=2* || "$*" == *--exclude=node1*'
    srun(spare, f"if [[ {there} ]]; then {busy}; fi")
    done = spare.run(status=0)
    warned = "run: warning: without node0: .* does not start: Unable to"
    assert re.search(warned, done.stderr)
    assert "'--exclude=node0'" in training_step(spare)


def test_a_node_that_the_all_reduce_test_misses_is_left_out_if_there_is_a_spare(spare):
    spare.edit("run/ranks.sh", "OUTLIVE=90", "OUTLIVE=1")  # the missing rank does
    done = spare.run(NCCL_TEST="1", ALLREDUCE="missing:1", status=0)
    assert "restarts on node1, without node0: rank 1 on node0 did not" in done.stderr


def test_the_job_is_signalled_two_minutes_before_its_time_limit(repository):
    assert "#SBATCH --signal=B:USR1@120\n" in (repository / "run.sub").read_text()


def test_a_trial_that_hangs_leaves_the_others_their_time(slurm):
    """Its part of the job's time has passed: in minutes, here in seconds."""
    slurm.edit("run/trial.sh", "START_MINUTES=5", "START_MINUTES=0")
    slurm.edit("run/trial.sh", "60 * trial_minutes", "trial_minutes")
    told = "current=$TRIAL\n"
    limit = 'echo "limit of $TRIAL: $limit" >&2\n'
    slurm.edit("run/trial.sh", told, told + limit)
    times = {"WALLTIME_RUNANDTIME": "3", "WALLTIME": "5"}
    reason = "trial 0: it did not end in 3 minutes"
    done = slurm.failed(reason, trials=2, TRIAL_0="hang", **times)
    assert {"limit of 0: 3", "limit of 1: 0"} <= set(done.stderr.splitlines())
    assert [path.name for path in slurm.run_dir.glob("result_*")] == ["result_1.txt"]


def test_print_shows_the_job_and_starts_nothing(pyxis):
    """The srun lines are those of a run, but for what only a job knows."""
    pyxis.stand_in("scontrol", "echo NodeName=n1 Gres=gpu:8; echo TaskPlugin=task/none")
    data = pyxis.root.parent / "data"
    data.mkdir()
    given = {"DATADIR_PHASE2_PACKED": str(data), "SBATCH_PARTITION": "a b"}
    given |= {"SLURM_JOB_ID": "", "SLURM_GPUS_ON_NODE": ""}
    given["after"] = "export NEXP=2 SPARE_NODES=1 DGXNNODES=2"
    done = pyxis.run("./run.sub --print BATCHSIZE=7", status=0, **given)
    parts = dict(part.split("\n", 1) for part in done.stdout.split("\n# ")[1:])
    job, container, check, ranks, mounts, exported = parts.values()
    assert "SBATCH_PARTITION=a\\ b " in job
    assert " sbatch -N 3 --job-name=bert --exclusive " in job
    for line in (container, check, ranks):
        assert line.count("srun ") == 1
        assert " --gres=gpu:2 " in line
        assert f"{data}:{data}:ro" in line
        assert " --container-name=bert_JOB_0 " in line
    assert " --container-image=" in container
    assert " -m bert --check" in check
    assert " --ntasks=4 --ntasks-per-node=2 " in ranks
    assert ranks.strip().endswith("/launch/run/rank.sh")
    assert mounts.split().count(str(data)) == 2
    assert mounts.split().count(str(pyxis.logdir)) == 2
    assert "BATCHSIZE=7" in exported.split()
    assert not pyxis.logdir.exists()
    assert [call for call in pyxis.calls("srun") if "help" not in call] == []
