"""A run's changes to its nodes (clocks, staged data) are verified when made, and undone however the
run ends.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from bert.data.loader import LoaderConfig
from common.env import BOOLEANS, from_env

from ..waiting import wait_until
from .captured import captured
from .test_patience import shorten
from .test_trial import processes

LOCAL = "./run_local.sh"
# Like the real nvidia-smi: without support of a GPU a warning and exit status 0; without root
# status 4 and a message.
SMI = """
case "$*" in
  *query-gpu=index*) for ((i = 0; i < ${GPUS:-2}; i++)); do echo $i; done ;;
  *lock-gpu-clocks*)
    [[ ! ${NOT_ROOT:-} || ${AS_ROOT:-} ]] || {
      echo "The current user does not have permission to change clocks for GPU 00000000:07:00.0."; exit 4; }
    for ((i = 0; i < ${GPUS:-2}; i++)); do
      if ((i == ${UNSUPPORTED:--1})); then
        echo "Setting locked GPU clocks is not supported for GPU 00000000:0$i:00.0."
        echo "Treating as warning and moving on."
      else
        echo "GPU clocks set to \\"(gpuClkMin 1410, gpuClkMax 1410)\\" for GPU 00000000:0$i:00.0"
      fi
    done
    echo "All done." ;;
esac"""


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def clock_calls(checkout) -> list[str]:
    return [
        word
        for call in checkout.calls("nvidia-smi")
        for word in call.replace("'", "").split()
        if "-gpu-clocks" in word
    ]


@pytest.fixture
def gpus(checkout):
    checkout.stand_in("nvidia-smi", SMI)
    checkout.env |= {"NCCL_TEST": "0", "BINDING": "none", "GPU_CLOCKS": "1410"}
    return checkout


@pytest.mark.parametrize(
    ("outcome", "status"), [("success", 0), ("crash:1", 1), ("kill:0", 1)]
)
def test_clocks_are_locked_once_and_reset_whatever_the_result(gpus, outcome, status):
    done = gpus.run(LOCAL, TRIAL_0=outcome)
    assert done.returncode == status, done.stderr
    assert clock_calls(gpus) == ["--lock-gpu-clocks=1410", "--reset-gpu-clocks"]


def test_a_watcher_that_sleeps_longer_than_the_run_undoes_nothing_of_the_next(gpus):
    shorten(gpus, "run/child.sh", "read -rt 1", "read -rt 3")
    done = gpus.run(LOCAL)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not processes(gpus.root))
    assert clock_calls(gpus) == ["--lock-gpu-clocks=1410", "--reset-gpu-clocks"]


def test_clocks_are_reset_when_a_signal_ends_the_run(gpus):
    process = gpus.popen(LOCAL, after="export RUN_NAME=stopped", TRIAL_0="hang")
    wait_until((gpus.logdir / "stopped" / "running_0" / "result_0.txt").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert clock_calls(gpus) == ["--lock-gpu-clocks=1410", "--reset-gpu-clocks"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"UNSUPPORTED": "1"}, "Setting locked GPU clocks is not supported for GPU 00000000:01:00.0."),
        ({"NOT_ROOT": "1"}, "The current user does not have permission to change clocks"),
        ({"GPUS": "0"}, "nvidia-smi sees no GPU"),
    ],
)  # fmt: skip
def test_clocks_that_were_not_set_on_every_gpu_end_the_run_whatever_nvidia_smi_returns(
    gpus, how, reason
):
    done = gpus.run(LOCAL, **how)
    assert done.returncode == 2
    assert (
        f"GPU_CLOCKS=1410: not set on every node: {os.uname().nodename}: {reason}"
        in last_line(done.stderr)
    )
    assert clock_calls(gpus)[-1] == "--reset-gpu-clocks", (
        "not left locked on half of them"
    )
    assert "checking the configuration" not in done.stderr, "which takes a minute"
    assert not gpus.ranks()


def test_clocks_are_set_through_sudo_if_needed(gpus):
    gpus.stand_in("sudo", 'shift; AS_ROOT=1 exec "$@"')
    done = gpus.run(LOCAL, NOT_ROOT="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["fast", "1410,", "1410 1980"])
def test_malformed_clocks_are_refused_before_anything_starts(gpus, value):
    done = gpus.run(LOCAL, GPU_CLOCKS=value)
    assert done.returncode == 2
    assert last_line(done.stderr).startswith(
        f"run: error: GPU_CLOCKS='{value}': expected MHz"
    )


@pytest.fixture
def data(checkout, tmp_path) -> Path:
    """A data set, and a disk of the node."""
    for name, text in (
        ("packed_data/a 0.hdf5", "aa"),
        ("packed_data/sub/b.hdf5", "b" * 99999),
        ("eval/e.hdf5", "e"),
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "nvme").mkdir()
    checkout.stand_in("sync", "")
    checkout.env |= {
        "DATADIR": str(tmp_path / "data"), "STAGE_DIR": str(tmp_path / "nvme"), "NCCL_TEST": "0",
    }  # fmt: skip
    return tmp_path / "nvme"


SEES = "import os\nprint('reads', os.environ['DATADIR_PHASE2_PACKED'], sorted(os.listdir(os.environ['EVALDIR'])))\n"


@pytest.mark.parametrize("outcome", ["success", "crash:1"])
def test_ranks_read_data_staged_to_the_nodes_disk_which_is_removed_at_the_end(
    checkout, data, outcome
):
    trainer = checkout.root / "implementations" / "bert" / "__main__.py"
    trainer.write_text(SEES + trainer.read_text())
    done = checkout.run(LOCAL, TRIAL_0=outcome)
    assert "staged 3 files, " in done.stderr
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert f"reads {data}/bert_" in output
    assert "['e.hdf5']" in output
    assert list(data.iterdir()) == []


def test_a_folder_that_staging_made_is_removed_and_one_in_use_stays(checkout, data):
    new = data / "new"
    done = checkout.run(LOCAL, STAGE_DIR=str(new))
    assert done.returncode == 0, done.stderr
    assert list(data.iterdir()) == []
    new.mkdir()
    for name in (".made_for_staging", "of another"):
        (new / name).touch()
    checkout.run(LOCAL, STAGE_DIR=str(new))
    assert (new / "of another").exists()


def test_without_packed_the_folder_is_staged_that_the_trainer_reads(checkout, data):
    unpacked = data.parent / "data" / "hdf5" / "training-4320"
    unpacked.mkdir(parents=True)
    (unpacked / "u.hdf5").write_text("u")
    trainer = checkout.root / "implementations" / "bert" / "__main__.py"
    trainer.write_text(SEES.replace("_PACKED", "") + trainer.read_text())
    done = checkout.run(LOCAL, after="unset PACKED")
    assert "staged 2 files, " in done.stderr
    assert f"reads {data}/bert_" in (checkout.run_dir / "output_0.txt").read_text()


@pytest.mark.parametrize("word", ["", *BOOLEANS, "True", " YES "])
def test_the_launcher_reads_packed_as_the_trainer_does(repository, word):
    script = (
        "source launch/run/variables.sh; variables::data; unset PACKED; variables::data"
    )
    environ = os.environ | {"REPO_DIR": str(repository), "PACKED": word}
    said = captured(
        ["bash", "-euc", script], cwd=repository, env=environ, check=True
    ).stdout
    for environment, variable in zip(({"PACKED": word}, {}), said.split(), strict=True):
        packed = from_env(LoaderConfig, {"BATCHSIZE": "1"} | environment).packed
        assert (variable == "DATADIR_PHASE2_PACKED") == packed


def stage(checkout, target: Path, **env: str):
    root = target.parent / "data"
    sources = f"X={root}/packed_data E={root}/eval"
    return checkout.run(f"./launch/node/stage.sh {target}/bert_1_0 {sources}", **env)


def test_staged_data_equals_the_source_with_the_digest_of_each_file(checkout, data):
    done = stage(checkout, data)
    assert done.returncode == 0, done.stderr
    assert (data / "bert_1_0/X/sub/b.hdf5").read_text() == "b" * 99999
    lines = (data / "bert_1_0/SHA256SUMS").read_text().splitlines()
    assert lines[1] == f"{hashlib.sha256(b'aa').hexdigest()}  X/a 0.hdf5"
    assert len(lines) == 3


def test_a_bad_copy_fails_and_leaves_nothing(checkout, data):
    checkout.stand_in(
        "dd", 'printf x >>"${1#if=}"'
    )  # a disk that changes what was written
    done = stage(checkout, data)
    assert done.returncode == 1
    assert "the copy differs from what was written" in last_line(done.stderr)
    assert list(data.iterdir()) == []


def test_a_disk_without_room_and_a_source_that_is_missing_are_one_line(checkout, data):
    checkout.stand_in("df", "echo Avail; echo 5")
    done = stage(checkout, data)
    assert "0 MB to stage and 0 MB free in" in last_line(done.stderr)
    done = checkout.run(LOCAL, EVALDIR="/nowhere")
    expected = f"not staged on every node: {os.uname().nodename}: EVALDIR=/nowhere: no such folder here"
    assert expected in last_line(done.stderr)
    assert list(data.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"STAGE_DIR": "nvme"}, "STAGE_DIR=nvme: expected an absolute path"),
        ({"SYNTH_DATA": "1"}, "SYNTH_DATA=1 reads no data"),
    ],
)
def test_contradictory_staging_settings_are_refused(checkout, data, how, reason):
    done = checkout.run(LOCAL, **how)
    assert done.returncode == 2
    assert reason in last_line(done.stderr)


def test_nodes_that_read_different_data_end_the_run(checkout, data):
    script = checkout.root / "launch" / "node" / "stage.sh"
    script.write_text(
        "#!/bin/sh\necho staged 3 files, 9 bytes, sha256 $RANDOM_DIGEST$$\n"
    )
    done = checkout.run(
        LOCAL.replace("local", "multinode"), after="export DGXNNODES=2", **two_machines(checkout),
    )  # fmt: skip
    assert "the nodes read different data: 3 files" in last_line(done.stderr)


def two_machines(checkout) -> dict[str, str]:
    """ssh to this machine."""
    words = "while [[ $1 == -* ]]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done; shift"
    who = "[[ $* != *identity.sh* ]] || { cat >/dev/null; exec echo $RANDOM$$; }"
    checkout.stand_in("ssh", f'{words}; {who}; exec bash -c "$*"')
    return {"HOSTS": "a b"}


TOOLS = {
    "nvidia-smi": '[[ $* != "topo -m" ]] || printf "GPU0 GPU1\\nGPU0 X NV18\\n"',
    "ibv_devinfo": "echo hca_id: mlx5_0; exit 1",
}


def test_the_hardware_of_the_nodes_is_recorded(checkout):
    for name, script in TOOLS.items():
        checkout.stand_in(name, script)
    done = checkout.run(LOCAL, after="export NCCL_TEST=0")
    assert done.returncode == 0, done.stderr
    lines = (checkout.run_dir / "topology.txt").read_text().splitlines()
    node = os.uname().nodename
    assert all(line.startswith(f"{node}: ") for line in lines)
    for text in (
        "== nvidia-smi topo -m",
        "GPU0 X NV18",
        "hca_id: mlx5_0",
        "exit status 1",
        "== lscpu",
    ):
        assert f"{node}: {text}" in lines


def test_output_of_several_ranks_is_labelled_and_of_one_is_not(checkout):
    checkout.run(LOCAL, after="export NEXP=1 RUN_NAME=two")
    assert (
        "1: rank 1 trains: success"
        in (checkout.logdir / "two/output_0.txt").read_text().splitlines()
    )
    checkout.run(LOCAL, after="export DGXNGPU=1 RUN_NAME=one")
    assert (
        "rank 0 trains: success"
        in (checkout.logdir / "one/output_0.txt").read_text().splitlines()
    )


def test_a_rank_raises_the_limit_of_open_files(checkout):
    trainer = checkout.root / "implementations" / "bert" / "__main__.py"
    trainer.write_text(
        "import resource\nprint('files', *resource.getrlimit(7))\n"
        + trainer.read_text()
    )
    done = checkout.run(
        "bash -c 'ulimit -Sn 300; ulimit -Hn 4000; exec ./run_local.sh'"
    )
    assert done.returncode == 0, done.stderr
    assert "0: files 4000 4000" in (checkout.run_dir / "output_0.txt").read_text()
