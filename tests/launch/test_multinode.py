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

from ..waiting import free_ports, wait_until
from .captured import captured
from .test_trial import processes

MULTINODE = "./run_multinode.sh"
# Like the real ssh: the command runs in a separate session, which outlives this client and gets no
# signal from it, only the end of its input. A host in DOWN does not answer, one in BLIND lacks the
# repository, one in APART the results, and the ranks of one in LOST end at once, with LOST_STATUS
# and the output SAYS. Each is a machine of its own, but in ONE.
SSH = """
while [[ $1 == -* ]]; do case $1 in -o | -p) shift 2 ;; *) shift ;; esac; done
host=$1
[[ " ${DOWN:-} " != *" $host "* ]] || { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
[[ " ${BLIND:-} " != *" $host "* ]] || exit 1
[[ " ${LOST:-} " != *" $host "* || $2 != *" watch "* ]] || { printf '%s' "${SAYS:-}"; exit "${LOST_STATUS:-255}"; }
[[ " ${APART:-} " != *" $host "* || $2 != *" test -w "* ]] || exit 1
if [[ $2 == *"/launch/node/identity.sh "* ]]; then
  cat >/dev/null
  [[ " ${ONE:-} " == *" $host "* ]] && echo one || echo "$host"
  exit
fi
exec setsid --wait env -i PATH="$PATH" HOME="$HOME" REAL_PYTHON="$REAL_PYTHON" FAKE_CALLS="$FAKE_CALLS" \
  OF_HOST="$host" bash -c "$2"
"""


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture
def machines(checkout):
    """The checkout on two machines, dgx1 and dgx2, which are both this one."""
    checkout.stand_in("ssh", SSH)
    checkout.env |= {"HOSTS": "dgx1 dgx2", "NCCL_TEST": "0"}
    return checkout


def run(machines, after: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return machines.run(MULTINODE, after=f"export DGXNNODES=2; {after}", **env)


def test_ranks_of_all_machines_are_one_world(machines):
    del machines.env["BINDING"]
    done = run(machines, "export NEXP=2 SEED=5", NCCL_TEST="")
    assert done.returncode == 0, done.stderr
    assert (
        last_line(done.stderr)
        == f"run: all 2 trials reached the target: {machines.run_dir}"
    )
    first = [rank for rank in machines.ranks() if rank["TRIAL"] == "0"]
    assert sorted(rank["RANK"] for rank in first) == ["0", "1", "2", "3"]
    assert {rank["WORLD_SIZE"] for rank in first} == {"4"}
    assert {rank["MASTER_ADDR"] for rank in first} == {"dgx1"}
    assert {rank["LR"] for rank in first} == {"0.00096"}, (
        "the variables of this shell go along"
    )
    assert {rank["SEED"] for rank in machines.ranks() if rank["TRIAL"] == "1"} == {"6"}
    torchrun = [line for line in machines.calls("torchrun") if "--node-rank 1" in line]
    assert len(torchrun) == 3, "the all-reduce test, by default, and two trials"
    assert all(
        "--nnodes 2" in line and "--nproc-per-node 2" in line for line in torchrun
    )


def test_ssh_never_asks_for_a_password(machines):
    run(machines, SSH_OPTIONS="-p 2222")
    calls = machines.calls("ssh")
    assert calls
    assert all("BatchMode=yes" in call and "'-p' '2222'" in call for call in calls)


def test_values_reach_the_machines_unchanged_and_not_on_a_command_line(machines):
    odd = "two  spaces; $(exit 9) 'quoted' \"twice\"\nand a line"
    done = run(machines, NCCL_ODD=odd, MY_TOKEN="hidden")
    assert done.returncode == 0, done.stderr
    assert "NCCL_ODD" not in "".join(machines.calls("ssh"))
    shown = captured(
        [
            "bash",
            "-c",
            f"source launch/run/environment.sh; environment::print | env -i bash -c '{READ}'",
        ],
        cwd=machines.root,
        env=machines.env | {"NCCL_ODD": odd, "MY_TOKEN": "hidden"},
        check=True,
    ).stdout
    assert shown == odd + "|unset"


READ = 'source launch/run/environment.sh; environment::read; printf "%s|%s" "$NCCL_ODD" "${MY_TOKEN-unset}"'


@pytest.mark.parametrize(("culprit", "host"), [("1", 0), ("3", 1)])
def test_a_rank_that_dies_ends_the_ranks_of_every_machine(machines, culprit, host):
    done = run(machines, "export NEXP=1", TRIAL_0=f"kill:{culprit}")
    assert done.returncode == 1
    reason = f"trial 0: rank {culprit} on {os.uname().nodename} was killed by SIGKILL"
    assert last_line(done.stderr) == f"run: error: 1 of 1 trials failed: {reason}"
    assert (machines.run_dir / "failed_0.txt").exists()
    wait_until(lambda: not processes(machines.root))


def test_a_connection_that_breaks_ends_the_ranks_of_every_machine(machines):
    done = run(machines, TRIAL_0="hang", LOST="dgx2")
    reason = "trial 0: dgx2: the ssh connection ended, see output_0.txt"
    assert last_line(done.stderr) == f"run: error: 1 of 1 trials failed: {reason}"
    wait_until(lambda: not processes(machines.root))


def test_a_machine_that_does_not_share_the_results_still_reports_why_it_failed(
    machines,
):
    said = "bad_input\t3\tdgx2\t-\tDATADIR_PHASE2: truncated\n"
    done = run(
        machines, "export NEXP=5", TRIAL_0="hang", LOST="dgx2", LOST_STATUS="1", SAYS=said,
    )  # fmt: skip
    assert (
        last_line(done.stderr)
        == "run: error: 1 of 5 trials failed: trial 0: DATADIR_PHASE2: truncated"
    )
    assert {rank["TRIAL"] for rank in machines.ranks()} <= {"0"}, (
        "bad input ends the loop"
    )


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


def test_a_signal_ends_the_ranks_of_every_machine(machines):
    after = "export DGXNNODES=2 RUN_NAME=stopped"
    process = machines.popen(MULTINODE, after=after, TRIAL_0="hang")
    wait_until(lambda: len(machines.ranks()) == 4)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "RUN_NAME=stopped continues" in last_line(errors)
    wait_until(
        lambda: not processes(machines.root)
    )  # the machines notice that the connection is gone


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"HOSTS": "dgx1"}, "1 machines and the config wants DGXNNODES=2"),
        ({"HOSTS": "dgx1,dgx1"}, "a machine is listed twice"),
        ({"ONE": "dgx1 dgx2"}, "HOSTS=dgx1 dgx2: dgx1 and dgx2 are one machine: name each machine once"),
        ({"DOWN": "dgx2"}, "dgx2: ssh cannot connect (ssh: connect to host dgx2 port 22: No route to host)"),
        ({"BLIND": "dgx2"}, "dgx2 does not see"),
        ({"APART": "dgx1"}, "is not the same folder on dgx1"),
        ({"PYTHON": "/no/python"}, "dgx1: PYTHON=/no/python does not exist or has no torch"),
        ({"CONTAINER_RUNTIME": "pyxis", "CONT": "image"}, "CONTAINER_RUNTIME=pyxis is for Slurm: use docker,"),
    ],
)  # fmt: skip
def test_a_machine_that_cannot_take_part_is_named_before_anything_is_written(
    machines, changes, reason
):
    done = run(machines, **changes)
    assert done.returncode == 2
    assert last_line(done.stderr).startswith("run: error: ")
    assert reason in last_line(done.stderr)
    assert not machines.ranks()
    assert not machines.logdir.exists()


def test_caches_count_as_dropped_only_when_every_machine_dropped_them(machines):
    (machines.root / "launch" / "node" / "drop_caches.sh").write_text(
        '#!/bin/sh\n[ "$OF_HOST" != "$STUBBORN" ]\n'
    )
    done = run(machines, STUBBORN="none")
    assert done.returncode == 0, done.stderr
    assert {rank["CACHE_CLEARED"] for rank in machines.ranks()} == {"1"}
    machines.calls_file.unlink()
    run(
        machines, STUBBORN="dgx2", RUN_NAME="another"
    )  # not the folder of the same second
    assert {rank["CACHE_CLEARED"] for rank in machines.ranks()} == {"0"}


def test_the_names_of_samsungs_script_are_understood(machines, tmp_path):
    script = f"exec {MULTINODE}"
    environ = machines.env | {
        "DGXSYSTEM": "GB200_2x4x48x1_pack",
        "INPUT_DIR": str(tmp_path / "in"),
        "EVAL_DIR": str(tmp_path / "eval"),
        "CHECKPOINTDIR_PHASE1": str(tmp_path / "phase1"),
        "NEXP": "1",
        "PYTHON": str(tmp_path / "bin" / "python"),
        "BATCHSIZE": "7",  # wins over the config's, which holds for all else
    }
    show = "DATADIR_PHASE2_PACKED EVALDIR INIT_CHECKPOINT PYTHON BATCHSIZE LR"
    (machines.root / "implementations" / "bert" / "__main__.py").write_text(
        "import json, os, sys\n"
        f"print(json.dumps({{name: os.environ.get(name) for name in '{show}'.split()}}), file=sys.stderr)\n"
        "sys.exit(2)\n"
    )
    done = captured(["bash", "-c", script], cwd=machines.root, env=environ)
    assert done.returncode == 2, "the stand-in's check fails"
    said = json.loads(
        next(line for line in done.stderr.splitlines() if line.startswith("{"))
    )
    assert said == {
        "DATADIR_PHASE2_PACKED": str(tmp_path / "in"),
        "EVALDIR": str(tmp_path / "eval"),
        "INIT_CHECKPOINT": str(tmp_path / "phase1" / "model.ckpt-28252.pt"),
        "PYTHON": str(tmp_path / "bin" / "python"),
        "BATCHSIZE": "7",
        "LR": "0.00096",
    }


def test_a_system_without_a_config_is_named(machines):
    done = captured(
        ["bash", "-c", f"exec {MULTINODE}"], cwd=machines.root, env=machines.env | {"DGXSYSTEM": "GB300_1x2x3x4"},
    )  # fmt: skip
    assert (
        done.returncode,
        "DGXSYSTEM=GB300_1x2x3x4: no such config" in last_line(done.stderr),
    ) == (2, True)


def test_containers_of_the_image_run_on_every_machine(machines):
    folder = machines.root.parent
    stand_in = Path(__file__).resolve().parent / "fakes" / "container.py"
    program = folder / "bin" / "docker"
    program.write_text(
        f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -S "{stand_in}" docker "$@"\n'
    )
    program.chmod(0o755)
    (folder / "a checkout").rename(
        folder / "checkout"
    )  # a mounted path has neither space nor colon
    machines.root = folder / "checkout"
    done = run(machines, CONT="mlperf-bert", LOGDIR=str(folder / "results"))
    assert done.returncode == 0, done.stderr
    calls = [json.loads(call) for call in machines.calls("docker")]
    ranks = [call for call in calls if "--node-rank" in call.get("command", ())]
    assert len(ranks) == 2
    assert {"LR", "MASTER_ADDR", "TRIAL", "OMP_NUM_THREADS"} <= set(
        ranks[0]["options"]["--env"]
    )
    assert len(machines.ranks()) == 4
    assert len([call for call in calls if call.get("words", [""])[0] == "rm"]) == 2, (
        "removed on both"
    )


@pytest.mark.slow
def test_two_machines_really_train_together(repository, checkout, tmp_path):
    """With the real trainer, torchrun and gloo; only ssh is a stand-in."""
    from bert.data.format import write_records
    from bert.data.records import Metadata
    from bert.data.synthetic import synthetic_records

    metadata = Metadata(
        max_seq_length=48, vocab_md5="0" * 32, random_seed=0, dupe_factor=1
    )
    for name, packed in (("packed_data", True), ("eval", False)):
        (tmp_path / name).mkdir()
        records = synthetic_records(40, 48, 211, packed, 0)
        write_records(tmp_path / name / "part_00000_of_00001.hdf5", records, metadata)
    shape = {
        "vocab_size": 211, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3,
    }  # fmt: skip
    shape |= {"intermediate_size": 40, "max_position_embeddings": 48}
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
    python, packages = (
        tmp_path / "bin" / "python",
        f"{checkout.root / 'implementations'}:{checkout.root}",
    )
    text = python.read_text().replace(
        "set -uo pipefail", f'export PYTHONPATH="{packages}"'
    )
    python.write_text(
        text
    )  # where the stand-ins for packages are: PYTHONPATH does not go along
    (checkout.root / "launch" / "node" / "identity.sh").write_text(
        "#!/bin/sh\nset -- $SSH_CONNECTION\necho $3\n"
    )
    checkout.env |= {
        "HOSTS": "127.0.0.1 127.0.0.2", "NCCL_TEST": "0",
        "SSH_OPTIONS": f"-p {port} -i {tmp_path / 'user'} {options}", "PYTHON": str(python),
    }  # fmt: skip
    yield checkout
    process.kill()
    process.wait()


def test_a_real_ssh_server_starts_the_ranks(sshd):
    done = run(sshd)
    assert done.returncode == 0, done.stderr
    assert sorted(rank["RANK"] for rank in sshd.ranks()) == ["0", "1", "2", "3"]
    assert {rank["MASTER_ADDR"] for rank in sshd.ranks()} == {"127.0.0.1"}


def test_a_real_ssh_server_ends_the_ranks_of_a_killed_script(sshd):
    process = sshd.popen(MULTINODE, after="export DGXNNODES=2", TRIAL_0="hang")
    wait_until(lambda: len(sshd.ranks()) == 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 143
    wait_until(lambda: not processes(sshd.root))


def test_a_real_connection_that_breaks_ends_the_ranks_of_both_machines(sshd):
    process = sshd.popen(MULTINODE, after="export DGXNNODES=2", TRIAL_0="hang")
    wait_until(lambda: len(sshd.ranks()) == 4)
    client = captured(["pgrep", "-f", "^ssh .* 127.0.0.2 .*watch"], check=True)
    for number in client.stdout.split():
        with suppress(
            FileNotFoundError, ProcessLookupError
        ):  # another test's, which has ended
            if str(sshd.root.parent) in Path(f"/proc/{number}/cmdline").read_text():
                os.kill(int(number), signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    assert "trial 0: 127.0.0.2: the ranks ended with exit status 137" in last_line(
        errors
    )
    wait_until(lambda: not processes(sshd.root))
