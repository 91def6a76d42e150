"""run_with_docker.sh: the container gets what the run needs and no more, and none is left
behind.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ..waiting import wait_until
from .captured import captured
from .conftest import make_checkout

DOCKER = "./run_with_docker.sh"
STAND_IN = Path(__file__).resolve().parent / "fakes" / "container.py"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _with_docker(checkout):
    """The checkout, with a docker that runs commands with only what its options pass."""
    folder = checkout.root.parent
    checkout.stand_in("docker", "")
    (folder / "bin" / "docker").write_text(
        f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -S "{STAND_IN}" docker "$@"\n'
    )
    # A mounted path has neither space nor colon, so this checkout has none either.
    (folder / "a checkout").rename(folder / "checkout")
    checkout.root = folder / "checkout"
    checkout.env |= {
        "CONT": "mlperf-bert", "DATADIR": str(folder / "data"), "LOGDIR": str(folder / "results"),
    }  # fmt: skip
    for name in ("packed_data", "eval", "phase1"):
        (folder / "data" / name).mkdir(parents=True)
    return checkout


@pytest.fixture
def docker(checkout):
    """The checkout with that docker."""
    return _with_docker(checkout)


@pytest.fixture(scope="module")
def succeeded(repository, tmp_path_factory):
    """The checkout after a run of two trials that succeeded, and what the run printed."""
    docker = _with_docker(make_checkout(repository, tmp_path_factory.mktemp("docker")))
    del docker.env["BINDING"]
    exports = "export NEXP=2 SEED=5 NCCL_DEBUG=INFO OF_THE_IMAGE=host MY_API_KEY=hidden SSH_AGENT_PID=1 PYTHONHOME="
    done = docker.run(DOCKER, after=exports)
    assert done.returncode == 0, done.stderr
    return docker, done


CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda",
          "NUMBA_CACHE_DIR": "numba"}  # fmt: skip


def caches_of(rank: dict) -> dict:
    """Compiler cache folders of a rank, by variable."""
    return {name: rank[name] for name in CACHES if rank[name]}


def runs(checkout) -> list[dict]:
    """The containers that were started, except the first, which only tests that they start."""
    started = [
        call for call in map(json.loads, checkout.calls("docker")) if "image" in call
    ]
    return [call for call in started if call["command"] != ["true"]]


def test_trials_run_in_containers_of_the_image(succeeded):
    docker, done = succeeded
    assert (
        last_line(done.stderr)
        == f"run: all 2 trials reached the target: {docker.run_dir}"
    )
    ranks = docker.ranks()
    assert sorted((rank["TRIAL"], rank["RANK"]) for rank in ranks) == [
        (t, r) for t in "01" for r in "01"
    ]
    assert {rank["SEED"] for rank in ranks if rank["TRIAL"] == "1"} == {"6"}
    assert {rank["LR"] for rank in ranks} == {"0.00096"}, (
        "the config's variables reach the trainer"
    )
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
    assert {run["image"] for run in runs(docker)} == {"mlperf-bert"}


def test_a_container_has_the_gpus_the_host_network_and_shared_memory(succeeded):
    docker, _ = succeeded
    for run in runs(docker):
        options = run["options"]
        assert options["--gpus"] == ["all"]
        assert options["--network"] == options["--ipc"] == ["host"]
        assert options["--user"] == [f"{os.getuid()}:{os.getgid()}"]
        assert "memlock=-1" in options["--ulimit"]
        assert {"--rm", "--init"} <= set(options)
        assert options["--entrypoint"] == [""]


def test_without_gpus_none_are_requested(docker):
    done = docker.run(DOCKER, after="export DEVICE=cpu")
    assert done.returncode == 0, done.stderr
    assert not any("--gpus" in run["options"] for run in runs(docker))


def test_a_daemon_that_cannot_raise_limits_runs_without_them(docker):
    done = docker.run(DOCKER, NO_LIMITS="1")
    assert done.returncode == 0, done.stderr
    assert "warning: containers start only without the limits memlock" in done.stderr
    assert not any("--ulimit" in run["options"] for run in runs(docker))


def test_site_mounts_use_the_syntax_of_pyxis(docker):
    one, two, three, four = (
        docker.root.parent / name for name in ("one", "two", "three", "four")
    )
    for folder in (one, two, three, four):
        folder.mkdir()
    done = docker.run(
        DOCKER,
        CONTAINER_MOUNTS=f"{one}:/raw:ro,{two}:/raw2,{three}:ro,{four},/dev/shm:/dev/shm",
    )
    assert done.returncode == 0, done.stderr
    expected = {
        f"{one}:/raw:ro", f"{two}:/raw2:rw", f"{three}:{three}:ro", f"{four}:{four}:rw",
    }  # fmt: skip
    assert expected <= set(runs(docker)[-1]["options"]["--volume"])


def test_data_is_mounted_read_only_and_results_writable(succeeded):
    docker, _ = succeeded
    folder = docker.root.parent
    volumes = set(runs(docker)[-1]["options"]["--volume"])
    assert {
        f"{path}:{path}:ro"
        for path in (docker.root, folder / "data/packed_data", folder / "data/eval")
    } <= volumes
    assert f"{folder / 'results'}:{folder / 'results'}:rw" in volumes
    assert not any("training-4320" in volume for volume in volumes), (
        "what does not exist is not mounted"
    )


def test_compiled_kernels_are_kept_beside_the_results(succeeded):
    docker, _ = succeeded
    folder = docker.logdir / ".kernels"
    assert folder.is_dir()
    assert [caches_of(rank) for rank in docker.ranks()] == [
        {name: f"{folder}/{of}" for name, of in CACHES.items()}
    ] * 4
    volumes = runs(docker)[-1]["options"]["--volume"]
    assert not any(".kernels" in volume for volume in volumes), (
        "they come with the results"
    )
    assert docker.run_dir.is_dir(), "the only run"


def test_compiled_kernels_can_be_kept_on_a_local_disk_and_one_compilers_elsewhere(
    docker,
):
    folder = docker.root.parent / "scratch" / "kernels"
    done = docker.run(DOCKER, KERNEL_CACHE=str(folder), TRITON_CACHE_DIR="/dev/shm")
    assert done.returncode == 0, done.stderr
    assert f"{folder}:{folder}:rw" in runs(docker)[-1]["options"]["--volume"]
    expected = {name: f"{folder}/{of}" for name, of in CACHES.items()} | {
        "TRITON_CACHE_DIR": "/dev/shm"
    }
    assert caches_of(docker.ranks()[0]) == expected


def test_every_output_folder_is_created_and_mounted_before_the_first_trial(docker):
    """A folder created by a rank would end with the rank's container."""
    folder, names = (
        docker.root.parent,
        ("CHECKPOINT_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"),
    )
    outputs = {name: str(folder / "new" / name) for name in names}
    inside = {
        "INIT_CHECKPOINT": outputs["CHECKPOINT_DIR"],
        "EVALDIR": str(folder / "results"),
    }
    done = docker.run(
        DOCKER, **outputs, **inside, LOOK_FOR=":".join(outputs.values()), CONTAINER_MOUNTS="/dev/shm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    volumes = runs(docker)[-1]["options"]["--volume"]
    assert {
        *(f"{path}:{path}:rw" for path in outputs.values()),
        "/dev/shm:/dev/shm:rw",
    } <= set(volumes)
    targets = [volume.split(":")[1] for volume in volumes]
    assert len(targets) == len(set(targets)), (
        "docker refuses a path that is mounted twice"
    )
    assert docker.ranks()[0]["SEES"] == list(outputs.values())


def test_every_path_that_ranks_read_is_mounted(docker):
    folder = docker.root.parent
    for name in (
        "ds.json",
        "model/bert_config.json",
        "weights/model.safetensors.index.json",
    ):
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).touch()
    given = {
        "DEEPSPEED_CONFIG": "ds.json",
        "BERT_CONFIG": "model/bert_config.json",
    }
    given["INIT_CHECKPOINT"] = "weights/model.safetensors.index.json"
    for more, config in (
        ({}, "model/bert_config.json"),
        ({"RANK_MODULE": "finetune", "TASK": "MRPC"}, "model"),
    ):
        docker.run(
            DOCKER, **{name: str(folder / "in" / path) for name, path in given.items()}, **more,
        )  # fmt: skip
        mounted = [f"{folder / 'in' / path}" for path in ("ds.json", config, "weights")]
        assert {f"{path}:{path}:ro" for path in mounted} <= set(
            runs(docker)[-1]["options"]["--volume"]
        )


@pytest.mark.parametrize("make", ["touch", "mkdir -m 555"])
def test_checkpoints_that_cannot_be_written_stop_the_run_before_it_starts(docker, make):
    folder = docker.root.parent / "blocked"
    if make != "touch" and os.geteuid() == 0:
        docker.stand_in(
            "mktemp",
            '[[ $* == "-d -p"* ]] || exec /usr/bin/mktemp "$@"\n'
            'echo "mktemp: failed to create directory: Permission denied" >&2; exit 1',
        )
    done = docker.run(DOCKER, after=f"{make} {folder}", CHECKPOINT_DIR=str(folder))
    assert done.returncode == 2
    assert f"CHECKPOINT_DIR={folder}: not a folder on every node: mk" in last_line(
        done.stderr
    )
    assert not docker.ranks()
    assert not docker.logdir.exists()


def test_variables_are_passed_by_name_without_those_of_the_login_or_the_image(
    succeeded,
):
    docker, _ = succeeded
    given = set(runs(docker)[-1]["options"]["--env"])
    assert {
        "LR",
        "BATCHSIZE",
        "NCCL_DEBUG",
        "DATADIR_PHASE2_PACKED",
        "DGXSYSTEM",
        "PYTHON",
        "HOME=/tmp",
    } <= given
    assert not given & {
        "OF_THE_IMAGE",
        "MY_API_KEY",
        "SSH_AGENT_PID",
        "PATH",
        "HOME",
        "PYTHONPATH",
        "PYTHONHOME",
    }
    assert "hidden" not in json.dumps(runs(docker))
    assert [
        item
        for item in given
        if "=" in item and not item.startswith(("HOME=", "USER="))
    ] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"CONT": ""}, "CONT is not set"),
        ({"NO_IMAGE": "mlperf-bert"}, "CONT=mlperf-bert: no such image on every node: docker build -t mlperf-bert ."),
        ({"CONT": "/images/bert.sqsh"}, "docker expects an image name"),
        ({"NO_DAEMON": "1"}, "docker does not answer: permission denied"),
        ({"NO_GPUS": "1"}, "install the NVIDIA container toolkit, or set DEVICE=cpu"),
        ({"CONTAINER_MOUNTS": "/nowhere:/data"}, "CONTAINER_MOUNTS: /nowhere: no such file or folder"),
        ({"CONTAINER_MOUNTS": "/tmp:data"}, "CONTAINER_MOUNTS: /tmp:data: expected SOURCE[:TARGET][:ro]"),
        ({"CONTAINER_MOUNTS": "/tmp:/data:rx"}, "CONTAINER_MOUNTS: /tmp:/data:rx: expected SOURCE[:TARGET][:ro]"),
        ({"CONTAINER_RUNTIME": "pyxis"}, "CONTAINER_RUNTIME=pyxis is for Slurm"),
        ({"CONTAINER_RUNTIME": "podman"}, "CONTAINER_RUNTIME='podman': expected one of"),
        ({"DATADIR": "/with space"}, "a path that is mounted in a container has no space"),
    ],
)  # fmt: skip
def test_what_cannot_run_stops_in_one_line_before_anything_is_written(
    docker, changes, reason
):
    done = docker.run(DOCKER, **changes)
    assert done.returncode == 2
    assert last_line(done.stderr).startswith("run: error: ")
    assert reason in last_line(done.stderr)
    assert not runs(docker)
    assert not docker.logdir.exists()


def test_several_nodes_are_refused(docker):
    done = docker.run(DOCKER, after="export DGXNNODES=2")
    assert (done.returncode, "runs on one machine" in last_line(done.stderr)) == (
        2,
        True,
    )


def _check_removed(docker):
    calls = [
        call["words"]
        for call in map(json.loads, docker.calls("docker"))
        if "words" in call
    ]
    (label,) = {run["options"]["--label"][0] for run in runs(docker)}
    assert ["ps", "--all", "--quiet", "--filter", f"label={label}"] in calls
    assert calls[-1] == ["rm", "--force", "0123abc"]


def test_a_run_that_succeeds_removes_its_containers(succeeded):
    _check_removed(succeeded[0])


def test_a_failure_inside_fails_the_run_and_removes_the_container(docker):
    done = docker.run(DOCKER, TRIAL_0="crash:1")
    assert done.returncode == 1, done.stderr
    _check_removed(docker)


def test_a_signal_reaches_the_container(docker):
    process = docker.popen(DOCKER, after="export RUN_NAME=stopped", TRIAL_0="hang")
    wait_until((docker.logdir / "stopped" / "running_0" / "result_0.txt").exists)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "RUN_NAME=stopped continues" in last_line(errors)
    assert (docker.run_dir / "failed_0.txt").exists()


def test_a_node_finds_and_removes_the_containers_of_its_job_whatever_ended_it(docker):
    """Those of the job's attempts; of another job and of a run without Slurm none."""
    listed = "0a1_bert_7_0\n0b2_bert_7_0_1\n0c3_bert_8_0\n0d4_host-71-17"
    done = docker.run(
        "launch/node/cleanup.sh now", SLURM_JOB_ID="7", LISTED=listed, ATTEMPT_NAME="x"
    )
    assert done.returncode == 0, done.stderr
    calls = [json.loads(call)["words"] for call in docker.calls("docker")]
    key = f"mlperf-bert-run-{os.getuid()}"
    assert [f"label={key}" in call for call in calls] == [True, False, False]
    assert calls[0][-1] == f'{{{{.ID}}}}_{{{{.Label "{key}"}}}}'
    assert calls[1:] == [["rm", "--force", "0a1"], ["rm", "--force", "0b2"]]


def test_containers_of_a_job_bear_the_name_of_their_attempt(repository):
    script = 'source launch/container/runtimes/docker.sh; echo "$DOCKER_LABEL"'
    environ = os.environ | {"REPO_DIR": str(repository), "ATTEMPT_NAME": "bert_7_0_1"}
    labels = [
        captured(
            ["bash", "-uc", script],
            cwd=repository,
            env=environ | {"PLATFORM": platform},
            check=True,
        ).stdout
        for platform in ("slurm", "ssh")
    ]
    key = f"mlperf-bert-run-{os.getuid()}"
    assert labels[0] == f"{key}=bert_7_0_1\n"
    assert "bert_" not in labels[1].removeprefix(key)


@pytest.mark.slurm
def test_ranks_of_a_slurm_job_run_in_containers_too(slurm):
    folder = slurm.checkout.root.parent
    (folder / "bin" / "docker").write_text(
        f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -S "{STAND_IN}" docker "$@"\n'
    )
    (folder / "bin" / "docker").chmod(0o755)
    (folder / "a checkout").rename(folder / "checkout")
    slurm.checkout.root = folder / "checkout"
    job = slurm.run(
        after="export DGXNNODES=2 CONTAINER_RUNTIME=docker NCCL_TEST=0",
        CONT="mlperf-bert",
        LOGDIR=str(folder / "results"),
    )
    assert job.exit_code == 0, job.output
    ranks = slurm.checkout.ranks()
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1", "2", "3"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
