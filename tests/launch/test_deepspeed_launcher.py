"""DeepSpeed's own launcher with a hostfile of two addresses, over a real ssh server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import free_ports, wait_until
from .captured import captured
from .test_multinode import sshd as sshd
from .tiny_data import TO_A_TARGET, write

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(800)]


class Launch:
    """``deepspeed --hostfile F --module bert`` in a separate process group, and its output."""

    def __init__(
        self, folder: Path, environ: dict[str, str], options: list[str]
    ) -> None:
        self.output = folder / "output"
        command = [
            "deepspeed", "--hostfile", str(folder / "hostfile"), *options, "--master_addr", "127.0.0.1",
        ]  # fmt: skip
        command += ["--master_port", str(free_ports())]
        command += ["--module", "bert", "--deepspeed_config", str(folder / "ds.json")]
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        return self.output.read_text()

    def status(self) -> int:
        try:
            return self.process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def launch(sshd, repository, tmp_path):
    """launch(**variables): runs to the target on tiny data, on two addresses of this machine."""
    if not shutil.which("pdsh"):
        pytest.skip("needs pdsh, by which the launcher reaches other machines")
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    write(tmp_path)
    settings = TO_A_TARGET | {
        "BATCHSIZE": "6",
        "PACKED": "1",
        "PACKING_FACTOR": "2",
        "DATADIR_PHASE2_PACKED": str(tmp_path / "packed_data"),
        "EVALDIR": str(tmp_path / "eval"),
        "CHECKPOINTDIR_PHASE1": str(tmp_path / "phase1"),
        "SUBMISSION_DIVISION": "open",
        "RUN_DIR": str(tmp_path / "the run"),
        "SEED": "1",
        "DIST_TIMEOUT": "100",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "PYTHONPATH": f"{repository / 'implementations'}:{repository}", "PDSH_SSH_ARGS_APPEND": sshd.env["SSH_OPTIONS"],
    }  # fmt: skip
    started = []

    def make(**variables):
        listed = captured(
            [sys.executable, "-m", "bert", "deepspeed-config", "--environment"], env=environ | settings | variables,
            check=True, timeout=240,
        )  # fmt: skip
        (tmp_path / ".deepspeed_env").write_text(listed.stdout)
        started.append(Launch(tmp_path, environ, ["--no_ssh_check"]))
        return started[-1]

    yield make
    for one in started:
        one.end()


def rank_of(folder: Path, number: str) -> int | None:
    """Process of that rank of the run in ``folder``, if it has started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (
                (process / "cmdline").read_bytes(),
                (process / "environ").read_bytes().split(b"\0"),
            )
        except OSError:
            continue
        if b"\0-m\0bert\0" in command and {
            f"RANK={number}".encode(),
            f"RUN_DIR={folder}".encode(),
        } <= set(environ):
            return int(process.name)
    return None


def test_a_hostfile_of_two_addresses_trains_on_both_to_the_target(launch, tmp_path):
    run = launch()
    assert run.status() == 0, run.said()
    (stop,) = [
        line
        for line in (tmp_path / "the run" / "result_0.txt").read_text().splitlines()
        if "run_stop" in line
    ]
    assert '"status": "success"' in stop, run.said()
    described = json.loads((tmp_path / "the run" / "config.json").read_text())
    assert described["dist"]["world_size"] == 2
    assert described["zero"]["engine"] == "deepspeed"


def test_a_rank_killed_on_another_machine_is_in_the_launchers_exit_status(
    launch, tmp_path
):
    run = launch(MAX_STEPS="1000000", LOG_EVERY_STEPS="10", TARGET_MLM_ACCURACY="0.99")
    wait_until(lambda: "  norm " in run.said() or run.process.poll() is not None)
    number = rank_of(tmp_path / "the run", "1")
    assert number is not None, run.said()
    os.kill(number, signal.SIGKILL)
    assert run.status() != 0
    assert (
        '"key": "run_stop"' not in (tmp_path / "the run" / "result_0.txt").read_text()
    )
