"""Both phases as jobs on a real Slurm: cancelled, resubmitted, requeued, and still the same weights."""

import os
import re
import sys

import pytest

from .. import held
from ..bert.states import newest, same
from .captured import captured
from .conftest import Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_a_cancelled_and_requeued_chain_ends_alike(slurm, repository, tiny, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable, "LOGDIR": str(results),
        "MAX_STEPS": "300", "CHECKPOINT_EVERY_STEPS": "5", "NCCL_TEST": "0", "SBATCH_TIMELIMIT": "10",
        "SBATCH_OUTPUT": str(tmp_path / "job-%j.out"), "SLURM_CONF": slurm.checkout.env["SLURM_CONF"],
    }  # fmt: skip

    def run(name, *options, **variables):
        line = ["./run_pretraining.sh", str(tiny), *options]
        how = {"env": environ | variables | {"RUN_NAME": name}, "timeout": 600}
        return captured(line, 0, cwd=repository, **how).stderr

    def chain(moment):
        """Submits the two jobs, of which a trainer stops at a file of that name."""
        site = held.site(tmp_path / f"site_{moment[:6]}", str(folder / moment))
        said = run("chain", "--slurm", PYTHONPATH=str(site))
        numbers = re.search(r"phase 1 is job (\d+), phase 2 job (\d+) after it", said)
        return [Job(int(n), tmp_path / f"job-{n}.out") for n in numbers.groups()]

    folder = results / "chain"
    moment = "phase1/checkpoints/step_*20.pt"
    first, second = chain(moment)
    first.wait_for(lambda: list(folder.glob(moment)))
    first.cancel()
    assert first.wait().field("JobState") == "CANCELLED"
    # Phase 2 does not wait for ever for a phase 1 that is gone.
    assert second.wait().field("JobState") == "CANCELLED"
    assert not (folder / "phase2").exists()

    later = "phase2/checkpoints/step_*20.pt"
    first, second = chain(later)
    second.wait_for(lambda: list(folder.glob(later)))
    assert first.field("JobState") == "COMPLETED", first.output
    second.requeue()
    second.wait()
    assert second.field("JobState") == "COMPLETED", second.output
    assert second.field("Restarts") == "1"

    run("whole")
    for phase in ("phase1", "phase2"):
        whole = newest(results / "whole" / phase / "checkpoints")
        parts = newest(results / "chain" / phase / "checkpoints")
        assert whole["step"] == 300
        assert whole["run"] == parts["run"]
        assert same(whole, parts), phase
