"""The guard of a node, alone: it needs nothing of the job's script, which may be gone."""

import signal
import subprocess

import pytest

from ..waiting import wait_until

# The job is left with these nodes; its script ran on dgx1.
SCONTROL = """case "$*" in
  *'show job'*) echo 'JobId=7 JobState=RUNNING BatchHost=dgx1 NodeList=left' ;;
  *'show hostnames'*) printf '%s\\n' $LEFT ;;
esac"""
CLOCKS = 'case "$*" in *query*) echo 0 ;; esac'


@pytest.fixture
def guard(checkout):
    """guard(**environment): the started guard of node dgx2."""
    checkout.edit("slurm/guard.sh", "INTERVAL=20", "INTERVAL=1")
    checkout.stand_in("scontrol", SCONTROL)
    checkout.stand_in("nvidia-smi", CLOCKS)
    for name in ("sbatch", "scancel"):
        checkout.stand_in(name, "")
    given = {
        "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURMD_NODENAME": "dgx2", "SLURM_JOB_NODELIST": "dgx[1-3]",
        "RUN_NAME": "run", "DGXNNODES": "2", "SPARE_NODES": "0", "GPU_CLOCKS": "1410",
    }  # fmt: skip

    def start(**env):
        line = [checkout.root / "launch" / "slurm" / "guard.sh"]
        return subprocess.Popen(line, env=checkout.env | given | env, cwd=checkout.root)

    return start


def test_a_job_whose_script_is_gone_is_requeued_without_its_node(guard, checkout):
    process = guard(LEFT="dgx2 dgx3")
    wait_until(lambda: "'requeue' '7'" in checkout.calls("scontrol"))
    process.send_signal(signal.SIGTERM)  # as Slurm does
    process.wait(timeout=240)
    (excluded,) = checkout.calls("sbatch")
    assert "'--exclude=dgx1'" in excluded
    assert "\tdgx1\t" in (checkout.logdir / "run" / "restarts.txt").read_text()


def test_only_the_first_node_left_acts_and_a_guard_that_ends_undoes(guard, checkout):
    for left in ("dgx3 dgx2", "dgx1 dgx2"):
        process = guard(LEFT=left)
        wait_until(lambda: len(checkout.calls("scontrol")) >= 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 0
        assert "'--reset-gpu-clocks'" in checkout.calls("nvidia-smi")
        assert "'requeue' '7'" not in checkout.calls("scontrol")
        checkout.calls_file.unlink()
