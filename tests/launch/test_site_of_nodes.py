"""What a site may be, on a real Slurm of separate nodes with stand-ins for pyxis and the trainer."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..waiting import wait_until
from .captured import captured
from .conftest import FAKES, OVER, Slurm, make_checkout
from .nodes import Nodes, pyxis, running
from .test_slurm_container import ENROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

NODES = 3
# Slurm can limit a step here.
LIMITED = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes"
LIMITS = os.access("/sys/fs/cgroup/memory", os.W_OK)


@pytest.fixture(scope="module")
def nodes(repository, tmp_path_factory) -> Iterator[Nodes]:
    """Three nodes with capital names, the last with half the CPUs, each with its own list of Slurm's plugins."""
    folder = tmp_path_factory.mktemp("nodes")
    stack = pyxis(folder, FAKES / "pyxis.sh")
    (folder / "empty.conf").touch()
    # Another file system than the checkout's, which all nodes see.
    (folder / "scratch").mkdir()
    mount = ["mount", "-t", "tmpfs", "scratch", str(folder / "scratch")]
    subprocess.run(mount, check=False)
    how = {"EXTRA": f"PlugStackConfig={stack}", "NAME": "DGX", "LAST_CPUS": "4"}
    if LIMITS:
        how |= {"TASK_PLUGIN": "task/cgroup", "CGROUP": LIMITED}
    with running(repository, folder, NODES, **how) as made:
        yield made
    subprocess.run(["umount", str(folder / "scratch")], check=False)


@pytest.fixture
def slurm(nodes: Nodes, repository: Path, tmp_path: Path) -> Iterator[Slurm]:
    """A user's checkout with stand-ins, and a container image."""
    checkout = make_checkout(repository, tmp_path)
    checkout.root = checkout.root.rename(tmp_path / "checkout")  # mounts know no space
    checkout.stand_in("enroot", ENROOT)
    for name in ("data/packed_data", "data/eval", "data/phase1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "image.sqsh").touch()
    checkout.env |= {
        "SLURM_CONF": nodes.environ["SLURM_CONF"], "SBATCH_TIMELIMIT": "10", "PYXIS_TEST": str(tmp_path),
        "CONT": str(tmp_path / "image.sqsh"), "DATADIR": str(tmp_path / "data"), "LOGDIR": str(tmp_path / "results"),
        "PYTHONPATH": str(checkout.root), "INIT_CHECKPOINT": "",
    }  # fmt: skip
    yield Slurm(checkout, tmp_path)
    subprocess.run(["scancel", "--full", "--user", "root"], check=False)


@pytest.fixture
def without_pyxis(nodes: Nodes) -> Iterator[str]:
    """A node whose Slurm loads no plugin, as after an update of half of the cluster."""
    stack = nodes.folder / "plugstack.conf"
    words = ("mount", "--bind", str(nodes.folder / "empty.conf"), str(stack))
    assert nodes.enter("DGX2", *words).returncode == 0
    yield "DGX2"
    nodes.enter("DGX2", "umount", str(stack))


def names(ranks: list[dict]) -> list[str]:
    return sorted(rank["SLURMD_NODENAME"] for rank in ranks)


def test_a_node_without_the_plugin_is_left_out_by_name(slurm, without_pyxis):
    """Its ranks would run on the host, in silence."""
    two_of_three = "export DGXNNODES=2 DGXNGPU=1 SPARE_NODES=1"
    job = slurm.run("-N3", after=two_of_three, status=0)
    ranks = slurm.checkout.ranks()
    assert names(ranks) == ["DGX1", "DGX3"]
    assert all(rank["INSIDE"].startswith("bert_") for rank in ranks)
    assert f"without {without_pyxis}: CONT=" in job.output


def test_without_spare_nodes_it_ends_the_run_by_name(slurm, without_pyxis):
    job = slurm.run("-N2", after="export DGXNNODES=2 DGXNGPU=1")
    assert job.exit_code == 1 or job.exit_code == 2
    assert not slurm.checkout.ranks()
    assert without_pyxis in job.last_line
    assert "outside the container" in job.last_line


@pytest.fixture
def bare(slurm: Slurm) -> Slurm:
    """Without containers."""
    slurm.checkout.env["CONT"] = ""
    return slurm


@pytest.mark.parametrize("place", ["relative", "scratch"])
def test_results_may_be_relative_or_on_another_file_system(nodes, bare, place):
    """On nodes of different sizes."""
    logdir = {"relative": "some/results", "scratch": str(nodes.folder / "scratch")}
    kept = {"LOGDIR": logdir[place], "CHECKPOINT_DIR": str(bare.folder / "kept")}
    bare.run("-N3", after="export DGXNNODES=3 DGXNGPU=2", status=0, **kept)
    every = ["DGX1", "DGX1", "DGX2", "DGX2", "DGX3", "DGX3"]
    assert names(bare.checkout.ranks()) == every
    results = bare.checkout.root / logdir[place]
    assert len(list(results.glob("*/result_0.txt"))) == 1


@pytest.mark.skipif(not LIMITS, reason="no control groups that this user may make")
def test_a_rank_for_which_its_steps_memory_is_too_small_says_so(bare):
    greedy = {"TRIAL_0": "greedy:1", "RUN_NAME": "small"}
    after = "export DGXNNODES=2 DGXNGPU=1"
    job = bare.run("-N2", "--mem=300", after=after, status=1, **greedy)
    assert "trial 0: rank 1 on DGX2 was killed by SIGKILL" in job.last_line
    assert "sbatch --mem" in job.last_line


@pytest.mark.parametrize(
    ("blind", "spares", "said"),
    [
        ("DGX2", 1, "without DGX2: DGX2 does not see "),
        ("DGX2", 0, "run: error: DGX2 does not see "),
        ("DGX1", 0, "run: error: DGX1 sees no repository in "),
    ],
)
def test_a_node_without_the_checkout_is_named(nodes, bare, blind, spares, said):
    root = str(bare.checkout.root)
    assert nodes.enter(blind, "mount", "-t", "tmpfs", "none", root).returncode == 0
    after = f"export DGXNNODES=2 DGXNGPU=1 SPARE_NODES={spares}"
    job = bare.run(f"-N{2 + spares}", after=after)
    nodes.enter(blind, "umount", root)
    assert job.exit_code == (0 if spares else 2), job.output
    assert said in (job.output if spares else job.last_line)
    assert len(bare.checkout.ranks()) == 2 * spares


def states(slurm: Slurm, number: int) -> list[str]:
    """State of each task of an array."""
    words = ["scontrol", "--oneliner", "show", "job", str(number)]
    shown = captured(words, check=True).stdout
    return re.findall(r"JobState=(\S+)", shown)


def test_each_task_of_a_job_array_runs_on_its_own_nodes(bare):
    """The last task has the number of the array, which names all of them."""
    job = bare.submit("--array=0-2", "-N1", after="export DGXNNODES=1 DGXNGPU=1")
    wait_until(lambda: set(states(bare, job.number)) <= set(OVER))
    assert states(bare, job.number) == 3 * ["COMPLETED"], job.output
    assert len(bare.checkout.ranks()) == 3


def test_a_task_of_an_array_that_is_requeued_leaves_the_others_alone(bare):
    """As at its time limit, with a checkpoint to resume."""
    hangs = {"TRIAL_0": "hang", "RESUME": "1", "CHECKPOINT_DIR": str(bare.folder)}
    job = bare.submit("--array=0-1", "-N1", after="export DGXNGPU=1", **hangs)
    logs = bare.folder / "results"
    wait_until(lambda: len(list(logs.glob("*/running_0/result_0.txt"))) == 2)
    last = f"{job.number}_1"
    subprocess.run(["scancel", "--batch", "--signal=USR1", last], check=True)
    wait_until(lambda: "PENDING" in states(bare, job.number))
    assert sorted(states(bare, job.number)) == ["PENDING", "RUNNING"], job.output


# What pyxis 0.24 leaves in a job script that sbatch --container-image runs in the image, where the repository is mounted.
PYXIS_IMAGE = "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image"
REFUSED = {
    "a heterogeneous job": (["-N1", ":", "-N1"], "heterogeneous"),
    "sbatch in a container": ([f"--export=ALL,{PYXIS_IMAGE}=an_image"], "an_image"),
    "no exports": (["--export=NONE"], "--export=NONE"),
    "no scontrol": (["--export=ALL,PATH={folder}/bin:{folder}/few"], "scontrol"),
}


@pytest.mark.parametrize(("options", "word"), REFUSED.values(), ids=REFUSED)
def test_a_job_that_cannot_run_says_the_true_reason_in_one_line(bare, options, word):
    few = bare.folder / "few"  # a PATH without Slurm's commands
    few.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if program.name not in ("scontrol", "sinfo"):
                (few / program.name).unlink(missing_ok=True)
                (few / program.name).symlink_to(program)
    words = [word.format(folder=bare.folder) for word in options]
    job = bare.submit(*words, after="export DGXNNODES=1 DGXNGPU=1").wait()
    assert job.exit_code == 2, job.output
    assert job.last_line.startswith("run: error: ")
    assert word in job.last_line
    errors = [line for line in job.output.splitlines() if "error" in line]
    assert len(errors) == 1, job.output


KIN = ["--ntasks-per-node=1", "--ntasks-per-socket=1", "--ntasks-per-core=1"]  # fmt: skip
PROFILE = {"SLURM_NTASKS_PER_GPU": "1", "SLURM_LABELIO": "1", "SLURM_WAIT": "1", "SLURM_CPUS_PER_GPU": "2", "SLURM_EXACT": "1"}  # fmt: skip


def test_options_of_sbatch_and_of_a_profile_do_not_reach_the_steps(bare):
    bare.run(*KIN, "-N2", after="export DGXNNODES=2 DGXNGPU=2", status=0, **PROFILE)
    assert len(bare.checkout.ranks()) == 4
