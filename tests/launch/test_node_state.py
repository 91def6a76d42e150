"""A run's changes to its nodes (clocks, staged data) are verified, and undone however it ends."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from bert.data.loader import LoaderConfig
from common.env import BOOLEANS, from_env

from . import platforms
from .captured import Done, captured
from .test_trial import none_left

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


def clock_calls(checkout) -> list[str]:
    calls = " ".join(checkout.calls("nvidia-smi")).replace("'", "")
    return [word for word in calls.split() if "-gpu-clocks" in word]


ONCE = ["--lock-gpu-clocks=1410", "--reset-gpu-clocks"]


@pytest.fixture
def gpus(checkout):
    checkout.stand_in("nvidia-smi", SMI)
    checkout.env |= {"NCCL_TEST": "0", "GPU_CLOCKS": "1410"}
    return checkout


def test_clocks_are_locked_once_and_reset_also_after_a_failure(gpus):
    gpus.run(TRIAL_0="crash:1", status=1)
    assert clock_calls(gpus) == ONCE


def test_a_watcher_that_sleeps_longer_than_the_run_undoes_nothing_of_the_next(gpus):
    gpus.edit("run/child.sh", "read -rt 0.2", "read -rt 3")
    gpus.run(status=0)
    none_left(gpus.root)
    assert clock_calls(gpus) == ONCE


def test_clocks_are_reset_when_a_signal_ends_the_run(gpus):
    gpus.interrupted()
    assert clock_calls(gpus) == ONCE


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"UNSUPPORTED": "1"}, "Setting locked GPU clocks is not supported for GPU 00000000:01:00.0."),
        ({"NOT_ROOT": "1"}, "The current user does not have permission to change clocks"),
        ({"GPUS": "0"}, "nvidia-smi sees no GPU"),
    ],
)  # fmt: skip
def test_clocks_that_were_not_set_on_every_gpu_end_the_run(gpus, how, reason):
    """Whatever nvidia-smi returns."""
    where = f"not set on every node: {os.uname().nodename}"
    done = gpus.refused(f"GPU_CLOCKS=1410: {where}: {reason}", **how)
    last = clock_calls(gpus)[-1]
    assert last == "--reset-gpu-clocks", "not left locked on half of them"
    assert "checking the configuration" not in done.stderr, "which takes a minute"


def test_clocks_are_set_through_sudo_if_needed(gpus):
    gpus.stand_in("sudo", 'shift; AS_ROOT=1 exec "$@"')
    gpus.run(NOT_ROOT="1", status=0)


@pytest.fixture
def data(checkout, tmp_path) -> Path:
    """A data set, and a disk of the node."""
    files = {"packed_data/a 0.hdf5": "aa", "packed_data/sub/b.hdf5": "b" * 99999, "eval/e.hdf5": "e"}  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "nvme").mkdir()
    checkout.stand_in("sync", "")
    folders = {"DATADIR": str(tmp_path / "data"), "STAGE_DIR": str(tmp_path / "nvme")}
    checkout.env |= folders | {"NCCL_TEST": "0"}
    return tmp_path / "nvme"


SEES = "import os\nprint('reads', os.environ['DATADIR_PHASE2_PACKED'], sorted(os.listdir(os.environ['EVALDIR'])))\n"


def test_ranks_read_data_staged_to_a_disk_that_is_emptied_at_the_end(checkout, data):
    checkout.before_the_trainer(SEES)
    done = checkout.run(TRIAL_0="crash:1", status=1)
    assert "staged 3 files, " in done.stderr
    output = (checkout.run_dir / "output_0.txt").read_text()
    assert f"reads {data}/bert_" in output
    assert "['e.hdf5']" in output
    assert list(data.iterdir()) == []


def test_a_folder_that_staging_made_is_removed_and_one_in_use_stays(checkout, data):
    new = data / "new"
    checkout.run(STAGE_DIR=str(new), status=0)
    assert list(data.iterdir()) == []
    new.mkdir()
    for name in (".made_for_staging", "of another"):
        (new / name).touch()
    checkout.run(STAGE_DIR=str(new))
    assert (new / "of another").exists()


def test_without_packed_the_folder_is_staged_that_the_trainer_reads(checkout, data):
    unpacked = data.parent / "data" / "hdf5" / "training-4320"
    unpacked.mkdir(parents=True)
    (unpacked / "u.hdf5").write_text("u")
    checkout.before_the_trainer(SEES.replace("_PACKED", ""))
    done = checkout.run(after="unset PACKED")
    assert "staged 2 files, " in done.stderr
    assert f"reads {data}/bert_" in (checkout.run_dir / "output_0.txt").read_text()


def test_the_launcher_reads_packed_as_the_trainer_does(repository):
    words = ["", *BOOLEANS, "True", " YES "]
    script = "for PACKED; do variables::data; done; unset PACKED; variables::data"
    line = f"REPO_DIR=$PWD; source launch/run/variables.sh; {script}"
    said = captured(["bash", "-euc", line, "-", *words], 0, cwd=repository).stdout.split()  # fmt: skip
    given = [*({"PACKED": word} for word in words), {}]
    read = [from_env(LoaderConfig, {"BATCHSIZE": "1"} | one).packed for one in given]
    assert [variable == "DATADIR_PHASE2_PACKED" for variable in said] == read


def stage(checkout, target: Path, status: int | None = None) -> Done:
    root = target.parent / "data"
    sources = f"X={root}/packed_data E={root}/eval"
    script = f"./launch/node/stage.sh {target}/bert_1_0 {sources}"
    return checkout.run(script, status=status)


def test_staged_data_equals_the_source_with_the_digest_of_each_file(checkout, data):
    stage(checkout, data, status=0)
    assert (data / "bert_1_0/X/sub/b.hdf5").read_text() == "b" * 99999
    lines = (data / "bert_1_0/SHA256SUMS").read_text().splitlines()
    assert lines[1] == f"{hashlib.sha256(b'aa').hexdigest()}  X/a 0.hdf5"
    assert len(lines) == 3


def test_a_bad_copy_fails_and_leaves_nothing(checkout, data):
    # A disk that changes what was written.
    checkout.stand_in("dd", 'printf x >>"${1#if=}"')
    done = stage(checkout, data, status=1)
    assert "the copy differs from what was written" in done.last_line
    assert list(data.iterdir()) == []


def test_a_disk_without_room_and_a_source_that_is_missing_are_one_line(checkout, data):
    checkout.stand_in("df", "echo Avail; echo 5")
    done = stage(checkout, data)
    assert "0 MB to stage and 0 MB free in" in done.last_line
    done = checkout.run(EVALDIR="/nowhere")
    where = f"not staged on every node: {os.uname().nodename}"
    assert f"{where}: EVALDIR=/nowhere: no such folder here" in done.last_line
    assert list(data.iterdir()) == []


def test_nodes_that_read_different_data_end_the_run(checkout, data):
    script = checkout.root / "launch" / "node" / "stage.sh"
    digest = "echo staged 3 files, 9 bytes, sha256 $RANDOM_DIGEST$$"
    script.write_text(f"#!/bin/sh\n{digest}\n")
    platforms.ssh(checkout).refused("the nodes read different data: 3 files")


TOOLS = {
    "nvidia-smi": '[[ $* != "topo -m" ]] || printf "GPU0 GPU1\\nGPU0 X NV18\\n"',
    "ibv_devinfo": "echo hca_id: mlx5_0; exit 1",
}


def test_the_hardware_of_the_nodes_is_recorded(checkout, repository):
    """And a rank raises the limit of open files."""
    shutil.copy(repository / "launch/node/record.py", checkout.root / "launch/node")
    for name, script in TOOLS.items():
        checkout.stand_in(name, script)
    checkout.before_the_trainer("import resource\nprint('files', *resource.getrlimit(7))\n")  # fmt: skip
    limits = "ulimit -Sn 300; ulimit -Hn 4000; exec ./run_local.sh"
    checkout.run(f"bash -c '{limits}'", status=0)
    assert "0: files 4000 4000" in (checkout.run_dir / "output_0.txt").read_text()
    lines = (checkout.run_dir / "topology.txt").read_text().splitlines()
    node = os.uname().nodename
    assert all(line.startswith(f"{node}: ") for line in lines)
    shown = {"== nvidia-smi topo -m", "GPU0 X NV18", "hca_id: mlx5_0"}
    shown |= {"exit status 1", "== lscpu"}
    assert {f"{node}: {text}" for text in shown} <= set(lines)
