"""run_with_docker.sh: a container gets what the run needs and no more, and none is left behind."""

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
    docker = platforms.docker(make_checkout(repository, tmp_path_factory.mktemp("run")))
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


def volumes(checkout) -> list[str]:
    """What the last container mounts."""
    return runs(checkout)[-1]["options"]["--volume"]


def test_trials_run_in_containers_of_the_image(succeeded):
    docker, done = succeeded
    assert done.last_line == f"run: all 2 trials reached the target: {docker.run_dir}"
    ranks = docker.ranks()
    numbers = sorted((rank["TRIAL"], rank["RANK"], rank["SEED"]) for rank in ranks)
    assert numbers == [(t, r, str(5 + int(t))) for t in "01" for r in "01"]
    assert {rank["LR"] for rank in ranks} == {"0.00096"}, "of the config"
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
    # Compiled kernels are kept beside the results, and come with them.
    folder = docker.logdir / ".kernels"
    assert folder.is_dir()
    kept = {name: f"{folder}/{of}" for name, of in CACHES.items()}
    assert [caches_of(rank) for rank in ranks] == [kept] * 4
    assert not [volume for volume in volumes(docker) if ".kernels" in volume]


PASSED = "LR BATCHSIZE NCCL_DEBUG DATADIR_PHASE2_PACKED DGXSYSTEM PYTHON HOME=/tmp"
KEPT_BACK = "OF_THE_IMAGE MY_API_KEY SSH_AGENT_PID PATH HOME PYTHONPATH PYTHONHOME"


def test_a_container_has_what_the_run_needs_and_no_more(succeeded):
    """Variables by name, without those of the login or the image; data read-only."""
    docker, _ = succeeded
    for run in runs(docker):
        options = run["options"]
        assert run["image"] == "mlperf-bert"
        assert options["--gpus"] == ["all"]
        assert options["--network"] == options["--ipc"] == ["host"]
        assert options["--user"] == [f"{os.getuid()}:{os.getgid()}"]
        assert "memlock=-1" in options["--ulimit"]
        assert {"--rm", "--init"} <= set(options)
        assert options["--entrypoint"] == [""]
    given = set(runs(docker)[-1]["options"]["--env"])
    assert set(PASSED.split()) <= given
    assert not given & set(KEPT_BACK.split())
    assert "hidden" not in json.dumps(runs(docker))
    own = ("HOME=", "USER=")
    assert not [item for item in given if "=" in item and not item.startswith(own)]
    folder, mounted = docker.root.parent, set(volumes(docker))
    read = (docker.root, folder / "data/packed_data", folder / "data/eval")
    assert {f"{path}:{path}:ro" for path in read} <= mounted
    assert f"{folder / 'results'}:{folder / 'results'}:rw" in mounted
    absent = [volume for volume in mounted if "training-4320" in volume]
    assert not absent, "what does not exist is not mounted"


OUTPUTS = ("CHECKPOINT_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
MOUNTS = "{0}/one:/raw:ro,{0}/two:/raw2,{0}/three:ro,{0}/four,/dev/shm:/dev/shm"


def test_a_site_has_its_own_mounts_folders_and_daemon(docker):
    """Without GPUs, and a daemon that cannot raise limits; every output folder is created and mounted
    before the first trial, or it would end with a rank's container.
    """
    at = docker.root.parent
    for name in ("one", "two", "three", "four"):
        (at / name).mkdir()
    outputs = {name: str(at / "new" / name) for name in OUTPUTS}
    kernels = f"{at}/scratch/kernels"
    # Within what is mounted, and twice what is.
    given = {"INIT_CHECKPOINT": outputs["CHECKPOINT_DIR"], "EVALDIR": f"{at}/results"}
    given |= outputs | {"LOOK_FOR": ":".join(outputs.values())}
    given |= {"KERNEL_CACHE": kernels, "NO_LIMITS": "1"}
    given["CONTAINER_MOUNTS"] = MOUNTS.format(at)
    done = docker.run(after="export DEVICE=cpu", status=0, **given)
    assert "warning: containers start only without the limits memlock" in done.stderr
    for run in runs(docker):
        assert not {"--gpus", "--ulimit"} & set(run["options"])
    expected = {f"{at}/one:/raw:ro", f"{at}/two:/raw2:rw", "/dev/shm:/dev/shm:rw"}
    expected |= {f"{at}/three:{at}/three:ro", f"{at}/four:{at}/four:rw"}
    expected |= {f"{path}:{path}:rw" for path in (kernels, *outputs.values())}
    assert expected <= set(volumes(docker))
    targets = [volume.split(":")[1] for volume in volumes(docker)]
    assert len(targets) == len(set(targets)), "docker refuses a path mounted twice"
    rank = docker.ranks()[0]
    assert rank["SEES"] == [*outputs.values()]
    kept = {name: f"{kernels}/{of}" for name, of in CACHES.items()}
    own = {name: outputs[name] for name in CACHES if name in OUTPUTS}
    assert caches_of(rank) == kept | own


READ = {
    "DEEPSPEED_CONFIG": "ds.json", "BERT_CONFIG": "model/bert_config.json",
    "INIT_CHECKPOINT": "weights/model.safetensors.index.json",
}  # fmt: skip
TASK = {"RANK_MODULE": "finetune", "TASK": "MRPC"}


@pytest.mark.parametrize(("more", "config"), [({}, READ["BERT_CONFIG"]), (TASK, "model")])  # fmt: skip
def test_every_path_that_ranks_read_is_mounted(docker, more, config):
    folder = docker.root.parent / "in"
    for name in READ.values():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    docker.run(**{name: str(folder / path) for name, path in READ.items()}, **more)
    mounted = [folder / path for path in ("ds.json", config, "weights")]
    assert {f"{path}:{path}:ro" for path in mounted} <= set(volumes(docker))


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
