"""A real Slurm of separate nodes on this machine, by slurm_nodes.sh, as tests use it."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..waiting import free_ports, wait_until
from ..waiting import running as alive
from .captured import captured

SCRIPT = Path(__file__).with_name("slurm_nodes.sh")


def missing(what: str) -> None:
    """A test cannot run here: it skips, but fails where its make target was asked for."""
    if os.environ.get("SLURM_TESTS") == "1":
        pytest.fail(f"this target cannot run here: {what}", pytrace=False)
    pytest.skip(what)


def require(up: subprocess.CompletedProcess[str]) -> None:
    """Did a cluster's script start it? Where Slurm cannot be installed, the test cannot run."""
    if up.returncode and shutil.which("slurmctld") is None:
        missing(f"Slurm cannot be installed here: {up.stderr.strip()[-300:]}")
    assert up.returncode == 0, up.stderr


def pyxis(folder: Path, script: Path) -> Path:
    """Compiles the stand-in for pyxis, which runs this script; a list of Slurm's plugins with it."""
    library, stack = folder / "pyxis.so", folder / "plugstack.conf"
    source = SCRIPT.with_name("fakes") / "pyxis.c"
    line = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
    if subprocess.run(line, check=False).returncode:
        missing("the stand-in for pyxis needs gcc and libslurm-dev")
    stack.write_text(f"required {library} {script}\n")
    return stack


def number(node: str) -> str:
    return re.sub(r"\D", "", node)


@dataclass
class Nodes:
    """Separate machines: namespaces with a slurmd in each, all on one disk."""

    folder: Path
    repository: Path
    environ: dict[str, str]

    @property
    def count(self) -> int:
        return int(self.environ["NODES"])

    def call(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the cluster's script."""
        line = [SCRIPT, command, self.folder, *words]
        return captured(line, env=self.environ, timeout=180)

    def enter(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node; its exit status is not judged."""
        return self.call("enter", number(node), *words)

    def slurm(self, *command: str, limit: float = 60, **settings: str) -> str:
        """Output of a command of Slurm, which has to succeed."""
        how = {"cwd": self.repository, "env": self.environ | settings}
        return captured(command, 0, timeout=limit, **how).stdout

    def controller(self, way: str) -> None:
        """Stops Slurm's controller, or starts it again."""
        if way == "down":  # it saves its state
            number = int((self.folder / "pid" / "controller").read_text())
            os.kill(number, signal.SIGTERM)
            wait_until(lambda: not alive(number))
        else:
            subprocess.run(["slurmctld"], env=self.environ, check=True, timeout=60)

    def state(self, node: int) -> str:
        """State of the node in Slurm."""
        shown = self.slurm("sinfo", "--noheader", f"--nodes=node{node}", "--format=%T")
        return shown.strip()

    def names(self, words: str) -> list[str]:
        """Expands Slurm's notation node[1,3-4]."""
        return self.slurm("scontrol", "show", "hostnames", words).split()

    def processes(self, node: str) -> Iterator[Path]:
        """The folders in /proc of a node's processes."""
        own = self.folder / "node" / number(node) / "first"
        space = os.readlink(f"/proc/{own.read_text().strip()}/ns/pid")
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == space:
                    yield folder

    def bring_back(self) -> None:
        """Starts the nodes that earlier tests have lost."""
        every = range(1, self.count + 1)
        for node in every:
            if self.state(node) != "idle":
                self.call("poweroff", str(node))
                self.call("start", str(node))
        wait_until(lambda: all(self.state(node) == "idle" for node in every))


@contextmanager
def running(repository: Path, folder: Path, count: int, **settings: str) -> Iterator[Nodes]:  # fmt: skip
    """A cluster in this folder, with settings of its script."""
    if os.geteuid() != 0:
        missing("a Slurm of separate nodes needs root")
    known = {"NODES": str(count), "PORT": str(free_ports(2))}  # other clusters may run
    known |= {"SLURM_CONF": str(folder / "slurm.conf")}
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    made = Nodes(folder, repository, kept | known | settings)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = known["SLURM_CONF"]
    try:
        require(made.call("up"))
        yield made
    finally:
        made.call("down")
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before
