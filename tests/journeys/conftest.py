"""What a user has: a shell in the checkout, an environment, and the other system's files.

A journey types that system's commands, in order, through the real scripts and the real trainer, to
the result that its user expects; it reads like that system's README. One that needs root, packages
or DeepSpeed is marked and run by `make test-journeys`, the others by `make test`.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..launch.conftest import checkout as checkout
from ..launch.conftest import cluster as cluster  # a real Slurm of two nodes
from ..launch.test_multinode import sshd as sshd  # a real ssh server on two addresses

# Stages have workers, which the quick interpreter of `shell` cannot start.
STAGES = f"{sys.executable} -m input_preprocessing"
# So small that a step takes milliseconds; what the user of a real machine leaves out.
SMALL = {
    "SUBMISSION_DIVISION": "open", "DEVICE": "cpu", "DGXNGPU": "2", "BATCHSIZE": "6", "LR": "0.05", "MAX_STEPS": "12",
    "NUM_EVAL_EXAMPLES": "20", "EVAL_ITER_START_SAMPLES": "24", "EVAL_ITER_SAMPLES": "24", "TARGET_MLM_ACCURACY": "0.3",
    "LOG_EVERY_STEPS": "1", "OMP_NUM_THREADS": "1", "CLEAR_CACHES": "0", "NCCL_TEST": "0", "BINDING": "none",
}  # fmt: skip


@dataclass
class Shell:
    """A user's shell: what ``type`` runs starts from the same environment and folder."""

    folder: Path  # the user's own
    checkout: Path
    env: dict[str, str] = field(default_factory=dict)

    def type(self, lines: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Types the lines, of which the last one ends with that exit status."""
        done = subprocess.run(
            ["bash", "-ec", lines], cwd=self.checkout, env=self.env | env, timeout=600,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, f"{lines}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, lines: str, job: str) -> str:
        """Types the lines, then sbatch with ``job``; waits for its end; what it printed."""
        output = self.folder / "job.out"
        sbatch = f"sbatch --parsable --wait --output={output} {job}"
        self.type(f"{lines}\n{sbatch} || (cat {output}; exit 1)")
        return output.read_text()

    def review(self, command: str) -> str:
        """What `python -m review COMMAND` says of the run's folder."""
        # The checker is a process of its own, which a forked one may not start.
        return self.type(f"{sys.executable} -m review {command} {self.results}").stdout

    @property
    def results(self) -> Path:
        """The folder of the only run."""
        (found,) = (path for path in (self.folder / "results").iterdir() if not path.name.startswith("."))  # fmt: skip
        return found

    def log(self, trial: int = 0) -> dict[str, Any]:
        """The last value of each key of the MLPerf log; run_stop's is its status."""
        lines = (self.results / f"result_{trial}.txt").read_text().splitlines()
        events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG")]  # fmt: skip
        values = {event["key"]: event["value"] for event in events}
        return values | {event["key"]: event["metadata"]["status"] for event in events if event["key"] == "run_stop"}  # fmt: skip


def exported(**settings: str) -> str:
    """A line that exports SMALL and these."""
    return "export " + " ".join(f"{name}={value}" for name, value in (SMALL | settings).items())  # fmt: skip


@pytest.fixture
def shell(repository: Path, quick_python: Path, tmp_path: Path) -> Shell:
    """In the checkout, with an interpreter that has PyTorch."""
    environment = {
        "PATH": f"{quick_python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHON": str(quick_python),
        "LOGDIR": str(tmp_path / "results"), "PYTHONPATH": f"{repository / 'implementations'}:{repository}",
    }  # fmt: skip
    return Shell(tmp_path, repository, environment)


@pytest.fixture
def slurm_shell(shell: Shell, cluster: Path) -> Shell:
    """On a login node of a cluster; jobs need an interpreter that lives longer than this shell."""
    shell.env |= {
        "SLURM_CONF": str(cluster), "SBATCH_TIMELIMIT": "10", "PYTHON": sys.executable,
        "PATH": os.environ["PATH"],
    }  # fmt: skip
    return shell


@pytest.fixture
def ssh_shell(shell: Shell, sshd: Any, repository: Path) -> Shell:
    """On the first of two machines, 127.0.0.1 and 127.0.0.2, which reach each other by ssh."""
    copy = shell.folder / "repository"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "results", "demo", "tests")
    shutil.copytree(repository, copy, ignore=ignore)
    # Both addresses are this machine, which is otherwise found out, and refused.
    shutil.copy(sshd.root / "launch/node/identity.sh", copy / "launch/node/identity.sh")
    shell.checkout = copy
    shell.env |= {name: sshd.env[name] for name in ("HOSTS", "SSH_OPTIONS")}
    shell.env |= {"PYTHON": sys.executable, "PYTHONPATH": f"{copy / 'implementations'}:{copy}"}  # fmt: skip
    return shell
