"""run.sub with a container image on a real Slurm, whose pyxis is a stand-in with real mount
namespaces.
"""

from __future__ import annotations

import subprocess

import pytest

from ..waiting import wait_until
from .captured import captured
from .test_trial import processes

pytestmark = pytest.mark.slurm

TWO_NODES = "export DGXNNODES=2 DGXNGPU=2"
OTHERS = ["dgx1/pyxis_mine_99999_0", "dgx2/pyxis_other"]
ENROOT = """
folder=$PYXIS_TEST/enroot/$SLURMD_NODENAME
case $1 in
  list) ls "$folder" 2>/dev/null ;;
  remove) rm -r "$folder/${*: -1}" && echo 'removed, which nobody wants to read' ;;
esac
"""


@pytest.fixture
def pyxis(slurm):
    """The cluster with an image, data and somebody else's container on each node."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mount namespaces need CAP_SYS_ADMIN")
    folder = slurm.folder
    checkout = slurm.checkout.without_spaces() / "checkout"
    (folder / "image.sqsh").touch()
    names = ("packed_data", "eval", "phase1", "results")
    for name in (*(f"data/{name}" for name in names), "home", *OTHERS):
        (folder / name.replace("dgx", "enroot/dgx")).mkdir(parents=True)
    slurm.checkout.stand_in("enroot", ENROOT)
    slurm.checkout.env |= {
        "PYXIS_TEST": str(folder),
        "CONT": str(folder / "image.sqsh"),
        "DATADIR": str(folder / "data"),
        "LOGDIR": str(checkout / "results"),  # inside what is mounted read-only
        "INIT_CHECKPOINT": "",
        "HOME": str(folder / "home"),
    }
    return slurm


def containers(slurm) -> list[str]:
    """Containers that remain on the nodes."""
    folder = slurm.folder / "enroot"
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))


def made(slurm) -> list[list[str]]:
    """Node, name and image of each container that was created."""
    calls = slurm.checkout.calls("pyxis")
    return [call.split()[1:] for call in calls if call.startswith("create ")]


def test_one_container_per_node_is_created_used_by_all_ranks_and_removed(pyxis):
    look_for = [
        pyxis.folder / "data" / name
        for name in ("packed_data", "eval", "phase1", "results")
    ]
    look_for += [
        pyxis.checkout.root / "run.sub", pyxis.folder / "home", pyxis.folder / "image.sqsh",
    ]  # fmt: skip
    job = pyxis.run(
        after=f"{TWO_NODES} NEXP=2", LOOK_FOR=":".join(map(str, look_for)), status=0
    )
    name, image = f"bert_{job.number}_0", pyxis.folder / "image.sqsh"
    assert sorted(made(pyxis)) == [
        ["dgx1", name, str(image)],
        ["dgx2", name, str(image)],
    ]
    ranks = pyxis.checkout.ranks()
    assert sorted((rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks) == sorted(
        (str(number), str(number % 2)) for number in [0, 1, 2, 3] * 2
    )
    assert {rank["INSIDE"] for rank in ranks} == {name}
    assert {tuple(rank["SEES"]) for rank in ranks} == {
        tuple(str(path) for path in [*look_for[:3], pyxis.checkout.root / "run.sub"])
    }, "inside are the data, the weights and the repository, and no home folder"
    assert containers(pyxis) == OTHERS, "only this job's containers are removed"


def test_containers_of_dead_jobs_are_removed_first_and_those_of_running_jobs_stay(
    pyxis,
):
    """Containers stay after a power loss, or if KillWait cuts the removal short."""
    living = captured(["sbatch", "--parsable", "--hold", "--wrap=true"], check=True)
    stays = f"dgx1/pyxis_bert_{living.stdout.strip()}_0"
    for name in (stays, "dgx1/pyxis_bert_99999_0", "dgx2/pyxis_bert_99999_1"):
        (pyxis.folder / name.replace("dgx", "enroot/dgx")).mkdir()
    pyxis.run(after=TWO_NODES, status=0)
    assert containers(pyxis) == sorted([*OTHERS, stays])


def test_scancel_while_leftovers_are_removed_is_reported_in_the_last_line(pyxis):
    there = pyxis.folder / "there"
    slow = f"remove) touch {there}; exec -a {pyxis.folder}/slow sleep 900; "
    pyxis.checkout.stand_in("enroot", ENROOT.replace("remove) ", slow))
    (pyxis.folder / "enroot/dgx1/pyxis_bert_99999_0").mkdir()
    job = pyxis.submit(after=TWO_NODES)
    job.wait_for(there.exists)
    job.cancel()
    job.wait()
    expected = "run: dgx1: removing pyxis_bert_99999_0, left by a job that has ended"
    assert expected in job.output
    assert job.last_line.startswith("run: error: the job was cancelled")
    wait_until(lambda: not processes(pyxis.folder / "slow"))


def test_a_missing_checkpoint_folder_is_created_and_mounted(pyxis):
    checkpoints = pyxis.folder / "disk" / "checkpoints"
    pyxis.run(
        after="export DGXNGPU=1", CHECKPOINT_DIR=str(checkpoints), LOOK_FOR=str(checkpoints),
    status=0)  # fmt: skip
    assert pyxis.checkout.ranks()[0]["SEES"] == [str(checkpoints)]
    assert f"{checkpoints}:{checkpoints}:rw" in pyxis.checkout.calls("pyxis")[-1]


def test_what_the_image_and_its_hooks_set_does_not_misplace_the_ranks(pyxis):
    pyxis.run(after=TWO_NODES, status=0)
    ranks = pyxis.checkout.ranks()
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"127.0.0.1"}
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert "1" not in {rank["MASTER_PORT"] for rank in ranks}


def test_every_step_has_the_same_options_for_home_root_and_mounts(pyxis):
    pyxis.run(after="export DGXNGPU=2", status=0)
    starts = [
        call for call in pyxis.checkout.calls("pyxis") if call.startswith("start ")
    ]
    assert len(starts) >= 4  # made, checked, trained, reviewed
    data = pyxis.folder / "data"
    for start in starts:
        assert "home=0 root=1 writable=1" in start
        for name in ("packed_data", "eval", "phase1"):
            assert f"{data / name}:{data / name}:ro" in start
        assert f"{pyxis.checkout.root}:{pyxis.checkout.root}:ro" in start
    results = pyxis.checkout.logdir
    assert [f"{results}:{results}:rw" in start for start in starts] == [
        False,
        False,
    ] + [True] * (len(starts) - 2)


@pytest.mark.parametrize("outcome", ["crash:1", "kill:2", "not-reached"])
def test_the_containers_of_a_failed_job_are_removed(pyxis, outcome):
    job = pyxis.run(after=TWO_NODES, TRIAL_0=outcome, status=1)
    assert job.last_line.startswith("run: error: 1 of 1 trials failed: trial 0: ")
    assert containers(pyxis) == OTHERS


def test_scancel_removes_the_containers(pyxis):
    job = pyxis.submit(after=TWO_NODES, TRIAL_0="hang")
    job.wait_for(lambda: list(pyxis.checkout.logdir.glob("*/running_0/result_0.txt")))
    assert len(containers(pyxis)) == 4
    job.cancel()
    job.wait()
    job.wait_for(lambda: containers(pyxis) == OTHERS)


def test_a_requeued_job_has_a_new_container(pyxis):
    job = pyxis.submit(after=TWO_NODES, TRIAL_0="hang")
    job.wait_for(lambda: list(pyxis.checkout.logdir.glob("*/running_0/result_0.txt")))
    job.requeue()
    job.wait()
    assert job.exit_code == 0, job.output
    assert {name for _, name, _ in made(pyxis)} == {
        f"bert_{job.number}_0",
        f"bert_{job.number}_1",
    }
    assert containers(pyxis) == OTHERS


def test_an_image_that_cannot_be_imported_ends_the_job_in_one_line(pyxis):
    job = pyxis.run(CONT="mlperf-bert", status=2)
    reason = (
        "[ERROR] URL https://auth.docker.io/token returned error code: 401 Unauthorized"
    )
    expected = f"run: error: CONT=mlperf-bert: its container could not be created on every node: {reason}"
    assert job.last_line == expected
    assert containers(pyxis) == OTHERS


def test_a_missing_image_file_ends_the_job_before_any_container(pyxis):
    job = pyxis.run(CONT="missing.sqsh", status=2)
    expected = f"run: error: CONT={pyxis.checkout.root / 'missing.sqsh'}: no such image: enroot import"
    assert job.last_line.startswith(expected)
    assert not pyxis.checkout.calls("pyxis")


def test_registry_images_are_named_in_enroots_syntax(pyxis):
    pyxis.run(
        CONT="docker://nvcr.io/nvidia/pytorch:25.04-py3",
        after="export DGXNGPU=1",
        status=0,
    )
    assert [image for *_, image in made(pyxis)] == ["nvcr.io#nvidia/pytorch:25.04-py3"]


def test_site_mounts_are_mounted(pyxis):
    (pyxis.folder / "scratch").mkdir()
    look_for = str(pyxis.folder / "scratch")
    other = str(pyxis.folder / "elsewhere")
    mounts = f"{look_for}:ro,/dev/shm,{look_for}:{other}:ro"
    pyxis.run(
        after="export DGXNGPU=1", CONTAINER_MOUNTS=mounts, LOOK_FOR=f"{look_for}:{other}",
    status=0)  # fmt: skip
    assert pyxis.checkout.ranks()[0]["SEES"] == [look_for, other]


def test_a_restart_on_the_spare_has_a_container_of_its_own_and_leaves_none(pyxis):
    """The name of the container is readonly in the script that made it."""
    job = pyxis.run(
        "-N2", after="export DGXNGPU=2 SPARE_NODES=1 START_TEST=1 NCCL_TEST=0", UNFIT="dgx1",
    status=0)  # fmt: skip
    assert [call[:2] for call in made(pyxis)] == [
        ["dgx1", f"bert_{job.number}_0"],
        ["dgx2", f"bert_{job.number}_0_1"],
    ]
    assert containers(pyxis) == OTHERS
