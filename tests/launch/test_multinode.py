"""run_multinode.sh: several machines over ssh, of HOSTS or of a hostfile in DeepSpeed's format, train
together, and end together whatever happens to one of them.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from ..waiting import free_ports, wait_until
from . import platforms
from .captured import captured
from .test_trial import none_left

ODD = "two  spaces; $(exit 9) 'quoted' \"twice\"\nand a line"
DROP = '#!/bin/sh\n[ "$OF_HOST" != "$STUBBORN" ]\n'


@pytest.fixture
def machines(checkout):
    (checkout.root / "launch" / "node" / "drop_caches.sh").write_text(DROP)
    return platforms.ssh(checkout)


def hostfile(checkout, text: str) -> str:
    path = checkout.root.parent / "hostfile"
    path.write_text(text)
    return str(path)


def test_ranks_of_all_machines_are_one_world(machines):
    """ssh asks for no password, no value is on a command line, and HOSTS wins over a hostfile."""
    del machines.env["BINDING"]
    machines.size = "DGXNGPU=2 DGXNNODES=2"
    given = {"NCCL_TEST": "", "STUBBORN": "none", "SSH_OPTIONS": "-p 2222"}
    given |= {"NCCL_ODD": ODD, "MY_TOKEN": "hidden", "HOSTFILE": hostfile(machines, "dgx7 slots=2\n")}  # fmt: skip
    done = machines.run(after="export NEXP=2 SEED=5", status=0, **given)
    reached = "run: all 2 trials reached the target"
    assert done.last_line == f"{reached}: {machines.run_dir}"
    first = [rank for rank in machines.ranks() if rank["TRIAL"] == "0"]
    assert sorted(rank["RANK"] for rank in first) == ["0", "1", "2", "3"]
    shown = ("WORLD_SIZE", "MASTER_ADDR", "LR", "CACHE_CLEARED")  # LR: this shell's
    found = {tuple(rank[name] for name in shown) for rank in first}
    assert found == {("4", "dgx1", "0.00096", "1")}
    assert {rank["SEED"] for rank in machines.ranks() if rank["TRIAL"] == "1"} == {"6"}
    torchrun = [line for line in machines.calls("torchrun") if "--node-rank 1" in line]
    assert len(torchrun) == 3, "the all-reduce test, by default, and two trials"
    assert all("--nnodes 2" in one and "--nproc-per-node 2" in one for one in torchrun)
    calls = machines.calls("ssh")
    assert all("BatchMode=yes" in call and "'-p' '2222'" in call for call in calls)
    assert not any("NCCL_ODD" in call for call in calls)


def test_values_reach_the_machines_unchanged_and_a_secret_does_not(machines):
    line = f"source launch/run/environment.sh; environment::print | env -i bash -c '{READ}'"
    env = machines.env | {"NCCL_ODD": ODD, "MY_TOKEN": "hidden"}
    done = captured(["bash", "-c", line], 0, cwd=machines.root, env=env)
    assert done.stdout == f"{ODD}|unset"


READ = 'source launch/run/environment.sh; environment::read; printf "%s|%s" "$NCCL_ODD" "${MY_TOKEN-unset}"'


def test_a_connection_that_breaks_ends_the_ranks_of_every_machine(machines):
    reason = "trial 0: dgx2: the ssh connection ended, see output_0.txt"
    machines.failed(reason, TRIAL_0="hang", LOST="dgx2")
    none_left(machines.root)


def test_a_machine_that_does_not_share_the_results_still_says_why_it_failed(machines):
    said = "bad_input\t3\tdgx2\t-\tDATADIR_PHASE2: truncated\n"
    lost = {"LOST": "dgx2", "LOST_STATUS": "1", "SAYS": said}
    reason = "trial 0: DATADIR_PHASE2: truncated"
    machines.failed(reason, trials=5, TRIAL_0="hang", **lost)
    assert {rank["TRIAL"] for rank in machines.ranks()} <= {"0"}, "it ends the loop"


@pytest.mark.parametrize("said", ["killed\t1\tnode2\t7\tby SIGKILL", ""])
def test_a_killed_rank_is_the_cause_whichever_ends_first(repository, tmp_path, said):
    """Rank 0's machine, which alone shares the results, reports a broken connection before."""
    reset = "failed\t0\tnode1\t7\tConnection closed by peer"
    (tmp_path / "status").write_text(f"{reset}\n")
    (tmp_path / "error_0.txt").write_text("Connection closed by peer\n")
    (tmp_path / "reason.0").write_text(f"{reset}\n")
    (tmp_path / "reason.1").write_text(f"{said}\nnccl_0_rank_1\n")
    script = "REPO_DIR=$PWD; source launch/run/python.sh; source launch/ssh/trial.sh; exec 9<<<$'0 1\\n1 137'; "
    script += f"hosts=(node1 node2) RUN_DIR={tmp_path} TRIAL=0; ssh::wait {tmp_path} 9"
    done = subprocess.run(["bash", "-euc", script], cwd=repository, check=False)
    assert done.returncode == 1
    assert (tmp_path / "status").read_text() == f"{said or reset}\n"
    reason = (said or reset).split("\t")[-1]
    assert (tmp_path / "error_0.txt").read_text() == f"{reason}\n"
    assert (tmp_path / "nccl_0_rank_1").exists()


def test_a_machine_reports_the_reason_of_its_rank_and_keeps_nothing(machines, tmp_path):
    folder = tmp_path / "elsewhere" / "run" / "running_0"
    entries = {"RUN_DIR": str(folder), "TRIAL": "0", "DGXNGPU": "1"}
    fail = 'printf "bad_input\\t0\\there\\t-\\tLR: wrong\\n" >"$RUN_DIR/status"; echo output; exit 1'
    process = subprocess.Popen(
        [machines.root / "launch" / "ssh" / "node.sh", "watch", "bash", "-c", fail], env=machines.env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    text = "".join(f"{name}={value}\0" for name, value in entries.items())
    process.stdin.write(text + "\0")
    process.stdin.flush()  # and left open: the machine must end by itself
    assert process.wait(timeout=240) == 1
    assert process.stdout.read() == "bad_input\t0\there\t-\tLR: wrong\n"
    assert "output" in process.stderr.read()
    process.stdin.close()
    assert not (tmp_path / "elsewhere").exists()


TOLD = """import json, os, sys
print(json.dumps(dict(os.environ)), file=sys.stderr)
sys.exit(2)
"""


def test_the_names_of_samsungs_script_are_understood(machines, tmp_path):
    phase1, python = f"{tmp_path}/phase1", f"{tmp_path}/bin/python"
    samsungs = {
        "DGXSYSTEM": "GB200_2x4x48x1_pack", "INPUT_DIR": "/in", "EVAL_DIR": "/eval", "NEXP": "1",
        "CHECKPOINTDIR_PHASE1": phase1, "PYTHON": python,
        "BATCHSIZE": "7",  # wins over the config's, which holds for all else
    }  # fmt: skip
    machines.before_the_trainer(TOLD)
    environ = machines.env | samsungs
    done = captured([machines.script], 2, cwd=machines.root, env=environ)
    lines = done.stderr.splitlines()
    given = json.loads(next(line for line in lines if line.startswith("{")))
    expected = {
        "DATADIR_PHASE2_PACKED": "/in", "EVALDIR": "/eval", "INIT_CHECKPOINT": f"{phase1}/model.ckpt-28252.pt",
        "PYTHON": python, "BATCHSIZE": "7", "LR": "0.00096",
    }  # fmt: skip
    assert expected.items() <= given.items()


def test_a_system_without_a_config_is_named(machines):
    environ = machines.env | {"DGXSYSTEM": "GB300_1x2x3x4"}
    done = captured([machines.script], 2, cwd=machines.root, env=environ)
    assert "DGXSYSTEM=GB300_1x2x3x4: no such config" in done.last_line


def test_containers_of_the_image_run_on_every_machine(machines):
    """And caches count as dropped only when every machine dropped them."""
    machines.with_containers("docker")
    machines.run(CONT="mlperf-bert", STUBBORN="dgx2", status=0)
    calls = machines.recorded("docker")
    ranks = [call for call in calls if "--node-rank" in call.get("command", ())]
    assert len(ranks) == 2
    names = {"LR", "MASTER_ADDR", "TRIAL", "OMP_NUM_THREADS"}
    assert names <= set(ranks[0]["options"]["--env"])
    assert [rank["CACHE_CLEARED"] for rank in machines.ranks()] == ["0"] * 2
    removed = [call for call in calls if call.get("words", [""])[0] == "rm"]
    assert len(removed) == 2, "on both"


def test_the_first_machines_of_a_hostfile_are_called_in_its_order(machines):
    text = "# rank 0 is on the first\n\n  dgx7 slots=1\r\ndgx3   slots=01 # spare\n\tdgx9 slots=08"
    machines.run(HOSTS="", HOSTFILE=hostfile(machines, text), status=0)
    assert {rank["MASTER_ADDR"] for rank in machines.ranks()} == {"dgx7"}
    called = " ".join(machines.calls("ssh"))
    assert "'dgx3'" in called
    assert "dgx9" not in called


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dgx1 slots=2\ndgx2 slots=two\n", "line 2: 'dgx2 slots=two': expected a machine and its GPUs: node1 slots=8"),
        ("dgx1 slots=2\n-oProxyCommand=x slots=2\n", "line 2: '-oProxyCommand=x slots=2': expected a machine"),
        ("dgx1 slots=2\ndgx1 slots=2\n", "line 2: dgx1 is listed twice"),
        ("dgx1 slots=2\n", "1 machines and the config wants DGXNNODES=2"),
        ("dgx1 slots=2\ndgx2 slots=08\n", "dgx2 slots=8 and DGXNGPU=2: they must be equal"),
        ("dgx1 slots=2\ndgx2 slots=4\n", "dgx2 slots=4 and DGXNGPU=2: they must be equal"),
        ("# none\n", "no machine in it"),
    ],
)  # fmt: skip
def test_an_invalid_hostfile_says_what_is_wrong(machines, repository, text, words):
    program = runpy.run_path(str(repository / "launch" / "ssh" / "hosts.py"))
    with pytest.raises(ValueError, match=words):
        program["main"](hostfile(machines, text), "2", "2")


@pytest.mark.parametrize("text", ["# none\n", None])
def test_a_wrong_hostfile_is_one_line_before_a_machine_is_called(machines, text):
    file = hostfile(machines, text) if text else str(machines.root)
    why = "no machine in it" if text else "not a readable file"
    done = machines.refused(f"HOSTFILE={file}: {why}", HOSTS="", HOSTFILE=file)
    assert done.stderr.count("\n") == 1, done.stderr
    assert machines.calls("ssh") == []


@pytest.fixture
def sshd(checkout, tmp_path):
    """The checkout on two addresses of this machine, with a real ssh server on its own port."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if not server or not shutil.which("ssh") or os.getuid() != 0:
        pytest.skip("needs root, ssh and sshd (openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        subprocess.run([*line, tmp_path / name], check=True)
    port = free_ports()
    settings = {
        "Port": port, "HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "user.pub", "StrictModes": "no",
        "PidFile": "none", "UsePAM": "no", "PermitRootLogin": "yes",
    }  # fmt: skip
    text = "".join(f"{name} {value}\n" for name, value in settings.items())
    (tmp_path / "sshd_config").write_text(text)
    with open(tmp_path / "sshd.log", "w") as log:
        line = [server, "-D", "-e", "-f", tmp_path / "sshd_config"]
        process = subprocess.Popen(line, stderr=log)
    wait_until(lambda: "listening" in (tmp_path / "sshd.log").read_text())
    # Post-quantum keys would take a tenth of a second of a core.
    options = "-o KexAlgorithms=curve25519-sha256 -o LogLevel=ERROR"
    options += " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    # Where the stand-ins for packages are: PYTHONPATH does not go along.
    python = tmp_path / "bin" / "python"
    packages = f'export PYTHONPATH="{checkout.root}/implementations:{checkout.root}"'
    python.write_text(python.read_text().replace("set -u", f"{packages}\nset -u", 1))
    identity = checkout.root / "launch" / "node" / "identity.sh"
    identity.write_text("#!/bin/sh\nset -- $SSH_CONNECTION\necho $3\n")
    checkout.script, checkout.size = "./run_multinode.sh", "DGXNGPU=1 DGXNNODES=2"
    checkout.env |= {
        "HOSTS": "127.0.0.1 127.0.0.2", "NCCL_TEST": "0", "PYTHON": str(python),
        "SSH_OPTIONS": f"-p {port} -i {tmp_path / 'user'} {options}",
    }  # fmt: skip
    yield checkout
    process.kill()
    process.wait()


def test_a_real_ssh_server_starts_the_ranks_of_a_hostfile(sshd):
    sshd.size = "DGXNGPU=2 DGXNNODES=2"
    text = "127.0.0.1 slots=2\n127.0.0.2 slots=2\n"
    sshd.run(HOSTS="", HOSTFILE=hostfile(sshd, text), status=0)
    assert sorted(rank["RANK"] for rank in sshd.ranks()) == ["0", "1", "2", "3"]
    assert {rank["MASTER_ADDR"] for rank in sshd.ranks()} == {"127.0.0.1"}


@pytest.fixture
def hanging(sshd):
    """A started run of which both ranks hang."""
    process = sshd.popen(TRIAL_0="hang")
    wait_until(lambda: len(sshd.ranks()) == 2)
    return process


def test_a_real_ssh_server_ends_the_ranks_of_a_killed_script(sshd, hanging):
    hanging.send_signal(signal.SIGTERM)
    sshd.ended(hanging, 143)
    none_left(sshd.root)


def test_a_real_connection_that_breaks_ends_the_ranks_of_both_machines(sshd, hanging):
    client = captured(["pgrep", "-f", "^ssh .* 127.0.0.2 .*watch"], 0)
    for number in client.stdout.split():
        # Another test's, which has ended.
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(sshd.root.parent) in Path(f"/proc/{number}/cmdline").read_text():
                os.kill(int(number), signal.SIGKILL)
    reason = "trial 0: 127.0.0.2: the ranks ended with exit status 137"
    assert reason in sshd.ended(hanging).last_line
    none_left(sshd.root)
