"""A copy of the launch scripts with stand-ins for the trainer, the review and the checker."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..waiting import free_ports, wait_until
from . import tiny_data
from .captured import Done, captured
from .nodes import missing, require

SOURCED = ("H100_1x8x32x48_1.5b", "H100_4x8x48x1_pack", "A100_1x8x56x1")
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
    script: str = "./run_local.sh"
    size: str = "DGXNGPU=2"  # in place of the config's

    @property
    def calls_file(self) -> Path:
        return self.root.parent / "calls"

    @property
    def logdir(self) -> Path:
        return self.root / self.env["LOGDIR"]

    @property
    def run_dir(self) -> Path:
        """The only run of the test."""
        (folder,) = (one for one in self.logdir.iterdir() if one.name != ".kernels")
        return folder

    def calls(self, program: str) -> list[str]:
        """Arguments with which the stand-ins of ``program`` were called."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        calls = [line.partition(" ") for line in text.splitlines()]
        return [words for name, _, words in calls if name == program]

    def ranks(self) -> list[dict[str, Any]]:
        """Environment recorded by each rank that trained."""
        return [ast.literal_eval(line) for line in self.calls("rank")]

    def command(self, script: str, config: str = CONFIG, after: str = "") -> list[str]:
        """The user's command line: source both files, run ``after``, start the script."""
        sourced = f"set -e; source ./env.sh; source {config}; export {self.size}"
        return ["bash", "-c", f"{sourced}; {after}\nexec {script}"]

    def popen(
        self, script: str = "", *, config: str = CONFIG, after: str = "", **env: str
    ) -> subprocess.Popen[str]:
        line, pipe = self.command(script or self.script, config, after), subprocess.PIPE
        how = {"cwd": self.root, "stdout": pipe, "stderr": pipe, "text": True}
        return subprocess.Popen(line, env=self.env | env, **how)

    def run(self, script: str = "", *, status: int | None = None, **how: str) -> Done:
        """Runs it, to that exit status; None: to any."""
        return self.ended(self.popen(script, **how), status)

    def ended(self, process: subprocess.Popen[str], status: int | None = None) -> Done:
        out, err = process.communicate(timeout=240)
        return Done(process.args, process.returncode, out, err).asked(status)

    def refused(self, reason: str, script: str = "", **how: str) -> Done:
        """It ends in one line with this reason, before anything is written."""
        done = self.run(script, status=2, **how)
        assert done.last_line.startswith("run: error: ")
        assert reason in done.last_line
        assert not self.ranks()
        assert not self.logdir.exists()
        return done

    def failed(self, reason: str, trials: int = 1, **how: str) -> Done:
        """One of so many trials fails, with this reason as the last line."""
        done = self.run(after=f"export NEXP={trials}", status=1, **how)
        expected = f"run: error: 1 of {trials} trials failed: {reason}"
        assert done.last_line.startswith(expected)
        return done

    def started(self, **how: str) -> subprocess.Popen[str]:
        """Its first trial runs, and hangs."""
        given = {"RUN_NAME": "stopped", "TRIAL_0": "hang"} | how
        process = self.popen(**given)
        log = self.logdir / given["RUN_NAME"] / "running_0" / "result_0.txt"
        wait_until(log.exists)
        return process

    def interrupted(self, number: int = signal.SIGTERM, **how: str) -> Done:
        """It gets this signal while its first trial runs."""
        process = self.started(**how)
        process.send_signal(number)
        return self.ended(process)

    def edit(self, name: str, text: str, other: str) -> None:
        """Replaces some text in a file of launch/."""
        path = self.root / "launch" / name
        assert text in path.read_text()
        path.write_text(path.read_text().replace(text, other))

    def before_the_trainer(self, lines: str) -> None:
        """Puts lines before the stand-in for the trainer."""
        trainer = self.root / "implementations" / "bert" / "__main__.py"
        trainer.write_text(lines + trainer.read_text())

    def without_spaces(self) -> Path:
        """Moves it to where containers can mount it; its folder."""
        folder = self.root.parent
        self.root = self.root.rename(folder / "checkout")
        self.env |= {"LOGDIR": str(folder / "results"), "PYTHONPATH": str(self.root)}
        return folder

    def with_containers(self, runtime: str) -> Path:
        """The same, with a runtime of containers that runs commands where they are."""
        program = self.root.parent / "bin" / runtime
        stand_in = f'"$REAL_PYTHON" -S "{FAKES / "container.py"}" {runtime}'
        program.write_text(f'#!/usr/bin/env bash\nexec {stand_in} "$@"\n')
        program.chmod(0o755)
        folder = self.without_spaces()
        self.env["DATADIR"] = str(folder / "data")
        for name in ("packed_data", "eval", "phase1"):
            (folder / "data" / name).mkdir(parents=True)
        return folder

    def recorded(self, program: str) -> list[dict[str, Any]]:
        """Calls of that runtime."""
        return [json.loads(call) for call in self.calls(program)]

    def stand_in(self, name: str, script: str) -> None:
        """Puts a program first on PATH that records its arguments, quoted as by the shell, and runs."""
        path = self.root.parent / "bin" / name
        path.unlink(missing_ok=True)  # a link leads to the real program
        record = f'echo {name} "${{*@Q}}" >>"{self.calls_file}"'
        path.write_text(f"#!/usr/bin/env bash\n{record}\n{script}\n")
        path.chmod(0o755)


def _other_configs(_: str, names: list[str]) -> set[str]:
    """Those that no test sources: copied for each test they would be a fifth of all files."""
    shapes = ("config_DGX", "config_A100", "pretrain_continue_", "pretrain_day_")
    configs = {name for name in names if name.startswith(shapes)}
    return configs - {f"config_DGX{name}.sh" for name in SOURCED}


def copy_scripts(repository: Path, root: Path) -> None:
    """The repository's scripts, with stand-ins for Python."""
    root.mkdir(parents=True)
    for name in ("launch", "configs"):
        shutil.copytree(repository / name, root / name, ignore=_other_configs)
    (root / "implementations/bert").mkdir(parents=True)
    for name in ("implementations/bert/core", "common"):  # which no test changes
        (root / name).symlink_to(repository / name)
    for pattern in ("env.sh", "run.sub", "run_*.sh"):
        for path in repository.glob(pattern):
            shutil.copy(path, root)
    trainers = root / "implementations"
    for trainer in ("bert", "finetune", "certify"):
        (trainers / trainer).mkdir(exist_ok=True)
        shutil.copy(FAKES / "bert.py", trainers / trainer / "__main__.py")
    (trainers / "bert" / "commands").mkdir()
    shutil.copy(FAKES / "allreduce.py", trainers / "bert" / "commands")
    programs = {"review": REVIEW, "mlperf_logging/compliance_checker": COMPLIANCE, "torch": ""}  # fmt: skip
    for package, text in programs.items():
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
        (root / package / "__main__.py").write_text(text)
    logs = [f"logs/{name}.py" for name in ("__init__", "mllog", "output", "tree")]
    for name in ("results/__init__.py", "results/energy.py", *logs):
        (root / "review" / name).parent.mkdir(exist_ok=True)
        shutil.copy(repository / "review" / name, root / "review" / name)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Checkout:
    """The scripts with stand-ins: 2 ranks, 1 trial, results in a new folder."""
    return make_checkout(repository, tmp_path)


def make_checkout(repository: Path, tmp_path: Path) -> Checkout:
    """The same in any folder."""
    root = tmp_path / "a checkout"
    copy_scripts(repository, root)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    text = (FAKES / "python.sh").read_text()
    python.write_text(text.replace("TORCHRUN", str(FAKES / "torchrun.py")))
    python.chmod(0o755)
    # Not a shim that starts thirty programs to find it.
    (python.parent / "python3").symlink_to(os.path.realpath(sys.executable))
    copy = Checkout(root)
    for name in ("sudo", "sync"):
        copy.stand_in(name, "exit 1")
    drop = 'echo drop_caches >>"$FAKE_CALLS"\nexit "${DROP_STATUS:-1}"'
    program = root / "launch" / "node" / "drop_caches.sh"
    program.write_text(f"#!/usr/bin/env bash\n{drop}\n")
    # Of what the node's tools say, one test; they take a tenth of a run's time.
    (root / "launch/node/record.py").write_text("print('node: == lscpu')\n")
    copy.edit("node/power_sampler.py", "INTERVAL = 1 ", "INTERVAL = 0.05 ")
    copy.edit("run/child.sh", "read -rt 1 ", "read -rt 0.2 ")  # of watchers
    copy.env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "REAL_PYTHON": sys.executable,
        "FAKE_CALLS": str(copy.calls_file), "LOGDIR": str(tmp_path / "some results"), "PYTHONPATH": str(root),
        "BINDING": "none",  # a third of the programs that a run starts; one test of each script has the default
    }  # fmt: skip
    return copy


@pytest.fixture(scope="session")
def undisturbed(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkout, Done]:
    """The checkout after a run of two trials here by defaults, and what it printed: not to be changed."""
    checkout = make_checkout(repository, tmp_path_factory.mktemp("undisturbed"))
    del checkout.env["BINDING"]
    checkout.env["LOGDIR"] = "relative"
    return checkout, checkout.run(after="export NEXP=2", status=0)


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
        shown = captured(command, status=0).stdout.split()
        return dict(word.partition("=")[::2] for word in reversed(shown))[name]

    def wait_for(self, what: Callable[[], object]) -> None:
        """Waits until ``what()`` is true."""
        for i in range(3000):
            if what():
                return
            if i % 20 == 19 and self.field("JobState") in OVER[1:3] and not what():
                break
            time.sleep(0.1)
        state = " ".join(self.field(name) for name in ("JobState", "Reason"))
        why = f"is {state}, or did not come so far in five minutes"
        raise AssertionError(f"job {self.number} {why}:\n{self.output}")

    def wait(self) -> Job:
        """Waits until the job has ended and its processes are gone."""
        self.wait_for(lambda: self.field("JobState") in OVER)
        self.wait_for(lambda: self.field("EndTime") != "Unknown")
        return self

    @property
    def exit_code(self) -> int:
        return int(self.field("ExitCode").partition(":")[0])

    def cancel(self, *options: str) -> None:
        subprocess.run(["scancel", *options, str(self.number)], check=True)

    def requeue(self) -> None:
        """It starts again at once; Slurm would hold it for two minutes."""
        subprocess.run(["scontrol", "requeue", str(self.number)], check=True)
        self.start()

    def start(self, when: str = "now") -> None:
        """As an administrator can."""
        self.wait_for(lambda: self.field("JobState") == "PENDING")
        line = ["scontrol", "update", f"JobId={self.number}", f"StartTime={when}"]
        subprocess.run(line, check=True)


@dataclass
class Slurm:
    """The checkout on a cluster of two nodes with 8 typed GPUs each."""

    checkout: Checkout
    folder: Path  # the test's own

    def submit(self, *options: str, **how: str) -> Job:
        """The user's command line: source both files, run ``after``, submit run.sub."""
        output = self.folder / "job.out"
        words = shlex.join(("--parsable", f"--output={output}", *options))
        line = f'sbatch -N "$DGXNNODES" {words} run.sub'
        return Job(int(self.checkout.run(line, status=0, **how).stdout), output)

    def run(self, *options: str, status: int | None = None, **how: str) -> Job:
        """Submits and waits for the end, with that exit status; None: with any."""
        job = self.submit(*options, **how).wait()
        assert status in (None, job.exit_code), job.output
        return job

    def started(self, name: str, *options: str, **how: str) -> Job:
        """Submits a run of that name, and waits until its first trial runs."""
        job = self.submit(*options, RUN_NAME=name, **how)
        log = self.checkout.logdir / name / "running_0" / "result_0.txt"
        job.wait_for(log.exists)
        return job


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """slurm.conf of a running cluster; skips if Slurm cannot be installed."""
    script = Path(__file__).with_name("slurm_cluster.sh")
    if os.geteuid() != 0:
        missing("a Slurm cluster needs root")
    folder = tmp_path_factory.mktemp("slurm")
    # Of the controller and the nodes: other clusters may run here.
    os.environ["SLURM_TEST_PORT"] = str(free_ports(3))
    require(captured([script, "up", folder, "2", "8", "h100"], timeout=None))
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
    """Name of a pretraining config with two phases of 40 and 80 steps of a tiny model."""
    tiny_data.write(tmp_path, {"packed": [(60, True, 3)]})
    text = TINY.format(configs=repository / "configs", data=tmp_path)
    (tmp_path / "pretrain_tiny.sh").write_text(text)
    return tmp_path / "pretrain_tiny"
