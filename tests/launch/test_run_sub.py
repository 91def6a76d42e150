"""run.sub with stand-ins for Slurm's commands: situations that the test cluster cannot produce."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import signal as signal_module
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..waiting import wait_until
from .captured import captured

PYXIS = "--container-image --container-name --container-mounts --container-writable"
PYXIS += " --no-container-mount-home --container-remap-root"
SCONTROL = """case "$*" in
  'show config') echo "TaskPlugin = ${TASK_PLUGIN-task/none}" ;;
  'show hostnames'*) echo node0 ;;
  'show node'*) echo 'NodeAddr=127.0.0.1 NodeHostName=node0' ;;
  *) exit 1 ;;
esac"""


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def ended(
    slurm,
    signal: str,
    *,
    job: str,
    trial: str,
    kill_wait: int = 30,
    first: Callable[[int], None] | None = None,
) -> str:
    """Output of a job that gets this signal while its trial runs; ``job`` is the answer of
    ``scontrol show job``.

    first: what happens before to the process of this number, that of the script.
    """
    config = SCONTROL.replace(
        "'show config')",
        f"'show config') echo 'KillWait                = {kill_wait} sec'; ",
    )
    slurm.stand_in(
        "scontrol", config.replace("*) exit 1", f"*'show job'*) {job} ;;\n  *) exit 1")
    )
    process = slurm.popen("./run.sub", after="export RUN_NAME=ended", TRIAL_0=trial)
    wait_until((slurm.logdir / "ended" / "running_0" / "result_0.txt").exists)
    if first is not None:
        first(process.pid)
    os.kill(process.pid, getattr(signal_module, f"SIG{signal}"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    return errors


def signal_the_ranks_shell(script: int) -> None:
    """Kills the parent of the ranks' processes, if possible, and gives the script time to
    notice.
    """
    children = captured(["pgrep", "-P", str(script)], check=True)
    for child in children.stdout.split():  # the other one is the watcher of the ranks
        os.kill(int(child), signal_module.SIGTERM)
    time.sleep(0.5)


@pytest.fixture
def slurm(checkout):
    """A job of one node without gres."""
    checkout.stand_in("srun", (Path(__file__).parent / "fakes" / "srun.sh").read_text())
    checkout.stand_in("scontrol", SCONTROL)
    checkout.env |= {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node0",
    }  # fmt: skip
    checkout.env["NCCL_TEST"] = "0"
    return checkout


@pytest.fixture
def pyxis(slurm):
    """The same at paths without spaces (mount lists allow none), with an image and pyxis'
    options.
    """
    folder = slurm.root.parent
    slurm.root = slurm.root.rename(folder / "checkout")
    slurm.env |= {"LOGDIR": str(folder / "results"), "PYTHONPATH": str(slurm.root)}
    slurm.env |= {"CONT": "mlperf-bert", "SRUN_HELP": PYXIS}
    return slurm


def test_a_job_is_named_after_its_config_and_number(slurm):
    del slurm.env["BINDING"]
    slurm.stand_in("date", "echo today")
    done = slurm.run("./run.sub")
    assert done.returncode == 0, done.stderr
    assert slurm.run_dir.name == "P8000H100_1x8x48x1_pack_today_7"
    assert {rank["WORLD_SIZE"] for rank in slurm.ranks()} == {"2"}


@pytest.mark.parametrize("script", ["run.sub", "certify.sub"])
def test_a_job_finds_the_repository_of_its_command_before_that_of_its_submission(
    repository, tmp_path, script
):
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

    def found() -> subprocess.CompletedProcess[str]:
        environ = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path / "submission"),
        }
        return captured(["bash", copy], cwd=tmp_path, env=environ)

    assert found().stdout.strip() == str(tmp_path / "command")
    scontrol.unlink()
    assert found().stdout.strip() == str(tmp_path / "submission")
    shutil.rmtree(tmp_path / "submission")
    lost = found()
    assert lost.returncode == 2
    assert f"sees no repository in {tmp_path}/submission" in last_line(lost.stderr)


def test_a_task_of_an_array_is_asked_for_by_its_own_number(slurm):
    """Its SLURM_JOB_ID may be the array's."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    assert slurm.run("./run.sub", **array).returncode == 0
    shown = [
        call for call in slurm.calls("scontrol") if "--oneliner' 'show' 'job" in call
    ]
    assert shown
    assert all(call.endswith("'7_1'") for call in shown)


def test_outside_a_job_it_says_how_to_submit(slurm):
    del slurm.env["SLURM_JOB_ID"]
    done = slurm.run("./run.sub")
    assert done.returncode == 2
    assert last_line(done.stderr) == (
        "run: error: run.sub runs in a Slurm job: sbatch -N 1 run.sub; without Slurm, ./run_local.sh"
    )


@pytest.mark.parametrize(
    ("wanted", "broken", "used"),
    [("pmix", "", "pmix"), ("pmix", "pmix", "none"), ("", "", "none")],
)
def test_an_mpi_type_is_used_only_when_a_step_starts_with_it(
    slurm, wanted, broken, used
):
    settings = {"SLURM_MPI_TYPE": wanted, "SRUN_BROKEN": broken}
    done = slurm.run("./run.sub", **settings)
    assert done.returncode == 0, done.stderr
    training = next(
        (call for call in slurm.calls("srun") if "rank.sh" in call and "--kill-on-bad-exit" in call),
    )  # fmt: skip
    assert f"'--mpi={used}'" in training
    assert ("warning: SLURM_MPI_TYPE=" in done.stderr) == (
        bool(wanted) and wanted != used
    )


@pytest.mark.parametrize(
    ("plugin", "bound"), [("task/affinity,task/cgroup", True), ("task/cgroup", False)]
)
def test_slurms_own_binding_is_switched_off_where_there_is_one(slurm, plugin, bound):
    done = slurm.run("./run.sub", TASK_PLUGIN=plugin)
    assert done.returncode == 0, done.stderr
    steps = [
        call
        for call in slurm.calls("srun")
        if "--ntasks" in call and "true" not in call
    ]
    assert all(("'--cpu-bind=none'" in call) == bound for call in steps)


def test_options_of_sbatch_do_not_reach_the_steps(slurm):
    told = {
        "SLURM_GPUS_PER_TASK": "1", "SLURM_CPU_BIND": "cores", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "1",
    }  # fmt: skip
    slurm.stand_in(
        "srun", 'env | grep -E "^SLURM_(GPUS_PER_TASK|CPU_BIND|NTASKS_PER_NODE)=" >&2 && exit 1\n' + srun(),
    )  # fmt: skip
    done = slurm.run("./run.sub", **told)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unknown", ["node0", ""])
def test_a_step_refused_by_a_controller_that_does_not_know_its_nodes_yet_is_tried_again(
    slurm, unknown
):
    """Any other error of srun is final."""
    once = '(set -o noclobber && : >"$0.{0}") 2>/dev/null'
    slurm.stand_in("sinfo", f"if {once.format('asked')}; then echo {unknown}; fi")
    refuse = 'echo "srun: error: refused" >&2; exit "$SLURM_EXIT_ERROR"'
    slurm.stand_in(
        "srun",
        f'if [[ "$*" == *--check* ]] && {once.format("asked")}; then {refuse}; fi\n{srun()}',
    )
    done = slurm.run("./run.sub")
    assert (done.returncode == 0) == bool(unknown), done.stderr
    if not unknown:
        assert last_line(done.stderr).endswith("cannot run: refused")


def test_a_node_that_slurm_took_from_the_job_is_lost_even_if_it_is_back(slurm):
    """No step waits for it, and the run goes on without it."""
    taken = '$(test -e "$FAKE_CALLS.taken" || echo ,node1)'
    shown = f"*'show job'*) echo \"JobId=7 BatchHost=node0 NodeList=node0{taken} \" ;;\n  *) exit 1"
    scontrol = SCONTROL.replace("*) exit 1", shown).replace(
        "echo node0 ;;", 'tr , "\\n" <<<"$3" ;;'
    )
    slurm.stand_in("scontrol", scontrol)
    slurm.stand_in("sbatch", "")
    path = slurm.root / "launch" / "slurm" / "step.sh"
    path.write_text(path.read_text().replace("TRY=20", "TRY=1"))
    busy = 'if [[ "$*" == *" --ntasks=2 "*--kill-on-bad-exit* ]]; then touch "$FAKE_CALLS.taken"; sleep 2; exit "$SLURM_EXIT_ERROR"; fi'
    slurm.stand_in("srun", f"{busy}\n{srun()}")
    two = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node0,node1"}
    done = slurm.run(
        "./run.sub", after="export DGXNNODES=2 DGXNGPU=1 RUN_NAME=taken", **two
    )
    assert done.returncode == 1
    assert any("'requeue'" in call for call in slurm.calls("scontrol")), done.stderr
    (noted,) = (slurm.run_dir / "restarts.txt").read_text().splitlines()
    assert noted.endswith("without node1: lost by Slurm; the trial is repeated")


def test_a_node_that_srun_gave_up_is_left_out_by_the_output_of_this_attempt_alone(
    slurm,
):
    """Slurm misses no node. The second attempt's ranks are killed in silence."""
    shown = "*'show job'*) echo \"NodeList=node0,node1,node2 \" ;;\n  *) exit 1"
    scontrol = SCONTROL.replace("*) exit 1", shown)
    slurm.stand_in(
        "scontrol", scontrol.replace("echo node0 ;;", 'tr , "\\n" <<<"$3" ;;')
    )
    says = 'set -o noclobber && : >"$FAKE_CALLS.said" && echo "srun: error: Aborting, io error and missing step on node 1"'
    killed = f'if [[ "$*" == *--kill-on-bad-exit* ]]; then ({says}); exit 137; fi'
    slurm.stand_in("srun", f"{killed}\n{srun()}")
    three = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node0,node1,node2"}
    after = "export DGXNNODES=2 DGXNGPU=1 SPARE_NODES=1 RUN_NAME=aborted"
    done = slurm.run("./run.sub", after=after, **three)
    assert done.returncode == 1
    (noted,) = (slurm.run_dir / "restarts.txt").read_text().splitlines()
    assert noted.endswith("without node1: lost by srun; the trial is repeated")
    assert "restarts on node0 node2" in done.stderr


def test_ranks_whose_launcher_does_not_end_after_a_failure_are_ended(slurm):
    path = slurm.root / "launch" / "run" / "ranks.sh"
    path.write_text(path.read_text().replace("OUTLIVE=90", "OUTLIVE=1"))
    stays = """[[ "$*" != *--kill-on-bad-exit* ]] || trap 'sleep 600' EXIT"""
    slurm.stand_in("srun", f"{stays}\n{srun()}")
    done = slurm.run("./run.sub", TRIAL_0="crash:0")
    assert done.returncode == 1
    assert last_line(done.stderr).endswith("trial 0: the loss is nan at step 3")


def srun() -> str:
    return (Path(__file__).parent / "fakes" / "srun.sh").read_text()


def test_an_image_without_pyxis_ends_the_job_with_the_alternatives(pyxis):
    done = pyxis.run("./run.sub", SRUN_HELP="  --overlap")
    assert done.returncode == 2
    refused = (
        "run: error: CONTAINER_RUNTIME=pyxis: srun has no option --container-image: "
    )
    assert last_line(done.stderr).startswith(refused)
    for way in ("pyxis 0.11", "CONTAINER_RUNTIME=apptainer", "CONT=''"):
        assert way in last_line(done.stderr)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("bert.sif", "an Apptainer image: set CONTAINER_RUNTIME=apptainer"),
        ("dockerd://mlperf-bert", "only this node has it: enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert"),
    ],
)  # fmt: skip
def test_images_that_pyxis_cannot_use_are_refused_with_the_fix(pyxis, image, reason):
    done = pyxis.run("./run.sub", CONT=image)
    assert done.returncode == 2
    assert reason in last_line(done.stderr)


def test_a_path_that_mount_lists_cannot_express_is_refused(pyxis):
    done = pyxis.run("./run.sub", DATADIR="/data/with,comma")
    assert done.returncode == 2
    assert (
        "a path that is mounted in a container has no space, comma or colon"
        in last_line(done.stderr)
    )


# Containers are kept where pyxis puts them, not where the user's own variable says.
ENROOT = """[[ ! ${ENROOT_DATA_PATH:-} ]] || { echo "elsewhere"; exit; }
if [[ $1 == list ]]; then printf '%s\\n' ${CONTAINERS:-pyxis_bert_7_0 pyxis_bert_70_0}; fi"""


def removed(checkout) -> list[str]:
    """Each once: the attempt removes its containers, and the guard what is still there."""
    names = [
        call.split("'")[-2] for call in checkout.calls("enroot") if call != "'list'"
    ]
    return list(dict.fromkeys(names))


def test_the_guard_removes_containers_whatever_the_users_enroot_paths(pyxis):
    pyxis.stand_in("enroot", ENROOT)
    pyxis.stand_in("squeue", "printf '7\n70\n'")
    done = pyxis.run(
        "./run.sub", ENROOT_DATA_PATH="/scratch/me", ENROOT_CACHE_PATH="/scratch/me"
    )
    assert done.returncode == 0, done.stderr
    assert removed(pyxis) == ["pyxis_bert_7_0"]


@pytest.mark.parametrize(
    ("known", "gone"),
    [("7 70", ["pyxis_bert_7_0"]), ("", ["pyxis_bert_7_0", "pyxis_7_bert_5_3"])],
)
def test_a_job_first_removes_leftovers_of_dead_jobs_and_of_its_own_earlier_starts(
    pyxis, known, gone
):
    pyxis.stand_in("enroot", ENROOT)
    pyxis.stand_in("squeue", f"[[ '{known}' ]] && printf '%s\\n' 5 {known} || echo 7")
    left = "pyxis_bert_7_0 pyxis_bert_7_1 pyxis_7_bert_5_3 other pyxis_bert_x_0"
    done = pyxis.run("./run.sub", SLURM_RESTART_COUNT="1", CONTAINERS=left)
    assert done.returncode == 0, done.stderr
    assert removed(pyxis) == [*gone, "pyxis_bert_7_1"], (
        "the last is this start's own, at its end"
    )


def test_without_an_answer_of_squeue_no_container_is_removed(pyxis):
    pyxis.stand_in("enroot", ENROOT)
    pyxis.stand_in(
        "squeue",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    done = pyxis.run("./run.sub", CONTAINERS="pyxis_bert_5_0 pyxis_bert_7_0")
    assert done.returncode == 0, done.stderr
    assert removed(pyxis) == ["pyxis_bert_7_0"]


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
def test_a_preflight_that_did_not_run_fails_although_srun_succeeds(
    pyxis, step, message
):
    """As in Slurm 22.05 if a plugin fails on a node: nothing runs, and srun exits with 0."""
    pyxis.stand_in(
        "srun", f'if [[ "$*" == *"{step}"* ]]; then echo "{NOT_STARTED}" >&2; exit 0; fi\n' + srun(),
    )  # fmt: skip
    pyxis.stand_in("ipmitool", "echo Instantaneous power reading: 5 Watts")
    done = pyxis.run(
        "./run.sub", NCCL_TEST="1", CLEAR_CACHES="require", POWER="1", DROP_STATUS="0"
    )
    assert done.returncode in (1, 2), done.stderr
    assert re.search(message, last_line(done.stderr)), done.stderr
    assert not pyxis.ranks()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("slurmstepd: error: pyxis: child 17 failed with error code: 1\n" "slurmstepd: error: pyxis:     [INFO] Extracting squashfs filesystem...\n" "slurmstepd: error: pyxis:     FATAL ERROR: File system corruption detected\n",
         "FATAL ERROR: File system corruption detected"),
        ("slurmstepd: error: pyxis:     [INFO] Querying registry for permission grant\n" "slurmstepd: error: pyxis:     curl: (6) Could not resolve host: registry-1.docker.io\n",
         "curl: (6) Could not resolve host: registry-1.docker.io"),
        ("slurmstepd: error: pyxis: mkdir: No space left on device\n", "mkdir: No space left on device"),
    ],
)  # fmt: skip
def test_the_last_line_says_why_an_image_cannot_be_used(pyxis, said, reason):
    fails = (
        f'if [[ "$*" == *--container-image* ]]; then printf "{said}" >&2; exit 1; fi\n'
    )
    pyxis.stand_in("srun", fails + srun())
    done = pyxis.run("./run.sub")
    assert last_line(done.stderr).endswith(
        f"could not be created on every node: {reason}"
    )


def test_a_requeued_job_names_the_node_that_was_lost(slurm):
    slurm.stand_in("sinfo", "echo node0 'allocated*'; echo node2 down")
    job = "echo 'JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1'"
    errors = ended(slurm, "TERM", job=job, trial="hang")
    assert last_line(errors).startswith(
        "run: error: the job was requeued (node0: down or not responding); "
    )


@pytest.mark.parametrize("rehearsal", ["0", "1"])
def test_a_requeued_job_finds_its_folder(slurm, rehearsal):
    slurm.run("./run.sub", REHEARSAL=rehearsal, TRIAL_0="crash:1")
    first = slurm.run_dir
    slurm.stand_in("date", "echo later")
    slurm.run("./run.sub", REHEARSAL=rehearsal, SLURM_RESTART_COUNT="1")
    assert slurm.run_dir == first


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("answer dgx1\nslurmstepd: error: pyxis:     [ERROR] No space left on device", "dgx2: [ERROR] No space"),
        ("slurmstepd: error: pyxis: [ERROR] no\nsrun: error: dgx2: task 1: Exited with exit code 1",
         "dgx2: [ERROR] no"),
    ],
)  # fmt: skip
def test_an_error_of_pyxis_keeps_the_name_of_its_node(repository, said, reason):
    parts = "source launch/load.sh run/python run/answers container/runtimes/pyxis"
    names = "nodes=(dgx1 dgx2); export DGXNNODES=2"
    line = f'{parts}; {names}; answers::why "$1" "${{pyxis_causes[@]}}"'
    done = captured(["bash", "-c", line, "-", said], cwd=repository, check=True)
    assert done.stdout.startswith(reason)


@pytest.mark.parametrize(
    ("job", "signal", "why"),
    [
        ("JobState=COMPLETING Reason=TimeLimit Dependency=(null) TimeLimit=00:10:00", "TERM",
         "reached its time limit of 00:10:00"),
        ("JobState=RUNNING Reason=None Dependency=(null) TimeLimit=00:10:00", "USR1",
         "reached its time limit of 00:10:00"),
        ("JobState=CANCELLED Reason=None", "TERM", "was cancelled"),
        ("JobState=COMPLETING Reason=None Requeue=1 Restarts=1", "TERM", "was requeued"),
        ("JobState=PREEMPTED Reason=None", "TERM", "was preempted"),
    ],
)  # fmt: skip
def test_a_job_that_slurm_ends_says_why_on_its_last_line_and_in_the_trials_error(
    slurm, job, signal, why
):
    errors = ended(slurm, signal, job=f"echo 'JobId=7 {job}'", trial="hang")
    assert last_line(errors).startswith("run: error: the job ")
    assert why in last_line(errors)
    assert why in (slurm.run_dir / "error_0.txt").read_text()


def test_the_last_line_waits_for_the_ranks_when_slurms_signal_reaches_their_shell_first(
    slurm,
):
    errors = ended(
        slurm, "TERM", job="echo 'JobId=7 x JobState=CANCELLED'", trial="saves", first=signal_the_ranks_shell,
    )  # fmt: skip
    assert last_line(errors).startswith("run: error: the job was cancelled; ")
    assert (slurm.run_dir / "saved").exists()


def test_neither_a_silent_controller_nor_a_hung_rank_delays_the_last_line_until_slurm_kills_the_job(
    slurm,
):
    busy = f"[[ ! -e '{slurm.logdir}/ended/running_0' ]] || exec sleep 300"
    errors = ended(slurm, "TERM", job=busy, trial="deaf", kill_wait=3)
    assert last_line(errors) == (
        "run: error: interrupted by SIGTERM (Slurm's controller did not say why); "
        "RUN_NAME=ended continues with the missing trials"
    )
    # the watcher of the ranks checks once a second whether it is still needed
    wait_until(
        lambda: (subprocess.run(["pgrep", "-f", str(slurm.root)], stdout=subprocess.DEVNULL, check=False).returncode),
    )  # fmt: skip


def test_before_the_time_limit_the_ranks_may_save_for_longer_than_killwait(slurm):
    now = datetime.datetime.now()
    end = now + datetime.timedelta(seconds=120)
    job = f"echo 'JobId=7 StartTime={now:%FT%T} EndTime={end:%FT%T}'"
    errors = ended(slurm, "USR1", job=job, trial="saves", kill_wait=3)
    assert last_line(errors).startswith("run: error: the job reached its time limit; ")
    assert (slurm.run_dir / "saved").exists()
    assert slurm.calls("srun_got") == ["USR1"], (
        "at SIGTERM srun would end the step by itself"
    )


def test_a_lost_node_is_excluded_also_if_slurm_kills_the_other_ranks(slurm):
    slurm.stand_in(
        "scontrol", SCONTROL.replace("*) exit 1", "'requeue 7') ;;\n  *) exit 1")
    )
    slurm.stand_in("sinfo", "echo node0 down")
    slurm.stand_in("sbatch", "")
    slurm.stand_in(
        "srun", 'if [[ "$*" == *--kill-on-bad-exit* ]]; then exit 137; fi\n' + srun()
    )
    process = slurm.popen("./run.sub", after="export RUN_NAME=lost")
    wait_until(lambda: "'requeue' '7'" in slurm.calls("scontrol"))
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert last_line(errors) == (
        "run: warning: job 7 is requeued, without node0: lost by Slurm; the trial is repeated"
    )


@pytest.mark.parametrize(
    ("states", "updates"),
    [
        ("RUNNING COMPLETING PENDING", 3),
        ("COMPLETING GONE", 2),
        ("RUNNING RESTARTED", 2),
    ],
)
def test_nodes_are_excluded_once_the_job_is_pending_or_not_at_all(
    slurm, states, updates
):
    turns = slurm.root / "turns"
    state = f'states=({states}); turn=$(cat "{turns}" 2>/dev/null || echo 0); state=${{states[turn]}}\n'
    shown = 'echo "JobId=7 JobState=$state Restarts=0 X=1"'
    slurm.stand_in(
        "scontrol",
        state
        + f"""if [[ $1 == update ]]; then [[ $state == PENDING ]] && exit; exit 1; fi
echo $((turn + 1)) >"{turns}"
case $state in GONE) exit 1 ;; RESTARTED) echo "JobId=7 JobState=RUNNING Restarts=1 X=1" ;; *) {shown} ;; esac""",
    )
    slurm.stand_in("sleep", "")
    command = ["launch/slurm/exclude.sh", "7", "0", "node1,node2", "2-3"]
    done = captured(command, cwd=slurm.root, env=slurm.env)
    assert (done.returncode == 0) == ("PENDING" in states), done.stderr
    asked = [call for call in slurm.calls("scontrol") if "update" in call]
    assert len(asked) == updates
    assert "ExcNodeList=node1,node2" in asked[-1]


@pytest.mark.parametrize("resume", ["1", "0"])
def test_ranks_that_are_killed_without_a_record_are_started_once_more(slurm, resume):
    """srun aborts a step whose connection is reset, and kills what would leave a record."""
    killed = slurm.root / "killed"
    first = f'[[ "$*" == *--kill-on-bad-exit* && ! -e "{killed}" ]]'
    slurm.stand_in(
        "srun", f'if {first}; then touch "{killed}"; exit 137; fi\n' + srun()
    )
    done = slurm.run(
        "./run.sub", CHECKPOINT_DIR=str(slurm.root / "saved"), RESUME=resume, NEXP="1"
    )
    assert done.returncode == (0 if resume == "1" else 1), done.stderr
    assert ("the ranks were killed (SIGKILL); " in done.stderr) == (resume == "1")


def test_a_node_on_which_no_step_starts_is_left_out_if_there_is_a_spare(slurm):
    slurm.stand_in(
        "scontrol", SCONTROL.replace("echo node0 ;;", "printf 'node0\\nnode1\\n' ;;")
    )
    busy = 'echo "srun: error: Unable to create step: Requested nodes are busy" >&2; exit 1'
    slurm.stand_in(
        "srun", f'if [[ "$*" == *--nodes=2* || "$*" == *--exclude=node1* ]]; then {busy}; fi\n' + srun(),
    )  # fmt: skip
    done = slurm.run(
        "./run.sub", SLURM_JOB_NUM_NODES="2", SPARE_NODES="1", RUN_NAME="spare"
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"run: warning: without node0: .* does not start: Unable to", done.stderr
    )
    training = [call for call in slurm.calls("srun") if "--kill-on-bad-exit" in call]
    assert len(training) == 1
    assert "'--exclude=node0'" in training[0]


def test_a_node_that_the_all_reduce_test_misses_is_left_out_if_there_is_a_spare(slurm):
    slurm.stand_in(
        "scontrol", SCONTROL.replace("echo node0 ;;", "printf 'node0\\nnode1\\n' ;;")
    )
    done = slurm.run(
        "./run.sub", SLURM_JOB_NUM_NODES="2", SPARE_NODES="1", NCCL_TEST="1", ALLREDUCE="missing:1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "restarts on node1, without node0: rank 1 on node0 did not" in done.stderr


def test_the_job_is_signalled_two_minutes_before_its_time_limit(repository):
    assert "#SBATCH --signal=B:USR1@120\n" in (repository / "run.sub").read_text()


def test_a_trial_that_hangs_leaves_the_others_their_time(slurm):
    """Its part of the job's time has passed: in minutes, here in seconds."""
    trial = slurm.root / "launch" / "run" / "trial.sh"
    text = trial.read_text()
    assert "START_MINUTES=5" in text
    assert "60 * trial_minutes" in text
    text = text.replace("START_MINUTES=5", "START_MINUTES=0")
    told = "current=$TRIAL\n"
    text = text.replace(told, f'{told}echo "limit of $TRIAL: $limit" >&2\n')
    trial.write_text(text.replace("60 * trial_minutes", "trial_minutes"))
    settings = {
        "NEXP": "2", "WALLTIME_RUNANDTIME": "3", "WALLTIME": "5", "TRIAL_0": "hang",
    }  # fmt: skip
    exports = " ".join(f"{name}={value}" for name, value in settings.items())
    done = slurm.run("./run.sub", after=f"export {exports}")
    assert done.returncode == 1
    assert {"limit of 0: 3", "limit of 1: 0"} <= set(done.stderr.splitlines())
    failed = "run: error: 1 of 2 trials failed: trial 0: it did not end in 3 minutes"
    assert last_line(done.stderr).startswith(failed)
    assert [path.name for path in slurm.run_dir.glob("result_*")] == ["result_1.txt"]


@pytest.mark.parametrize("name", ["sub/../../esc", "..", "/tmp/elsewhere", "a//b", "."])
def test_a_name_that_leads_out_of_logdir_is_refused(slurm, name):
    done = slurm.run("./run.sub", RUN_NAME=name)
    assert done.returncode == 2
    assert f"RUN_NAME='{name}'" in last_line(done.stderr)
    assert not slurm.logdir.exists() or not list(slurm.logdir.iterdir())


def test_print_shows_the_job_and_starts_nothing(pyxis):
    """The srun lines are those of a run, but for what only a job knows."""
    pyxis.stand_in(
        "scontrol", "echo NodeName=n1 Gres=gpu:8 ; echo TaskPlugin=task/none"
    )
    data = pyxis.root.parent / "data"
    data.mkdir()
    settings = {"DATADIR_PHASE2_PACKED": str(data), "SBATCH_PARTITION": "a b"}
    outside = {"SLURM_JOB_ID": "", "SLURM_GPUS_ON_NODE": ""}
    after = "export NEXP=2 SPARE_NODES=1 DGXNNODES=2"
    done = pyxis.run(
        "./run.sub --print BATCHSIZE=7", after=after, **settings, **outside
    )
    assert done.returncode == 0, done.stderr
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
