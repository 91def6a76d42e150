"""A copy of the launch scripts with stand-ins for the trainer, the results review and the compliance checker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FAKES = Path(__file__).resolve().parent / "fakes"
CONFIG = "configs/config_P8000H100_1x8x48x1_pack.sh"

REVIEW = "import sys\nprint('table of', sys.argv[2])\nsys.exit(__import__('os').environ.get('REVIEW') == 'fails')\n"
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
        (folder,) = self.logdir.iterdir()
        return folder

    def calls(self, program: str) -> list[str]:
        """What the stand-ins of ``program`` were called with."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == program]

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank that trained saw of its environment."""
        return [json.loads(line) for line in self.calls("rank")]

    def command(self, script: str, config: str = CONFIG, after: str = "") -> list[str]:
        """The user's line: source both files, change what ``after`` says, start the script."""
        return ["bash", "-c", f"set -e; source ./env.sh; source {config}; export DGXNGPU=2; {after}\nexec {script}"]

    def popen(self, script: str, *, config: str = CONFIG, after: str = "", **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(script, config, after),
            cwd=self.root,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, script: str, *, config: str = CONFIG, after: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.popen(script, config=config, after=after, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def stand_in(self, name: str, script: str) -> None:
        """Puts a program first on PATH that records its arguments, one word quoted as the shell would, and runs."""
        path = self.root.parent / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho {name} "${{*@Q}}" >>"{self.calls_file}"\n{script}\n')
        path.chmod(0o755)


def copy_scripts(repository: Path, root: Path) -> None:
    """The scripts of the repository, and stand-ins where they call Python."""
    root.mkdir(parents=True)
    for name in ("launch", "configs"):
        shutil.copytree(repository / name, root / name)
    for name in ("env.sh", "run.sub", "run_and_time.sh", *(path.name for path in repository.glob("run_*.sh"))):
        shutil.copy(repository / name, root / name)
    (root / "implementations" / "bert").mkdir(parents=True)
    shutil.copy(FAKES / "bert.py", root / "implementations" / "bert" / "__main__.py")
    for package, text in (("review", REVIEW), ("mlperf_logging/compliance_checker", COMPLIANCE), ("torch", "")):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
        (root / package / "__main__.py").write_text(text)


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Checkout:
    """The scripts with stand-ins, and an environment in which they run: 2 ranks, 1 trial, results in a new folder."""
    root = tmp_path / "a checkout"
    copy_scripts(repository, root)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    shutil.copy(FAKES / "python.sh", python)
    python.chmod(0o755)
    copy = Checkout(root)
    for name in ("sudo", "sync"):
        copy.stand_in(name, "exit 1")
    (root / "launch" / "drop_caches.sh").write_text(
        '#!/usr/bin/env bash\necho drop_caches >>"$FAKE_CALLS"\nexit "${DROP_STATUS:-1}"\n'
    )
    copy.env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "REAL_PYTHON": sys.executable,
        "FAKE_CALLS": str(copy.calls_file),
        "LOGDIR": str(tmp_path / "some results"),
        "PYTHONPATH": str(root),
    }
    return copy
