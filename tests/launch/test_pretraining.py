"""run_pretraining.sh: phase 1, warm start of phase 2; interrupted, the same command continues."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from ..bert.states import newest, same
from ..waiting import processes_with, wait_until
from .captured import Done, captured
from .test_trial import none_left

CONFIG = "configs/pretrain_large_H100"
COMMAND = f"./run_pretraining.sh {CONFIG}"
NAME = "pretrain_large_H100"


@pytest.fixture
def chain(checkout):
    """The checkout, for a run of both phases of one rank each."""
    checkout.size, checkout.script = "DGXNGPU=1", COMMAND
    return checkout


def pretrain(chain, status: int | None, **how: str) -> Done:
    return chain.run(config=f"{CONFIG}.sh", status=status, **how)


def test_phase_2_follows_phase_1_from_its_checkpoints(chain):
    """The suffix of a name is nodes and GPUs."""
    again = {"script": f"{COMMAND}_1x2", "after": "unset DGXNGPU"}
    pretrain(chain, 0, **again)
    folder = chain.logdir / f"{NAME}_1x2"
    saved = [str(folder / f"phase{n}" / "checkpoints") for n in (1, 2)]
    shown = ("PHASE", "MAX_SEQ_LENGTH", "CHECKPOINT_DIR", "RESUME", "INIT_CHECKPOINT", "INIT_OPTIMIZER", "WORLD_SIZE")  # fmt: skip
    ranks = [[rank[name] or "" for name in shown] for rank in chain.ranks()]
    first = ["1", "128", saved[0], "1", "", "", "2"]
    second = ["2", "512", saved[1], "1", saved[0], "1", "2"]
    assert ranks == [first] * 2 + [second] * 2
    assert (folder / "phase2" / "result_0.txt").is_file()
    pretrain(chain, 0, **again)
    assert len(chain.ranks()) == 4, "both phases were complete: nothing trains again"


CONTINUES = "run: error: phase 1 is not complete: the same command continues it"


def test_a_phase_that_is_not_complete_ends_the_command(chain):
    """One that was asked to stop is not, either."""
    finished = pretrain(chain, 1, TRIAL_0="stopped")
    assert finished.last_line == CONTINUES
    assert "trial 0: stopped at step 7 (STEPS_THIS_RUN)" in finished.stderr
    assert {rank["PHASE"] for rank in chain.ranks()} == {"1"}
    phase = chain.logdir / NAME / "phase1"
    assert (phase / "failed_0.txt").is_file()
    assert not (phase / "result_0.txt").exists()


def test_a_killed_chain_ends_its_phase_which_says_how_to_continue(chain):
    process = chain.popen(config=f"{CONFIG}.sh", TRIAL_0="hang")
    phase = chain.logdir / NAME / "phase1"
    wait_until((phase / "running_0" / "result_0.txt").exists)
    process.kill()
    done = chain.ended(process)
    continued = f"the same ./run_pretraining.sh with RUN_NAME={NAME} continues"
    assert done.last_line == f"run: error: interrupted by SIGTERM; {continued}"
    none_left(chain.root)


def test_a_signal_before_the_phase_has_started_is_not_lost(chain):
    """The signal comes as the script announces the phase."""
    with open(chain.root / "launch" / "run" / "log.sh", "a") as log:
        log.write('\nlog::info() { [[ $* != "phase 1 of "* ]] || kill -TERM "$$"; }\n')
    assert pretrain(chain, 143, TRIAL_0="hang").last_line == CONTINUES


NO_CLUSTER = """echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2
echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1"""
QUEUES = f"{COMMAND} --slurm", "./run_finetuning.sh --slurm squad"


@pytest.mark.parametrize("command", QUEUES)
@pytest.mark.parametrize("cause", ["misspelt", "no cluster"])
def test_without_a_working_slurm_submission_stops_in_one_line(checkout, command, cause):
    checkout.stand_in("sbatch", NO_CLUSTER)
    wrong = {"BATCHSZIE": "3"} if cause == "misspelt" else {}
    finished = checkout.run(command, config="/dev/null", **wrong)
    assert finished.returncode
    other = ("config: ", "run: sweep of")
    lines = finished.stderr.splitlines()
    (said,) = [line for line in lines if not line.startswith(other)]
    expected = "--slurm: no job was submitted: Could not establish"
    if wrong:
        expected = "BATCHSZIE: did you mean BATCHSIZE?"
    assert said.startswith(f"run: error: {expected}")
    queued = bool(checkout.calls("sbatch"))
    assert queued != bool(wrong), "nothing that would fail"


def test_if_the_second_phase_cannot_be_submitted_the_first_is_cancelled(checkout):
    first = "if [[ $PHASE == 1 ]]; then echo 41; exit; fi"
    checkout.stand_in("sbatch", f"{first}; {NO_CLUSTER}")
    checkout.stand_in("scancel", "")
    assert checkout.run(f"{COMMAND} --slurm", config="/dev/null").returncode == 2
    assert checkout.calls("scancel") == ["'41'"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("./run_pretraining.sh", "usage: ./run_pretraining.sh configs/pretrain_NAME [--slurm | --check]"),
        (f"{COMMAND} --fast", "usage: ./run_pretraining.sh configs/pretrain_NAME [--slurm | --check]"),
        ("./run_pretraining.sh configs/none", "configs/none: no such config: ls configs/pretrain_*"),
        (f"{COMMAND}_0x8", f"{CONFIG}_0x8: no such config: ls configs/pretrain_*"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(checkout, command, message):
    finished = checkout.run(command, status=2)
    assert finished.last_line == f"run: error: {message}"
    assert not checkout.logdir.exists() or not list(checkout.logdir.iterdir())


def test_slurm_gets_both_phases_as_a_chain_that_starts_in_the_users_folder(checkout):
    tells = 'echo "chain $PHASE $INIT_OPTIMIZER in $PWD: $*" >>"$FAKE_CALLS"'
    checkout.stand_in("sbatch", f'{tells}; echo "4${{PHASE}}"')
    checkout.script = f'"a checkout/run_pretraining.sh" {CONFIG} --slurm'
    finished = pretrain(checkout, 0, after="cd ..", INIT_OPTIMIZER="")
    where = f"in {checkout.root.parent}: -N 1 --parsable --kill-on-invalid-dep=yes"
    script = f"{checkout.root}/run.sub"
    first = f"1  {where} {script}"
    second = f"2 1 {where} --dependency=afterok:41 {script}"
    assert checkout.calls("chain") == [first, second]
    assert "phase 1 is job 41, phase 2 job 42 after it" in finished.stderr


MOMENTS = [
    "phase1/running_0/result_0.txt",  # before the first step
    "phase1/checkpoints/step_*02.pt",  # in the warm-up, after a checkpoint's rename
    "phase1/checkpoints/.step_*12.pt.partial",  # while it is written
    "phase1/checkpoints/step_*16.pt",
    "phase1/checkpoints/step_*40.pt",  # after the last step
    "phase1/result_0.txt",  # phase 1 is complete
    "phase2/running_0/result_0.txt",  # at the hand-over: phase 2 starts and has no checkpoint yet
    "phase2/checkpoints/.step_*02.pt.partial",  # while its first one is written
    "phase2/checkpoints/step_*50.pt",
    "phase2/checkpoints/step_*80.pt",  # after the last step
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ended_at_ten_moments_it_ends_like_undisturbed(how, repository, tiny, tmp_path):
    """In both phases, between them and at the end: weights, masters and moments bit for bit."""
    results, line = tmp_path / "results", ["./run_pretraining.sh", str(tiny)]
    results.mkdir()
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(results), "PYTHON": sys.executable, "LOGDIR": str(results),
    }  # fmt: skip
    files = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}

    def last_state(name: str, moments: list[str]) -> dict[str, object]:
        """Last checkpoint of a run that is ended at each moment, as soon as such a file exists."""
        folder, own = results / name, environ | {"RUN_NAME": name}
        for pattern in (*moments, ""):
            process = subprocess.Popen(line, cwd=repository, env=own, **files)
            while pattern and process.poll() is None and not any(folder.glob(pattern)):
                time.sleep(0.002)
            assert not pattern or process.poll() is None, f"it ended before {pattern}"
            mine = [process.pid]  # SIGTERM goes to the script, which passes it on
            if how == signal.SIGKILL:
                mine = processes_with(f"LOGDIR={results}")
            for number in mine if pattern else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, how)
            said = process.communicate(timeout=300)[1]
            assert (process.returncode == 0) == (not pattern), said
        return newest(folder / "phase2" / "checkpoints")

    whole = last_state("whole", [])
    assert whole["step"] == 80
    moments = MOMENTS if how == signal.SIGKILL else [MOMENTS[1], MOMENTS[6], MOMENTS[8]]
    assert same(whole, last_state("parts", moments))


@pytest.fixture
def environ(tmp_path, quick_python):
    return {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHON": str(quick_python), "CUDA_VISIBLE_DEVICES": "",
        "LOGDIR": str(tmp_path / "results"), "DATADIR": str(tmp_path),
    }  # fmt: skip


def test_one_phase_ends_and_a_check_trains_nothing(tiny, repository, tmp_path, environ):
    results, line = tmp_path / "results", ["./run_pretraining.sh", str(tiny)]
    given = {"cwd": repository, "env": environ | {"NUM_PHASES": "1"}}
    checked = captured([*line, "--check"], 0, **given)
    said = dict(line.split("  ", 1) for line in checked.stdout.splitlines())
    assert said["time"].strip().startswith("unknown: run a few steps")
    assert "; a text of about " in said["data"]
    assert "tokens trained on" in said["data"]
    assert "epochs: more than the" not in said["data"]
    assert not results.exists()
    done = captured(line, 0, **given)
    assert done.last_line.endswith("/results/pretrain_tiny/phase1/checkpoints")
    assert not (results / "pretrain_tiny" / "phase2").exists()


@pytest.mark.parametrize("name", ["configs/pretrain_demo", "configs/pretrain_demo_1x2"])
def test_a_config_is_found_from_any_folder(name, repository, tmp_path, environ):
    line = [str(repository / "run_pretraining.sh"), name, "--check"]
    checked = captured(line, cwd=tmp_path, env=environ)
    assert "no such config" not in checked.stderr
    missing = f"BERT_CONFIG={tmp_path}/phase1/bert_config.json: No such file"
    assert missing in checked.stderr


def test_a_run_continues_and_no_other_does(tiny, repository, tmp_path, environ):
    """Without RESUME=1, both trials, also one that lost its result after its last checkpoint."""
    environ |= {"NEXP": "2", "EVAL_ITER_SAMPLES": "0", "MAX_STEPS": "8"}
    environ["NCCL_TEST"] = "0"
    line = ["bash", "-c", f"source {tiny}.sh && exec ./run_local.sh"]

    def run(name, folder, status, **more):
        own = {"RUN_NAME": name, "CHECKPOINT_DIR": str(tmp_path / folder)} | more
        return captured(line, status, cwd=repository, env=environ | own)

    def states(folder):
        return {name: newest(tmp_path / folder / name) for name in ("", "trial_1")}

    run("whole", "undisturbed", 0)
    stopped = run("parts", "saved", 1, STEPS_THIS_RUN="4")
    assert "2 of 2 trials failed" in stopped.last_line
    said = run("other", "saved", 2).last_line
    assert "holds step_0000000004.pt of another or an earlier run" in said
    assert not (tmp_path / "results" / "other").exists()
    for _ in range(2):
        run("parts", "saved", 0)
        assert same(states("undisturbed"), states("saved"))
        (tmp_path / "results" / "parts" / "result_1.txt").unlink()
