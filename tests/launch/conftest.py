"""A copy of the launch scripts with stand-ins for the trainer, the results review and the
compliance checker.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bert.data.format import write_records
from bert.data.records import Metadata
from bert.data.synthetic import synthetic_records

from ..waiting import free_ports
from .nodes import missing, require

FAKES = Path(__file__).resolve().parent / "fakes"
CONFIG = "configs/config_P8000H100_1x8x48x1_pack.sh"

REVIEW = (
    "import os, sys\n"
    "unfit = os.environ.get('UNFIT', 'none')\n"
    "if sys.argv[1] == 'certify' and unfit in open(sys.argv[2] + '/node').read():\n"
    "    print(f'fail: node {unfit}: slow; scontrol update nodename={unfit} state=drain reason=slow')\n"
    "    if '--records' in sys.argv:\n"
    "        with open(sys.argv[sys.argv.index('--records') + 1], 'w') as file:\n"
    "            file.write('\\t'.join(('unfit', '-', unfit, '-', f'fail: node {unfit}: slow')) + '\\n')\n"
    "    sys.exit(1)\n"
    "print('table of' if sys.argv[1] == 'show' else sys.argv[1], *sys.argv[2:])\n"
    "sys.exit(os.environ.get('REVIEW') == 'fails' or sys.argv[1] == os.environ.get('REVIEW_FAILS'))\n"
)
COMPLIANCE = (
    "import os, sys\nprint('checked', sys.argv[-1])\n"
    "sys.exit(os.path.basename(sys.argv[-1]) == os.environ.get('NOT_COMPLIANT'))\n"
)


@dataclass
class Checkout:
    """A copy of the repository's launch scripts in a folder whose name has a space."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def calls_file(self) -> Path:
        return self.root.parent / "calls"

    @property
    def logdir(self) -> Path:
        return Path(self.env["LOGDIR"])

    @property
    def run_dir(self) -> Path:
        """The only run of the test."""
        (folder,) = (
            folder for folder in self.logdir.iterdir() if folder.name != ".kernels"
        )
        return folder

    def calls(self, program: str) -> list[str]:
        """Arguments with which the stand-ins of ``program`` were called."""
        lines = (
            self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        )
        return [
            line.partition(" ")[2]
            for line in lines
            if line.partition(" ")[0] == program
        ]

    def ranks(self) -> list[dict[str, Any]]:
        """Environment recorded by each rank that trained."""
        return [json.loads(line) for line in self.calls("rank")]

    def command(self, script: str, config: str = CONFIG, after: str = "") -> list[str]:
        """The user's command line: source both files, run ``after``, start the script."""
        return [
            "bash", "-c", f"set -e; source ./env.sh; source {config}; export DGXNGPU=2; {after}\nexec {script}",
        ]  # fmt: skip

    def popen(
        self, script: str, *, config: str = CONFIG, after: str = "", **env: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(script, config, after), cwd=self.root, env=self.env | env, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(
        self, script: str, *, config: str = CONFIG, after: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.popen(script, config=config, after=after, **env)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def stand_in(self, name: str, script: str) -> None:
        """Puts a program first on PATH that records its arguments, quoted as by the shell, and
        runs.
        """
        path = self.root.parent / "bin" / name
        path.write_text(
            f'#!/usr/bin/env bash\necho {name} "${{*@Q}}" >>"{self.calls_file}"\n{script}\n'
        )
        path.chmod(0o755)


def copy_scripts(repository: Path, root: Path) -> None:
    """The repository's scripts, with stand-ins for Python."""
    root.mkdir(parents=True)
    for name in ("launch", "configs"):
        shutil.copytree(repository / name, root / name)
    for name in (
        "env.sh",
        "run.sub",
        "run_and_time.sh",
        *(path.name for path in repository.glob("run_*.sh")),
    ):
        shutil.copy(repository / name, root / name)
    for trainer in ("bert", "finetune", "certify"):
        (root / "implementations" / trainer).mkdir(parents=True)
        shutil.copy(
            FAKES / "bert.py", root / "implementations" / trainer / "__main__.py"
        )
    (root / "implementations" / "bert" / "commands").mkdir()
    shutil.copy(
        FAKES / "allreduce.py",
        root / "implementations" / "bert" / "commands" / "allreduce.py",
    )
    shutil.copytree(
        repository / "implementations" / "bert" / "core",
        root / "implementations" / "bert" / "core",
    )
    shutil.copytree(repository / "common", root / "common")
    for package, text in (
        ("review", REVIEW),
        ("mlperf_logging/compliance_checker", COMPLIANCE),
        ("torch", ""),
    ):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
        (root / package / "__main__.py").write_text(text)
    for name in (
        "results/__init__.py",
        "results/energy.py",
        *(f"logs/{n}.py" for n in ("__init__", "mllog", "output", "tree")),
    ):
        (root / "review" / name).parent.mkdir(exist_ok=True)
        shutil.copy(repository / "review" / name, root / "review" / name)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Checkout:
    """The scripts with stand-ins, and an environment in which they run: 2 ranks, 1 trial, results
    in a new folder.
    """
    return make_checkout(repository, tmp_path)


def make_checkout(repository: Path, tmp_path: Path) -> Checkout:
    """The same in any folder."""
    root = tmp_path / "a checkout"
    copy_scripts(repository, root)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    shutil.copy(FAKES / "python.sh", python)
    python.chmod(0o755)
    copy = Checkout(root)
    for name in ("sudo", "sync"):
        copy.stand_in(name, "exit 1")
    (root / "launch" / "node" / "drop_caches.sh").write_text(
        '#!/usr/bin/env bash\necho drop_caches >>"$FAKE_CALLS"\nexit "${DROP_STATUS:-1}"\n'
    )
    sampler = root / "launch" / "node" / "power_sampler.py"
    sampler.write_text(sampler.read_text().replace("INTERVAL = 1 ", "INTERVAL = 0.05 "))
    copy.env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "REAL_PYTHON": sys.executable,
        "FAKE_CALLS": str(copy.calls_file),
        "LOGDIR": str(tmp_path / "some results"),
        "PYTHONPATH": str(root),
        "BINDING": "none",  # a third of the programs that a run starts; one test of each script has the default
    }
    return copy


OVER = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Job:
    """A batch job of the test cluster."""

    number: int
    file: Path

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]

    def field(self, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState."""
        command = ["scontrol", "--oneliner", "show", "job", str(self.number)]
        shown = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=240
        ).stdout
        return next(
            (word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}=")),
        )  # fmt: skip

    def wait_for(self, what: Callable[[], object]) -> None:
        """Waits until ``what()`` is true."""
        for i in range(3000):
            if what():
                return
            if i % 20 == 19 and self.field("JobState") in OVER[1:3] and not what():
                break
            time.sleep(0.1)
        state = " ".join(self.field(name) for name in ("JobState", "Reason"))
        raise AssertionError(
            f"job {self.number} is {state}, or did not come so far in five minutes:\n{self.output}"
        )

    def wait(self) -> Job:
        """Waits until the job has ended and its processes are gone."""
        self.wait_for(
            lambda: (self.field("JobState") in OVER and self.field("EndTime") != "Unknown"),
        )  # fmt: skip
        return self

    @property
    def exit_code(self) -> int:
        return int(self.field("ExitCode").partition(":")[0])


@dataclass
class Slurm:
    """The checkout on a cluster of two nodes with 8 typed GPUs each."""

    checkout: Checkout
    folder: Path  # the test's own

    def submit(
        self, *options: str, after: str = "", config: str = CONFIG, **env: str
    ) -> Job:
        """The user's command line: source both files, run ``after``, submit run.sub."""
        output = self.folder / "job.out"
        words = " ".join(
            shlex.quote(word) for word in ("--parsable", f"--output={output}", *options)
        )
        done = self.checkout.run(
            f'sbatch -N "$DGXNNODES" {words} run.sub', config=config, after=after, **env
        )
        assert done.returncode == 0, done.stderr
        return Job(int(done.stdout), output)

    def run(self, *options: str, **how: str) -> Job:
        """Submits and waits for the end."""
        return self.submit(*options, **how).wait()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """slurm.conf of a running cluster; skips if Slurm cannot be installed."""
    script = Path(__file__).with_name("slurm_cluster.sh")
    if os.geteuid() != 0:
        missing("a Slurm cluster needs root")
    folder = tmp_path_factory.mktemp("slurm")
    os.environ["SLURM_TEST_PORT"] = str(
        free_ports(3)
    )  # of the controller and the nodes: other clusters may run here
    up = subprocess.run(
        [script, "up", folder, "2", "8", "h100"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    require(up)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    yield folder / "slurm.conf"
    subprocess.run([script, "down", folder], check=True)


@pytest.fixture
def slurm(cluster: Path, checkout: Checkout, tmp_path: Path) -> Iterator[Slurm]:
    """The stand-ins as a submission directory of the cluster."""
    checkout.env |= {"SLURM_CONF": str(cluster), "SBATCH_TIMELIMIT": "10"}
    del checkout.env["BINDING"]
    yield Slurm(checkout, tmp_path)
    subprocess.run(["scancel", "--full", "--user", "root"], check=False)


TINY = """#!/usr/bin/env bash
source {configs}/begin.sh
export DGXNNODES=1 DGXNGPU=1 DEVICE=cpu SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CHECK_COMPLIANCE=0 CLEAR_CACHES=0
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=3 MAX_SEQ_LENGTH=48 LR=0.02 LR_SCHEDULE=dle WARMUP_PROPORTION=0.2
export MAX_STEPS=$((40 * ${{PHASE:-1}})) CHECKPOINT_EVERY_STEPS=2 CHECKPOINT_KEEP=99 SEED=7
export DATADIR_PHASE2_PACKED={data}/packed CHECKPOINTDIR_PHASE1={data}/phase1 OMP_NUM_THREADS=1 WALLTIME_RUNANDTIME=5
source {configs}/common.sh
"""


@pytest.fixture
def tiny(repository: Path, tmp_path: Path) -> Path:
    """Name of a pretraining config with two phases of 40 and 80 steps of a tiny model, with its
    data.
    """
    for name in ("packed", "phase1"):
        (tmp_path / name).mkdir()
    metadata = Metadata(
        max_seq_length=48, vocab_md5="0" * 32, random_seed=0, dupe_factor=1
    )
    write_records(
        tmp_path / "packed" / "part_00000_of_00001.hdf5", synthetic_records(60, 48, 211, True, 3), metadata,
    )  # fmt: skip
    shape = '"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40'
    (tmp_path / "phase1" / "bert_config.json").write_text(
        f'{{"vocab_size": 211, {shape}, "max_position_embeddings": 48}}'
    )
    (tmp_path / "pretrain_tiny.sh").write_text(
        TINY.format(configs=repository / "configs", data=tmp_path)
    )
    return tmp_path / "pretrain_tiny"
