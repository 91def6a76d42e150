"""run.sub by its commands, with stand-ins of Slurm's: what the real one of the test cluster cannot be made to do."""

from __future__ import annotations

from pathlib import Path

import pytest

PYXIS = "--container-image --container-name --container-mounts --container-writable"
SCONTROL = """case "$*" in
  'show config') echo "TaskPlugin = ${TASK_PLUGIN-task/none}" ;;
  'show hostnames'*) echo node0 ;;
  'show node'*) echo 'NodeAddr=127.0.0.1 NodeHostName=node0' ;;
  *) exit 1 ;;
esac"""


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture
def slurm(checkout):
    """A job of one node without gres."""
    checkout.stand_in("srun", (Path(__file__).parent / "fakes" / "srun.sh").read_text())
    checkout.stand_in("scontrol", SCONTROL)
    checkout.env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node0"}
    checkout.env["NCCL_TEST"] = "0"
    return checkout


@pytest.fixture
def pyxis(slurm):
    """The same at paths without spaces, which mount lists know not, with an image and pyxis's options."""
    folder = slurm.root.parent
    slurm.root = slurm.root.rename(folder / "checkout")
    slurm.env |= {"LOGDIR": str(folder / "results"), "PYTHONPATH": str(slurm.root)}
    slurm.env |= {"CONT": "mlperf-bert", "SRUN_HELP": PYXIS}
    return slurm


def test_a_job_is_named_after_its_config_and_number(slurm):
    done = slurm.run("./run.sub", DATESTAMP="today")
    assert done.returncode == 0, done.stderr
    assert slurm.run_dir.name == "P8000H100_1x8x48x1_pack_today_7"
    assert {rank["WORLD_SIZE"] for rank in slurm.ranks()} == {"2"}


def test_outside_a_job_it_says_how_to_submit(slurm):
    del slurm.env["SLURM_JOB_ID"]
    done = slurm.run("./run.sub")
    assert done.returncode == 2
    assert last_line(done.stderr) == (
        "run: error: run.sub runs in a Slurm job: sbatch -N 1 run.sub; without Slurm, ./run_local.sh"
    )


@pytest.mark.parametrize(
    ("wanted", "listed", "broken", "used"),
    [
        ("pmix", "none pmi2 pmix", "", "pmix"),
        ("pmix", "none pmi2 pmix", "pmix", "pmi2"),
        ("pmix", "none pmi2 pmix", "pmix pmi2", "none"),
        ("pmix", "none", "", "none"),
        ("", "none pmi2", "pmi2", "none"),
    ],
)
def test_an_mpi_type_is_used_only_when_a_step_starts_with_it(slurm, wanted, listed, broken, used):
    settings = {"SLURM_MPI_TYPE": wanted, "SRUN_MPI": listed, "SRUN_BROKEN": broken}
    done = slurm.run("./run.sub", **settings)
    assert done.returncode == 0, done.stderr
    training = next(call for call in slurm.calls("srun") if "rank.sh" in call and "--kill-on-bad-exit" in call)
    assert f"'--mpi={used}'" in training
    assert ("warning: SLURM_MPI_TYPE=" in done.stderr) == (bool(wanted) and wanted != used)


@pytest.mark.parametrize(("plugin", "bound"), [("task/affinity,task/cgroup", True), ("task/cgroup", False)])
def test_slurms_own_binding_is_switched_off_where_there_is_one(slurm, plugin, bound):
    done = slurm.run("./run.sub", TASK_PLUGIN=plugin)
    assert done.returncode == 0, done.stderr
    steps = [call for call in slurm.calls("srun") if "--ntasks" in call and "true" not in call]
    assert all(("'--cpu-bind=none'" in call) == bound for call in steps)


def test_what_sbatch_was_told_does_not_reach_the_steps(slurm):
    told = {"SLURM_GPUS_PER_TASK": "1", "SLURM_CPU_BIND": "cores", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    slurm.stand_in("srun", 'env | grep -E "^SLURM_(GPUS_PER_TASK|CPU_BIND|NTASKS_PER_NODE)=" >&2 && exit 1\n' + srun())
    done = slurm.run("./run.sub", **told)
    assert done.returncode == 0, done.stderr


def srun() -> str:
    return (Path(__file__).parent / "fakes" / "srun.sh").read_text()


def test_an_image_without_pyxis_ends_the_job_with_the_ways_out(pyxis):
    done = pyxis.run("./run.sub", SRUN_HELP="  --overlap")
    assert done.returncode == 2
    assert last_line(done.stderr) == (
        "run: error: CONTAINER_RUNTIME=pyxis: srun has no option --container-image: install pyxis, "
        "take CONTAINER_RUNTIME=apptainer, or CONT='' to run straight on the nodes"
    )


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("bert.sif", "an image of Apptainer: set CONTAINER_RUNTIME=apptainer"),
        ("dockerd://mlperf-bert", "only this node has it: enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert"),
    ],
)
def test_images_that_pyxis_cannot_take_are_refused_with_the_cure(pyxis, image, reason):
    done = pyxis.run("./run.sub", CONT=image)
    assert done.returncode == 2
    assert reason in last_line(done.stderr)


def test_a_path_that_mount_lists_cannot_say_is_refused(pyxis):
    done = pyxis.run("./run.sub", DATADIR="/data/with,comma")
    assert done.returncode == 2
    assert "a path that is mounted in a container has no space, comma or colon" in last_line(done.stderr)


def test_a_slurm_whose_steps_cannot_share_a_node_is_told_of_the_container_that_stays(pyxis):
    done = pyxis.run("./run.sub", SRUN_NO_OVERLAP="1", CLEAR_CACHES="0")
    assert done.returncode == 0, done.stderr
    assert "run: warning: no step can run beside another (srun --overlap): container bert_7_0 stays" in done.stderr


def test_the_guard_of_the_containers_ends_with_the_job(pyxis):
    pyxis.stand_in("enroot", "if [[ $1 == list ]]; then echo pyxis_bert_7_0; echo pyxis_bert_70_0; fi")
    done = pyxis.run("./run.sub")
    assert done.returncode == 0, done.stderr
    assert [call for call in pyxis.calls("enroot") if call != "'list'"] == ["'remove' '--force' '--' 'pyxis_bert_7_0'"]
