"""Every platform keeps the same promises: a failure and a signal end all ranks and are the last line, and
what cannot run is refused in one line before anything is written.
"""

import os
import signal

import pytest

from .conftest import Checkout
from .platforms import PLATFORMS
from .test_trial import none_left


@pytest.fixture
def platform(request: pytest.FixtureRequest, checkout: Checkout) -> Checkout:
    """The checkout as a user of that platform has it."""
    return PLATFORMS[request.param](checkout)


@pytest.mark.parametrize("platform", list(PLATFORMS)[1:], indirect=True)
def test_a_rank_that_fails_ends_the_ranks_and_is_the_last_line(platform):
    # The stand-in for srun ends no other rank.
    platform.edit("run/ranks.sh", "OUTLIVE=90", "OUTLIVE=1")
    platform.failed("trial 0: the loss is nan at step 3", TRIAL_0="crash:1")
    assert (platform.run_dir / "failed_0.txt").exists()
    none_left(platform.root)


@pytest.mark.parametrize("platform", PLATFORMS, indirect=True)
def test_a_signal_ends_every_rank_and_says_how_to_continue(platform, request):
    """A key is one."""
    is_local = request.node.callspec.id == "local"
    number = signal.SIGINT if is_local else signal.SIGTERM
    done = platform.interrupted(number)
    assert done.returncode == 128 + number
    why = (platform.run_dir / "error_0.txt").read_text().strip()
    assert why == f"interrupted by {number.name}" or not is_local
    continues = "; RUN_NAME=stopped continues with the missing trials"
    assert done.last_line == f"run: error: {why}{continues}"
    assert (platform.run_dir / "failed_0.txt").exists()
    assert not (platform.run_dir / "result_0.txt").exists()
    none_left(platform.root)


# Platform, settings, what the only line says.
REFUSED = [
    ("local", {"SPARE_NODES": "08"}, "SPARE_NODES='08': expected an integer"),
    ("local", {"SEED": "1e3"}, "SEED='1e3': expected an integer"),
    ("local", {"SEED": f"{10**18}"}, f"SEED='{10**18}': expected an integer"),
    ("local", {"CHECK": "bad"}, "this configuration cannot run: LR='fast': expected a number"),
    ("local", {"KERNEL_CACHE": "/dev/null"}, "KERNEL_CACHE=/dev/null: not a folder on every node: "),
    ("local", {"RANK_MODULE": "berd"}, "RANK_MODULE=berd: expected bert or finetune"),
    ("local", {"REHEARSAL": "yes"}, "REHEARSAL='yes': expected one of 0 1"),
    ("local", {"NCCL_TEST_MIN_GBPS": "-1"}, "NCCL_TEST_MIN_GBPS='-1': expected a number"),
    ("local", {"GPU_CLOCKS": "fast"}, "GPU_CLOCKS='fast': expected MHz"),
    ("local", {"GPU_CLOCKS": "1410,"}, "GPU_CLOCKS='1410,': expected MHz"),
    ("local", {"STAGE_DIR": "nvme"}, "STAGE_DIR=nvme: expected an absolute path"),
    ("local", {"STAGE_DIR": "/tmp", "SYNTH_DATA": "1"}, "SYNTH_DATA=1 reads no data"),
    ("docker", {"CONT": ""}, "CONT is not set"),
    ("docker", {"NO_IMAGE": "mlperf-bert"}, "CONT=mlperf-bert: no such image on every node: docker build -t mlperf-bert ."),
    ("docker", {"CONT": "/images/bert.sqsh"}, "docker expects an image name"),
    ("docker", {"NO_DAEMON": "1"}, "docker does not answer: permission denied"),
    ("docker", {"NO_GPUS": "1"}, "install the NVIDIA container toolkit, or set DEVICE=cpu"),
    ("docker", {"CONTAINER_MOUNTS": "/nowhere:/data"}, "CONTAINER_MOUNTS: /nowhere: no such file or folder"),
    ("docker", {"CONTAINER_MOUNTS": "/tmp:/data:rx"}, "CONTAINER_MOUNTS: /tmp:/data:rx: expected SOURCE[:TARGET][:ro]"),
    ("docker", {"CONTAINER_RUNTIME": "podman"}, "CONTAINER_RUNTIME='podman': expected one of"),
    ("docker", {"DATADIR": "/with space"}, "a path that is mounted in a container has no space"),
    ("docker", {"after": "export DGXNNODES=2"}, "runs on one machine"),
    ("apptainer", {"CONT": "missing.sif"}, "CONT=missing.sif: no such image: apptainer build"),
    ("apptainer", {"CONT": "bert.sqsh"}, "CONT=bert.sqsh: an enroot image; for Apptainer: apptainer build"),
    ("ssh", {"HOSTS": "dgx1"}, "1 machines and the config wants DGXNNODES=2"),
    ("ssh", {"HOSTS": "dgx1,dgx1"}, "a machine is listed twice"),
    ("ssh", {"HOSTS": "dgx1 -oProxyCommand=x"}, "-oProxyCommand=x is not the name of a machine"),
    ("ssh", {"ONE": "dgx1 dgx2"}, "HOSTS=dgx1 dgx2: dgx1 and dgx2 are one machine: name each machine once"),
    ("ssh", {"DOWN": "dgx2"}, "dgx2: ssh cannot connect (ssh: connect to host dgx2 port 22: No route to host)"),
    ("ssh", {"BLIND": "dgx2"}, "dgx2 does not see"),
    ("ssh", {"APART": "dgx1"}, "is not the same folder on dgx1"),
    ("ssh", {"PYTHON": "/no/python"}, "dgx1: PYTHON=/no/python does not exist or has no torch"),
    ("ssh", {"CONTAINER_RUNTIME": "pyxis", "CONT": "image"}, "CONTAINER_RUNTIME=pyxis is for Slurm: use docker,"),
    ("job", {"RUN_NAME": "sub/../../esc"}, "RUN_NAME='sub/../../esc'"),
    ("job", {"RUN_NAME": "/tmp/elsewhere"}, "RUN_NAME='/tmp/elsewhere'"),
    ("job", {"RUN_NAME": "a//b"}, "RUN_NAME='a//b'"),
    ("job", {"SLURM_JOB_ID": ""}, "run.sub runs in a Slurm job: sbatch -N 1 run.sub; without Slurm, ./run_local.sh"),
    ("pyxis", {"CONT": "bert.sif"}, "an Apptainer image: set CONTAINER_RUNTIME=apptainer"),
    ("pyxis", {"CONT": "dockerd://mlperf-bert"}, "only this node has it: enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert"),
    ("pyxis", {"DATADIR": "/data/with,comma"}, "a path that is mounted in a container has no space, comma or colon"),
]  # fmt: skip


@pytest.mark.parametrize(("platform", "settings", "reason"), REFUSED, indirect=["platform"])  # fmt: skip
def test_what_cannot_run_is_one_line_before_anything_is_written(platform, settings, reason):  # fmt: skip
    platform.refused(reason, **settings)


def test_an_image_without_pyxis_ends_the_job_with_the_alternatives(checkout):
    why, there = "srun has no option --container-image", {"SRUN_HELP": "  --overlap"}
    done = PLATFORMS["pyxis"](checkout).refused(why, **there)
    for way in ("pyxis 0.11", "CONTAINER_RUNTIME=apptainer", "CONT=''"):
        assert way in done.last_line


def test_checkpoints_that_cannot_be_written_stop_the_run(checkout):
    folder = checkout.root.parent / "blocked"
    if os.geteuid() == 0:  # who may write everywhere
        denied = 'echo "mktemp: failed to create directory: Permission denied" >&2; exit 1'  # fmt: skip
        checkout.stand_in("mktemp", f'[[ $* == "-d -p"* ]] || exec /usr/bin/mktemp "$@"\n{denied}')  # fmt: skip
    given = {"after": f"mkdir -m 555 {folder}", "CHECKPOINT_DIR": str(folder)}
    expected = f"CHECKPOINT_DIR={folder}: not a folder on every node: mk"
    checkout.refused(expected, **given)
