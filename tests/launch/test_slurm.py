"""``sbatch run.sub`` on a real Slurm: the job's exit code and the last line of its output tell what came of it."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.slurm

TWO_NODES = "export DGXNNODES=2 DGXNGPU=2"


def test_trials_run_on_every_node_with_one_task_a_gpu(slurm):
    job = slurm.run(after=f"{TWO_NODES} NEXP=2")
    assert job.exit_code == 0, job.output
    assert job.last_line == f"run: all 2 trials reached the target: {slurm.checkout.run_dir}"
    ranks = slurm.checkout.ranks()
    assert sorted((rank["TRIAL"], rank["RANK"], rank["LOCAL_RANK"], rank["SLURMD_NODENAME"]) for rank in ranks) == [
        (trial, str(number), str(number % 2), f"dgx{1 + number // 2}") for trial in "01" for number in range(4)
    ]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"127.0.0.1"}
    assert len({(rank["TRIAL"], rank["MASTER_PORT"]) for rank in ranks}) == 2, "one port a trial"
    assert {len(rank["CUDA_VISIBLE_DEVICES"].split(",")) for rank in ranks} == {2}
    assert slurm.checkout.calls("drop_caches") == [""] * 4
    assert os.path.basename(slurm.checkout.run_dir).endswith(f"_{job.number}")
