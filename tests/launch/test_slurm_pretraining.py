"""Both phases as a chain of jobs on a real Slurm: cancelled, resubmitted, requeued, and still the
same weights.
"""

from __future__ import annotations

import os
import re
import sys

import pytest

from .. import held
from ..bert.states import newest, same
from .captured import captured
from .conftest import Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_a_chain_that_is_cancelled_and_requeued_ends_with_the_weights_of_an_undisturbed_run(
    slurm, repository, tiny, tmp_path
):
    results = tmp_path / "results"
    results.mkdir()
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable, "LOGDIR": str(results),
        "MAX_STEPS": "300", "CHECKPOINT_EVERY_STEPS": "5", "NCCL_TEST": "0", "SBATCH_TIMELIMIT": "10",
        "SBATCH_OUTPUT": str(tmp_path / "job-%j.out"), "SLURM_CONF": slurm.checkout.env["SLURM_CONF"],
    }  # fmt: skip

    def run(name, *options, **variables):
        line = ["./run_pretraining.sh", str(tiny), *options]
        done = captured(
            line, cwd=repository, env=environ | variables | {"RUN_NAME": name}, timeout=600,
        status=0)  # fmt: skip
        return done.stderr

    def chain(moment):
        """Submits the two jobs, of which a trainer stops at a file of that name."""
        site = held.site(tmp_path / f"site_{moment[:6]}", str(folder / moment))
        said = run("chain", "--slurm", PYTHONPATH=str(site))
        numbers = re.search(
            r"phase 1 is job (\d+), phase 2 job (\d+) after it", said
        ).groups()
        return [Job(int(number), tmp_path / f"job-{number}.out") for number in numbers]

    folder = results / "chain"
    moment = "phase1/checkpoints/step_*20.pt"
    first, second = chain(moment)
    first.wait_for(lambda: list(folder.glob(moment)))
    first.cancel()
    assert first.wait().field("JobState") == "CANCELLED"
    assert second.wait().field("JobState") == "CANCELLED", (
        "phase 2 does not wait for ever for a phase 1 that is gone"
    )
    assert not (folder / "phase2").exists()

    later = "phase2/checkpoints/step_*20.pt"
    first, second = chain(later)
    second.wait_for(lambda: list(folder.glob(later)))
    assert first.field("JobState") == "COMPLETED", first.output
    second.requeue()
    second.wait()
    assert (second.field("JobState"), second.exit_code) == ("COMPLETED", 0), (
        second.output
    )
    assert second.field("Restarts") == "1"

    run("whole")
    for phase in ("phase1", "phase2"):
        whole, parts = (
            newest(results / name / phase / "checkpoints")
            for name in ("whole", "chain")
        )
        assert whole["step"] == 300
        assert whole["run"] == parts["run"]
        assert same(whole, parts), phase
