"""run_with_docker.sh: the container gets what the run needs and no more, and none is left
behind.
"""

from __future__ import annotations

import json
import os

import pytest

from . import platforms
from .captured import captured
from .conftest import make_checkout


@pytest.fixture
def docker(checkout):
    return platforms.docker(checkout)


@pytest.fixture(scope="module")
def succeeded(repository, tmp_path_factory):
    """The checkout after a run of two trials that succeeded, and what the run printed."""
    made = make_checkout(repository, tmp_path_factory.mktemp("docker"))
    docker = platforms.docker(made)
    del docker.env["BINDING"]
    exports = "export NEXP=2 SEED=5 NCCL_DEBUG=INFO OF_THE_IMAGE=host MY_API_KEY=hidden SSH_AGENT_PID=1 PYTHONHOME="
    return docker, docker.run(after=exports, status=0)


CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda",
          "NUMBA_CACHE_DIR": "numba"}  # fmt: skip


def caches_of(rank: dict) -> dict:
    """Compiler cache folders of a rank, by variable."""
    return {name: rank[name] for name in CACHES if rank[name]}


def runs(checkout) -> list[dict]:
    """The containers that were started, except the first, which only tests that they start."""
    started = [call for call in checkout.recorded("docker") if "image" in call]
    return [call for call in started if call["command"] != ["true"]]


def test_trials_run_in_containers_of_the_image(succeeded):
    docker, done = succeeded
    assert done.last_line == f"run: all 2 trials reached the target: {docker.run_dir}"
    ranks = docker.ranks()
    assert sorted((rank["TRIAL"], rank["RANK"]) for rank in ranks) == [
        (t, r) for t in "01" for r in "01"
    ]
    assert {rank["SEED"] for rank in ranks if rank["TRIAL"] == "1"} == {"6"}
    assert {rank["LR"] for rank in ranks} == {"0.00096"}, "of the config"
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


def volumes(checkout) -> list[str]:
    """What the last container mounts."""
    return runs(checkout)[-1]["options"]["--volume"]


def test_data_is_mounted_read_only_and_results_writable(succeeded):
    docker, _ = succeeded
    folder = docker.root.parent
    mounted = set(volumes(docker))
    assert {
        f"{path}:{path}:ro"
        for path in (docker.root, folder / "data/packed_data", folder / "data/eval")
    } <= mounted
    assert f"{folder / 'results'}:{folder / 'results'}:rw" in mounted
    assert not any("training-4320" in volume for volume in mounted), (
        "what does not exist is not mounted"
    )


def test_compiled_kernels_are_kept_beside_the_results(succeeded):
    docker, _ = succeeded
    folder = docker.logdir / ".kernels"
    assert folder.is_dir()
    assert [caches_of(rank) for rank in docker.ranks()] == [
        {name: f"{folder}/{of}" for name, of in CACHES.items()}
    ] * 4
    kept = [volume for volume in volumes(docker) if ".kernels" in volume]
    assert not kept, "they come with the results"
    assert docker.run_dir.is_dir(), "the only run"


OUTPUTS = ("CHECKPOINT_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
MOUNTS = "{0}/one:/raw:ro,{0}/two:/raw2,{0}/three:ro,{0}/four,/dev/shm:/dev/shm"


@pytest.fixture(scope="module")
def configured(repository, tmp_path_factory):
    """The same without GPUs, on a daemon that cannot raise limits, with a site's mounts and folders of
    one's own; its folder, and what the run printed.
    """
    docker = platforms.docker(
        make_checkout(repository, tmp_path_factory.mktemp("configured"))
    )
    folder = docker.root.parent
    for name in ("one", "two", "three", "four"):
        (folder / name).mkdir()
    outputs = {name: str(folder / "new" / name) for name in OUTPUTS}
    # Within what is mounted, and twice what is.
    inside = {"INIT_CHECKPOINT": outputs["CHECKPOINT_DIR"], "EVALDIR": f"{folder}/results"}  # fmt: skip
    docker.env |= outputs | inside | {"LOOK_FOR": ":".join(outputs.values())}
    docker.env |= {"KERNEL_CACHE": f"{folder}/scratch/kernels", "NO_LIMITS": "1"}
    docker.env["CONTAINER_MOUNTS"] = MOUNTS.format(folder)
    return docker, docker.run(after="export DEVICE=cpu", status=0)


def test_without_gpus_none_are_requested(configured):
    docker, _ = configured
    assert not any("--gpus" in run["options"] for run in runs(docker))


def test_a_daemon_that_cannot_raise_limits_runs_without_them(configured):
    docker, done = configured
    assert "warning: containers start only without the limits memlock" in done.stderr
    assert not any("--ulimit" in run["options"] for run in runs(docker))


def test_site_mounts_use_the_syntax_of_pyxis(configured):
    docker, _ = configured
    at = docker.root.parent
    expected = {f"{at}/one:/raw:ro", f"{at}/two:/raw2:rw", "/dev/shm:/dev/shm:rw"}
    expected |= {f"{at}/three:{at}/three:ro", f"{at}/four:{at}/four:rw"}
    assert expected <= set(volumes(docker))


def test_compiled_kernels_can_be_kept_on_a_local_disk_and_one_compilers_elsewhere(
    configured,
):
    docker, _ = configured
    folder = docker.env["KERNEL_CACHE"]
    assert f"{folder}:{folder}:rw" in volumes(docker)
    expected = {name: f"{folder}/{of}" for name, of in CACHES.items()}
    own = {name: docker.env[name] for name in CACHES if name in OUTPUTS}
    assert caches_of(docker.ranks()[0]) == expected | own


def test_every_output_folder_is_created_and_mounted_before_the_first_trial(configured):
    """A folder created by a rank would end with the rank's container."""
    docker, _ = configured
    outputs = [docker.env[name] for name in OUTPUTS]
    assert {f"{path}:{path}:rw" for path in outputs} <= set(volumes(docker))
    assert docker.ranks()[0]["SEES"] == outputs


def test_no_path_is_mounted_twice_which_docker_refuses(configured):
    targets = [volume.split(":")[1] for volume in volumes(configured[0])]
    assert len(targets) == len(set(targets))


READ = {
    "DEEPSPEED_CONFIG": "ds.json",
    "BERT_CONFIG": "model/bert_config.json",
    "INIT_CHECKPOINT": "weights/model.safetensors.index.json",
}


@pytest.mark.parametrize(
    ("more", "config"),
    [({}, "model/bert_config.json"), ({"RANK_MODULE": "finetune", "TASK": "MRPC"}, "model")],
)  # fmt: skip
def test_every_path_that_ranks_read_is_mounted(docker, more, config):
    folder = docker.root.parent / "in"
    for name in READ.values():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    docker.run(**{name: str(folder / path) for name, path in READ.items()}, **more)
    mounted = [folder / path for path in ("ds.json", config, "weights")]
    assert {f"{path}:{path}:ro" for path in mounted} <= set(volumes(docker))


PASSED = "LR BATCHSIZE NCCL_DEBUG DATADIR_PHASE2_PACKED DGXSYSTEM PYTHON HOME=/tmp"
KEPT_BACK = "OF_THE_IMAGE MY_API_KEY SSH_AGENT_PID PATH HOME PYTHONPATH PYTHONHOME"


def test_variables_are_passed_by_name_without_those_of_the_login_or_the_image(
    succeeded,
):
    docker, _ = succeeded
    given = set(runs(docker)[-1]["options"]["--env"])
    assert set(PASSED.split()) <= given
    assert not given & set(KEPT_BACK.split())
    assert "hidden" not in json.dumps(runs(docker))
    own = ("HOME=", "USER=")
    assert not [item for item in given if "=" in item and not item.startswith(own)]


@pytest.mark.parametrize("outcome", ["success", "crash:1"])
def test_a_run_removes_its_containers(succeeded, docker, outcome):
    if outcome == "success":
        docker = succeeded[0]
    else:
        docker.failed("trial 0: ", TRIAL_0=outcome)
    calls = [call["words"] for call in docker.recorded("docker") if "words" in call]
    (label,) = {run["options"]["--label"][0] for run in runs(docker)}
    assert ["ps", "--all", "--quiet", "--filter", f"label={label}"] in calls
    assert calls[-1] == ["rm", "--force", "0123abc"]


def test_a_node_finds_and_removes_the_containers_of_its_job_whatever_ended_it(docker):
    """Those of the job's attempts; of another job and of a run without Slurm none."""
    listed = "0a1_bert_7_0\n0b2_bert_7_0_1\n0c3_bert_8_0\n0d4_host-71-17"
    job = {"SLURM_JOB_ID": "7", "LISTED": listed, "ATTEMPT_NAME": "x"}
    docker.run("launch/node/cleanup.sh now", status=0, **job)
    calls = [call["words"] for call in docker.recorded("docker")]
    key = f"mlperf-bert-run-{os.getuid()}"
    assert [f"label={key}" in call for call in calls] == [True, False, False]
    assert calls[0][-1] == f'{{{{.ID}}}}_{{{{.Label "{key}"}}}}'
    assert calls[1:] == [["rm", "--force", "0a1"], ["rm", "--force", "0b2"]]


def test_containers_of_a_job_bear_the_name_of_their_attempt(repository):
    script = 'source launch/container/runtimes/docker.sh; echo "$DOCKER_LABEL"'
    environ = os.environ | {"REPO_DIR": str(repository), "ATTEMPT_NAME": "bert_7_0_1"}
    labels = []
    for platform in ("slurm", "ssh"):
        given = {"env": environ | {"PLATFORM": platform}, "cwd": repository}
        labels.append(captured(["bash", "-uc", script], status=0, **given).stdout)
    key = f"mlperf-bert-run-{os.getuid()}"
    assert labels[0] == f"{key}=bert_7_0_1\n"
    assert "bert_" not in labels[1].removeprefix(key)
