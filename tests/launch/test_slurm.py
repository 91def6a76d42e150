"""``sbatch run.sub`` on a real Slurm: its exit code and its output's last line give the result."""

import ctypes
import os
import signal

import pytest

from ..waiting import wait_until
from .captured import captured
from .test_trial import none_left

pytestmark = pytest.mark.slurm

TWO_NODES = "export DGXNNODES=2 DGXNGPU=2"


def test_trials_run_on_every_node_with_one_task_a_gpu(slurm):
    job = slurm.run(after=f"{TWO_NODES} NEXP=2", status=0)
    expected = f"run: all 2 trials reached the target: {slurm.checkout.run_dir}"
    assert job.last_line == expected
    ranks = slurm.checkout.ranks()
    shown = ("TRIAL", "RANK", "LOCAL_RANK", "SLURMD_NODENAME")
    of_trial = [(str(n), str(n % 2), f"dgx{1 + n // 2}") for n in range(4)]
    expected = [(trial, *place) for trial in "01" for place in of_trial]
    assert sorted(tuple(rank[name] for name in shown) for rank in ranks) == expected
    worlds = {(rank["WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks}
    assert worlds == {("4", "127.0.0.1")}
    ports = {(rank["TRIAL"], rank["MASTER_PORT"]) for rank in ranks}
    assert len(ports) == 2, "one a trial"
    assert {len(rank["CUDA_VISIBLE_DEVICES"].split(",")) for rank in ranks} == {2}
    assert slurm.checkout.calls("drop_caches") == [""] * 4
    assert os.path.basename(slurm.checkout.run_dir).endswith(f"_{job.number}")


FAILURES = {
    "kill:3": "rank 3 on dgx2 was killed by SIGKILL",
    "not-reached": "the target accuracy 0.72 was not reached",
    "crash:2": "the loss is nan at step 3",
    "exit:2": "rank 2 on dgx2 ended with exit status 7, see output_3.txt",
}


def test_trials_that_fail_fail_the_job_with_their_reasons_last(slurm):
    outcomes = {f"TRIAL_{number}": how for number, how in enumerate(FAILURES)}
    job = slurm.run(after=f"{TWO_NODES} NEXP=5", status=1, **outcomes)
    reasons = enumerate(FAILURES.values())
    said = "; ".join(f"trial {number}: {reason}" for number, reason in reasons)
    assert job.last_line == f"run: error: 4 of 5 trials failed: {said}"
    folder = slurm.checkout.run_dir
    assert (folder / "failed_0.txt").exists()
    assert (folder / "result_4.txt").exists(), "the other trials are independent"


NO_GPUS = "this job has no GPUs: sbatch --gres=gpu:2 run.sub (or export SBATCH_GRES); on CPUs, DEVICE=cpu"
FEW_GPUS = "this job has 1 GPUs a node and the config wants DGXNGPU=2: sbatch --exclusive, or another config"


@pytest.mark.parametrize(
    ("options", "after", "said"),
    [
        ([], f"{TWO_NODES} CHECK=bad", "this configuration cannot run: LR='fast': expected a number"),
        (["-N1"], TWO_NODES, "this job has 1 nodes and the config wants 2: sbatch -N 2 run.sub"),
        ([], "export LOGDIR=file/results", "cannot write there; choose a folder you can write to"),
        ([], "export GPU_GRES=gpu:b200", "--gres=gpu:b200:2 does not start: Unable to create step"),
        (["--gres=none"], "", NO_GPUS),
        (["--gres=gpu:1"], "", FEW_GPUS),
    ],
)  # fmt: skip
def test_a_job_that_cannot_run_says_so_in_one_line(slurm, options, after, said):
    """And does not train on CPUs."""
    root = slurm.checkout.root
    (root / "file").touch()
    if options != ["-N1"] and options:
        script = root / "run.sub"
        text = script.read_text().replace("#SBATCH --exclusive\n", "")
        script.write_text(text)
    job = slurm.run(*options, after=after, status=2)
    assert job.last_line.startswith("run: error: ")
    assert said in job.last_line
    assert not slurm.checkout.logdir.exists()


def test_scancel_ends_every_rank_and_says_how_to_continue(slurm):
    job = slurm.started("stopped", after=TWO_NODES, TRIAL_0="hang")
    job.cancel()
    job.wait()
    assert job.field("JobState") == "CANCELLED"
    why = "the job was cancelled or ended by Slurm"
    continues = "RUN_NAME=stopped continues with the missing trials"
    assert job.last_line == f"run: error: {why}; {continues}"
    assert (slurm.checkout.run_dir / "error_0.txt").read_text() == f"{why}\n"
    assert (slurm.checkout.run_dir / "failed_0.txt").exists()
    assert not list(slurm.checkout.run_dir.glob("running_*"))
    # Watchers of processes look once a second whether they are still needed.
    none_left(slurm.checkout.root)


FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"  # Debian's faketime


@pytest.mark.parametrize("clock", ["", "+1h", "-1h"])
def test_ranks_are_signalled_before_the_time_limit_and_save(slurm, clock):
    """Also where the clock of the nodes is not the controller's."""
    if clock and not os.path.exists(FAKETIME):
        pytest.skip("faketime is not installed")
    wrong = {"LD_PRELOAD": FAKETIME, "FAKETIME": clock} if clock else {}
    job = slurm.started("stopped", after=TWO_NODES, TRIAL_0="saves", **wrong)
    job.cancel("--batch", "--signal=USR1")
    job.wait()
    why = "the job reached its time limit of 00:10:00"
    assert job.last_line.startswith(f"run: error: {why}; "), job.output
    assert "User defined signal" not in job.output
    assert (slurm.checkout.run_dir / "saved").exists()


def test_a_controller_that_does_not_answer_is_not_waited_for(slurm, cluster):
    job = slurm.started("stopped", after=TWO_NODES, TRIAL_0="hang")
    controller = int((cluster.parent / "pid" / "controller").read_text())
    # Other clusters may run here.
    its_own = f"{cluster.parent}/.*/job0*{job.number}/slurm_script"
    script = captured(["pgrep", "-o", "-f", its_own], check=True)
    os.kill(controller, signal.SIGSTOP)
    try:
        os.kill(int(script.stdout), signal.SIGTERM)
        wait_until(lambda: "run: error" in job.output, 120)
        why = "interrupted by SIGTERM (Slurm's controller did not say why)"
        assert f"run: error: {why}" in job.last_line
    finally:
        os.kill(controller, signal.SIGCONT)
    job.wait()


def test_a_requeued_job_continues_with_the_missing_trials(slurm):
    job = slurm.submit(after=f"{TWO_NODES} NEXP=2", TRIAL_1="hang")
    job.wait_for(lambda: list(slurm.checkout.logdir.glob("*/running_1/result_1.txt")))
    kept = (slurm.checkout.run_dir / "result_0.txt").stat().st_mtime_ns
    job.requeue()
    assert job.wait().exit_code == 0, job.output
    expected = f"run: all 2 trials reached the target: {slurm.checkout.run_dir}"
    assert job.last_line == expected
    assert (slurm.checkout.run_dir / "result_0.txt").stat().st_mtime_ns == kept
    assert [rank["TRIAL"] for rank in slurm.checkout.ranks()] == ["0"] * 4 + ["1"] * 8


def test_at_the_time_limit_a_run_is_requeued_until_it_makes_no_progress(slurm):
    saved = slurm.folder / "saved"
    given = {"RESUME": "1", "CHECKPOINT_DIR": str(saved), "NCCL_TEST": "0"}
    job = slurm.started("chain", TRIAL_0="saves", **given)
    for start in range(5):
        suffix = f"_{start}" * (start > 0)
        running = slurm.checkout.logdir / "chain" / f"running_0{suffix}"
        job.wait_for((running / "result_0.txt").exists)
        if start == 1:  # the only progress
            (saved / "step_0000000012.pt").touch()
        job.cancel("--batch", "--signal=USR1")
        if start < 4:
            job.wait_for(lambda number=start: int(job.field("Restarts")) > number)
            job.start("now+3")
    job.wait()
    why = "the job reached its time limit of 00:10:00"
    lines = job.output.splitlines()
    told = [line for line in lines if line.startswith("run: warning: ") and why in line]
    requeued = f"run: warning: job {job.number} is requeued, {why}; continues from step"
    assert told == [f"{requeued} {step}" for step in (0, 12, 12, 12)]
    assert job.exit_code == 143
    bound = "gave up: 3 restarts brought no new checkpoint after step 12"
    continues = "RUN_NAME=chain continues with the missing trials"
    assert job.last_line == f"run: error: {bound}; {why}; {continues}"


def test_each_node_gives_the_gpus_that_the_config_requests(slurm):
    slurm.run(after="export DGXNGPU=3 GPU_GRES=gpu:h100", status=0)
    ranks = slurm.checkout.ranks()
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,1,2"}


def pmix() -> str:
    """Slurm lists pmix if it was built with it; whether it works depends on a library."""
    try:
        ctypes.CDLL("libpmix.so")
    except OSError:
        return "none"
    return "pmix"


@pytest.mark.parametrize(
    ("wanted", "used"), [("pmi2", "pmi2"), ("pmix", pmix()), ("pmix_v9", "none")]
)
def test_steps_start_with_the_wanted_mpi_type_if_it_works(slurm, wanted, used):
    job = slurm.run(after=f"{TWO_NODES} SLURM_MPI_TYPE={wanted}", status=0)
    # srun exports no type for none.
    types = {rank["SLURM_MPI_TYPE"] or "none" for rank in slurm.checkout.ranks()}
    assert types == {used}
    assert (f"warning: SLURM_MPI_TYPE={wanted} " in job.output) == (wanted != used)


def test_the_power_of_every_node_is_sampled_beside_the_trial(slurm):
    watts = "echo '    Instantaneous power reading: 512 Watts'"
    slurm.checkout.stand_in("ipmitool", watts)
    job = slurm.run(after=f"{TWO_NODES} POWER=1", TRIAL_0="measured", status=0)
    for node in ("dgx1", "dgx2"):
        assert f"{node}: 512 W (ipmi, " in job.output
    files = (slurm.checkout.run_dir / "power" / "result_0").iterdir()
    assert sorted(path.name for path in files) == ["node_0.txt", "node_1.txt"]


SMI = """case "$*" in
  *query-gpu=index*) printf '0\\n1\\n' ;;
  *lock-gpu-clocks*) echo "$SLURMD_NODENAME locked" >>"$CLOCK_LOG"
    for i in 0 1; do echo "GPU clocks set to (gpuClkMin 1410, gpuClkMax 1410) for GPU 0000000$i"; done ;;
  *reset-gpu-clocks*) echo "$SLURMD_NODENAME reset" >>"$CLOCK_LOG" ;;
esac"""


@pytest.mark.parametrize("ending", ["end", "scancel"])
def test_clocks_and_staged_data_are_undone_also_when_slurm_ends_the_job(slurm, ending):
    slurm.checkout.stand_in("nvidia-smi", SMI)
    clocks = slurm.folder / "clocks"
    for name in ("data/packed_data", "data/eval", "nvme"):
        (slurm.folder / name).mkdir(parents=True)
        (slurm.folder / name / "file").touch()
    slurm.checkout.stand_in("sync", "")
    nvme = slurm.folder / "nvme"
    given = {"GPU_CLOCKS": "1410", "CLOCK_LOG": str(clocks), "STAGE_DIR": str(nvme)}
    given["DATADIR"] = str(slurm.folder / "data")
    if ending == "scancel":
        job = slurm.started("locked", TRIAL_0="hang", **given)
        assert (nvme / f"bert_{job.number}_0" / "EVALDIR" / "file").exists()
        job.cancel()
    else:
        job = slurm.submit(**given)
    job.wait()
    undone = ["dgx1 locked", "dgx1 reset"]
    job.wait_for(lambda: clocks.read_text().splitlines() == undone)
    job.wait_for(lambda: [path.name for path in nvme.iterdir()] == ["file"])
