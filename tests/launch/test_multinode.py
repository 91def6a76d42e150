"""run_multinode.sh: several machines over ssh train together, and end together whatever happens to
one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bert.data.format import write_records
from bert.data.records import Metadata
from bert.data.synthetic import synthetic_records

from ..waiting import free_ports, wait_until
from . import platforms
from .captured import captured
from .platforms import SSH
from .test_trial import processes


@pytest.fixture
def machines(checkout):
    return platforms.ssh(checkout)


def test_ranks_of_all_machines_are_one_world(machines):
    del machines.env["BINDING"]
    done = machines.run(after="export NEXP=2 SEED=5", NCCL_TEST="", status=0)
    reached = "run: all 2 trials reached the target"
    assert done.last_line == f"{reached}: {machines.run_dir}"
    first = [rank for rank in machines.ranks() if rank["TRIAL"] == "0"]
    assert sorted(rank["RANK"] for rank in first) == ["0", "1", "2", "3"]
    assert {rank["WORLD_SIZE"] for rank in first} == {"4"}
    assert {rank["MASTER_ADDR"] for rank in first} == {"dgx1"}
    assert {rank["LR"] for rank in first} == {"0.00096"}, "this shell's variables"
    assert {rank["SEED"] for rank in machines.ranks() if rank["TRIAL"] == "1"} == {"6"}
    torchrun = [line for line in machines.calls("torchrun") if "--node-rank 1" in line]
    assert len(torchrun) == 3, "the all-reduce test, by default, and two trials"
    for line in torchrun:
        assert "--nnodes 2" in line
        assert "--nproc-per-node 2" in line


ODD = "two  spaces; $(exit 9) 'quoted' \"twice\"\nand a line"


def test_ssh_asks_for_no_password_and_shows_no_value_on_a_command_line(machines):
    machines.run(SSH_OPTIONS="-p 2222", NCCL_ODD=ODD, MY_TOKEN="hidden", status=0)
    calls = machines.calls("ssh")
    assert calls
    for call in calls:
        assert "BatchMode=yes" in call
        assert "'-p' '2222'" in call
        assert "NCCL_ODD" not in call


def test_values_reach_the_machines_unchanged_and_a_secret_does_not(machines):
    line = f"source launch/run/environment.sh; environment::print | env -i bash -c '{READ}'"
    given = {"cwd": machines.root, "env": machines.env | {"NCCL_ODD": ODD, "MY_TOKEN": "hidden"}}  # fmt: skip
    assert captured(["bash", "-c", line], 0, **given).stdout == f"{ODD}|unset"


READ = 'source launch/run/environment.sh; environment::read; printf "%s|%s" "$NCCL_ODD" "${MY_TOKEN-unset}"'


@pytest.mark.parametrize("culprit", ["1", "3"])
def test_a_rank_that_dies_ends_the_ranks_of_every_machine(machines, culprit):
    reason = f"trial 0: rank {culprit} on {os.uname().nodename} was killed by SIGKILL"
    machines.failed(reason, TRIAL_0=f"kill:{culprit}")
    assert (machines.run_dir / "failed_0.txt").exists()
    wait_until(lambda: not processes(machines.root))


def test_a_connection_that_breaks_ends_the_ranks_of_every_machine(machines):
    reason = "trial 0: dgx2: the ssh connection ended, see output_0.txt"
    machines.failed(reason, TRIAL_0="hang", LOST="dgx2")
    wait_until(lambda: not processes(machines.root))


def test_a_machine_that_does_not_share_the_results_still_reports_why_it_failed(
    machines,
):
    said = "bad_input\t3\tdgx2\t-\tDATADIR_PHASE2: truncated\n"
    lost = {"LOST": "dgx2", "LOST_STATUS": "1", "SAYS": said}
    reason = "trial 0: DATADIR_PHASE2: truncated"
    machines.failed(reason, trials=5, TRIAL_0="hang", **lost)
    assert {rank["TRIAL"] for rank in machines.ranks()} <= {"0"}, "it ends the loop"


@pytest.mark.parametrize("said", ["killed\t1\tnode2\t7\tby SIGKILL", ""])
def test_a_rank_that_was_killed_is_the_cause_whichever_machine_ends_first(
    repository, tmp_path, said
):
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
    process.stdin.write(
        "".join(f"{name}={value}\0" for name, value in entries.items()) + "\0"
    )
    process.stdin.flush()  # and left open: the machine must end by itself
    assert process.wait(timeout=240) == 1
    assert process.stdout.read() == "bad_input\t0\there\t-\tLR: wrong\n"
    assert "output" in process.stderr.read()
    process.stdin.close()
    assert not (tmp_path / "elsewhere").exists()


def test_caches_count_as_dropped_only_when_every_machine_dropped_them(machines):
    (machines.root / "launch" / "node" / "drop_caches.sh").write_text(
        '#!/bin/sh\n[ "$OF_HOST" != "$STUBBORN" ]\n'
    )
    machines.run(STUBBORN="none", status=0)
    assert {rank["CACHE_CLEARED"] for rank in machines.ranks()} == {"1"}
    machines.calls_file.unlink()
    # Not the folder of the same second.
    machines.run(STUBBORN="dgx2", RUN_NAME="another")
    assert {rank["CACHE_CLEARED"] for rank in machines.ranks()} == {"0"}


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
    done = captured(
        [machines.script], 2, cwd=machines.root, env=machines.env | samsungs
    )
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
    machines.with_containers("docker")
    machines.run(CONT="mlperf-bert", status=0)
    calls = machines.recorded("docker")
    ranks = [call for call in calls if "--node-rank" in call.get("command", ())]
    assert len(ranks) == 2
    names = {"LR", "MASTER_ADDR", "TRIAL", "OMP_NUM_THREADS"}
    assert names <= set(ranks[0]["options"]["--env"])
    assert len(machines.ranks()) == 4
    removed = [call for call in calls if call.get("words", [""])[0] == "rm"]
    assert len(removed) == 2, "on both"


@pytest.mark.slow
def test_two_machines_really_train_together(repository, checkout, tmp_path):
    """With the real trainer, torchrun and gloo; only ssh is a stand-in."""
    metadata = Metadata(
        max_seq_length=48, vocab_md5="0" * 32, random_seed=0, dupe_factor=1
    )
    for name, packed in (("packed_data", True), ("eval", False)):
        (tmp_path / name).mkdir()
        records = synthetic_records(40, 48, 211, packed, 0)
        write_records(tmp_path / name / "part_00000_of_00001.hdf5", records, metadata)
    shape = {
        "vocab_size": 211, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3,
        "intermediate_size": 40, "max_position_embeddings": 48,
    }  # fmt: skip
    (tmp_path / "bert_config.json").write_text(json.dumps(shape))
    checkout.stand_in("ssh", SSH)
    environ = {
        **{name: checkout.env[name] for name in ("PATH", "HOME", "LOGDIR", "REAL_PYTHON", "FAKE_CALLS")},
        "HOSTS": "localhost 127.0.0.1", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo",
        "DGXSYSTEM": "Test_2x1x3x1_pack", "DGXNNODES": "2", "DGXNGPU": "1",
        "DATADIR_PHASE2_PACKED": str(tmp_path / "packed_data"), "EVALDIR": str(tmp_path / "eval"),
        "BERT_CONFIG": str(tmp_path / "bert_config.json"), "DEVICE": "cpu", "SUBMISSION_DIVISION": "open",
        "CLEAR_CACHES": "0", "NUM_EVAL_EXAMPLES": "40", "TARGET_MLM_ACCURACY": "1e-9",
        **dict.fromkeys(("EVAL_ITER_START_SAMPLES", "EVAL_ITER_SAMPLES"), "12"), "PACKED": "1", "PACKING_FACTOR": "2",
        "BATCHSIZE": "3", "MAX_SEQ_LENGTH": "48", "LR": "0.01", "MAX_STEPS": "1",
    }  # fmt: skip
    done = captured([repository / "run_multinode.sh"], env=environ, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    assert "step      1/1" in done.stdout, done.stdout + done.stderr
    (folder,) = checkout.logdir.iterdir()
    assert json.loads((folder / "config.json").read_text())["dist"]["world_size"] == 2
    log = (folder / "result_0.txt").read_text()
    assert '"key": "global_batch_size", "value": 12' in log
    assert '"key": "run_stop"' in log


@pytest.fixture
def sshd(checkout, tmp_path):
    """The checkout on two addresses of this machine, with a real ssh server on its own port."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if not server or not shutil.which("ssh") or os.getuid() != 0:
        pytest.skip("needs root, ssh and sshd (openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name],
            check=True,
        )
    port = free_ports()
    settings = {
        "Port": port, "HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "user.pub", "StrictModes": "no",
        "PidFile": "none", "UsePAM": "no", "PermitRootLogin": "yes",
    }  # fmt: skip
    (tmp_path / "sshd_config").write_text(
        "".join(f"{name} {value}\n" for name, value in settings.items())
    )
    with open(tmp_path / "sshd.log", "w") as log:
        process = subprocess.Popen(
            [server, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=log
        )
    wait_until(lambda: "listening" in (tmp_path / "sshd.log").read_text())
    # Post-quantum keys would take a tenth of a second of a core.
    options = "-o KexAlgorithms=curve25519-sha256 -o LogLevel=ERROR"
    options += " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    # Where the stand-ins for packages are: PYTHONPATH does not go along.
    python = tmp_path / "bin" / "python"
    packages = f'export PYTHONPATH="{checkout.root}/implementations:{checkout.root}"'
    python.write_text(python.read_text().replace("set -uo pipefail", packages))
    identity = checkout.root / "launch" / "node" / "identity.sh"
    identity.write_text("#!/bin/sh\nset -- $SSH_CONNECTION\necho $3\n")
    checkout.script, checkout.size = "./run_multinode.sh", "DGXNGPU=2 DGXNNODES=2"
    checkout.env |= {
        "HOSTS": "127.0.0.1 127.0.0.2", "NCCL_TEST": "0", "PYTHON": str(python),
        "SSH_OPTIONS": f"-p {port} -i {tmp_path / 'user'} {options}",
    }  # fmt: skip
    yield checkout
    process.kill()
    process.wait()


def test_a_real_ssh_server_starts_the_ranks(sshd):
    sshd.run(status=0)
    assert sorted(rank["RANK"] for rank in sshd.ranks()) == ["0", "1", "2", "3"]
    assert {rank["MASTER_ADDR"] for rank in sshd.ranks()} == {"127.0.0.1"}


@pytest.fixture
def hanging(sshd):
    """A started run of which all four ranks hang."""
    process = sshd.popen(TRIAL_0="hang")
    wait_until(lambda: len(sshd.ranks()) == 4)
    return process


def test_a_real_ssh_server_ends_the_ranks_of_a_killed_script(sshd, hanging):
    hanging.send_signal(signal.SIGTERM)
    sshd.ended(hanging, 143)
    wait_until(lambda: not processes(sshd.root), every=0.2)


def test_a_real_connection_that_breaks_ends_the_ranks_of_both_machines(sshd, hanging):
    client = captured(["pgrep", "-f", "^ssh .* 127.0.0.2 .*watch"], 0)
    for number in client.stdout.split():
        # Another test's, which has ended.
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(sshd.root.parent) in Path(f"/proc/{number}/cmdline").read_text():
                os.kill(int(number), signal.SIGKILL)
    reason = "trial 0: 127.0.0.2: the ranks ended with exit status 137"
    assert reason in sshd.ended(hanging).last_line
    wait_until(lambda: not processes(sshd.root), every=0.2)
