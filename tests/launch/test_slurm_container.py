"""run.sub in an image on a real Slurm, whose pyxis is a stand-in with real mount namespaces."""

import re
import subprocess

import pytest

from .captured import captured

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
        "PYXIS_TEST": str(folder), "CONT": str(folder / "image.sqsh"), "DATADIR": str(folder / "data"),
        "LOGDIR": str(checkout / "results"),  # inside what is mounted read-only
        "INIT_CHECKPOINT": "", "HOME": str(folder / "home"),
    }  # fmt: skip
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
    """Inside are the data, the weights, the repository, a site's mounts and a folder of checkpoints that
    is made, and no home folder; what the image and its hooks set misplaces no rank.
    """
    root, data = pyxis.checkout.root, pyxis.folder / "data"
    scratch, other = pyxis.folder / "scratch", pyxis.folder / "elsewhere"
    scratch.mkdir()
    checkpoints = pyxis.folder / "disk" / "checkpoints"
    read = [data / name for name in ("packed_data", "eval", "phase1")]
    seen = [*read, root / "run.sub", checkpoints, scratch, other]
    hidden = [data / "results", pyxis.folder / "home", pyxis.folder / "image.sqsh"]
    given = {"LOOK_FOR": ":".join(map(str, seen + hidden))}
    given |= {"CONTAINER_MOUNTS": f"{scratch}:ro,/dev/shm,{scratch}:{other}:ro"}
    given |= {"CHECKPOINT_DIR": str(checkpoints)}
    job = pyxis.run(after=f"{TWO_NODES} NEXP=2", status=0, **given)
    name, image = f"bert_{job.number}_0", str(pyxis.folder / "image.sqsh")
    assert sorted(made(pyxis)) == [[node, name, image] for node in ("dgx1", "dgx2")]
    ranks = pyxis.checkout.ranks()
    numbers = sorted((rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks)
    assert numbers == sorted((str(n), str(n % 2)) for n in [0, 1, 2, 3] * 2)
    shown = ("INSIDE", "MASTER_ADDR", "WORLD_SIZE")
    found = {tuple(rank[name] for name in shown) for rank in ranks}
    assert found == {(name, "127.0.0.1", "4")}
    assert "1" not in {rank["MASTER_PORT"] for rank in ranks}
    assert {tuple(rank["SEES"]) for rank in ranks} == {tuple(map(str, seen))}
    starts = [call for call in pyxis.checkout.calls("pyxis") if call.startswith("start ")]  # fmt: skip
    assert len(starts) >= 4  # made, checked, trained, reviewed
    for start in starts:
        assert "home=0 root=1 writable=1" in start
        for path in (*read, root):
            assert f"{path}:{path}:ro" in start
    results = pyxis.checkout.logdir
    writable = [f"{results}:{results}:rw" in start for start in starts]
    assert writable == [False, False] + [True] * (len(starts) - 2)
    assert f"{checkpoints}:{checkpoints}:rw" in starts[-1]
    assert containers(pyxis) == OTHERS, "only this job's containers are removed"


def test_containers_of_dead_jobs_are_removed_first_and_others_stay(pyxis):
    """Containers stay after a power loss, or if KillWait cuts the removal short."""
    living = captured(["sbatch", "--parsable", "--hold", "--wrap=true"], check=True)
    stays = f"dgx1/pyxis_bert_{living.stdout.strip()}_0"
    for name in (stays, "dgx1/pyxis_bert_99999_0", "dgx2/pyxis_bert_99999_1"):
        (pyxis.folder / name.replace("dgx", "enroot/dgx")).mkdir()
    pyxis.run(after=TWO_NODES, status=0)
    assert containers(pyxis) == sorted([*OTHERS, stays])


def test_the_containers_of_a_failed_job_are_removed(pyxis):
    outcomes = {"TRIAL_0": "crash:1", "TRIAL_1": "kill:2", "TRIAL_2": "not-reached"}
    job = pyxis.run(after=f"{TWO_NODES} NEXP=3", status=1, **outcomes)
    assert job.last_line.startswith("run: error: 3 of 3 trials failed: trial 0: ")
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
    names = {name for _, name, _ in made(pyxis)}
    assert names == {f"bert_{job.number}_0", f"bert_{job.number}_1"}
    assert containers(pyxis) == OTHERS


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("mlperf-bert", "mlperf-bert: its container could not be created on every node: [ERROR] URL https://auth.docker.io/token returned error code: 401 Unauthorized"),
        ("missing.sqsh", "{root}/missing.sqsh: no such image: enroot import"),  # before any container
    ],
)  # fmt: skip
def test_an_image_that_is_not_there_ends_the_job_in_one_line(pyxis, image, why):
    job = pyxis.run(CONT=image, status=2)
    said = why.format(root=pyxis.checkout.root)
    assert job.last_line.startswith(f"run: error: CONT={said}")
    assert containers(pyxis) == OTHERS
    assert bool(pyxis.checkout.calls("pyxis")) <= (image == "mlperf-bert")


def test_registry_images_are_named_in_enroots_syntax(pyxis):
    image = "docker://nvcr.io/nvidia/pytorch:25.04-py3"
    pyxis.run(CONT=image, after="export DGXNGPU=1", status=0)
    assert [image for *_, image in made(pyxis)] == ["nvcr.io#nvidia/pytorch:25.04-py3"]


def test_a_restart_on_the_spare_has_a_container_of_its_own_and_leaves_none(pyxis):
    """The name of the container is readonly in the script that made it."""
    after = "export DGXNGPU=2 SPARE_NODES=1 START_TEST=1 NCCL_TEST=0"
    job = pyxis.run("-N2", after=after, UNFIT="dgx1", status=0)
    why = "without dgx1: the start test: fail: node dgx1: slow; the trial is repeated"
    assert f"run: warning: restarts on dgx2, {why}\n" in job.output
    ends = rf"\nrun: restarted at \S+, {why}\nrun: the trial reached the target: .*\n$"
    assert re.search(ends, job.output)
    assert {rank["SLURMD_NODENAME"] for rank in pyxis.checkout.ranks()} == {"dgx2"}
    name = f"bert_{job.number}_0"
    assert [call[:2] for call in made(pyxis)] == [["dgx1", name], ["dgx2", f"{name}_1"]]
    assert containers(pyxis) == OTHERS
