"""Fine-tuning starts like every run: a trial is a seed, and the last line has the result of all."""

import shutil

import pytest

from . import platforms
from .captured import Done, captured
from .platforms import SSH

SCRIPT = "./run_finetuning.sh"


@pytest.fixture
def site(checkout):
    """The checkout, with data and weights at paths without spaces."""
    folder = checkout.without_spaces()
    names = ("data/squad/dev-v1.1.json", "weights/model.safetensors", "weights/vocab.txt")  # fmt: skip
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    checkout.env["NCCL_TEST"] = "0"
    return checkout


def finetune(site, *words: str, status: int | None = None, **env: str) -> Done:
    weights = f"{site.root.parent}/weights/model.safetensors"
    paths = [f"DATA={site.root.parent}/data/squad", f"INIT_CHECKPOINT={weights}"]
    command = [SCRIPT, *words, *(paths if words else ())]
    return captured(command, status, cwd=site.root, env=site.env | env)


def test_every_seed_is_a_trial_runs_once_and_is_not_taken_for_another(site):
    seeds = ("squad", "SEEDS=4,7", "RUN_NAME=r", "DGXNGPU=2")
    done = finetune(site, *seeds, status=0)
    assert done.last_line == f"run: all 2 trials are complete: {site.run_dir}"
    assert done.stdout.splitlines()[-1] == f"seeds of {site.run_dir}"
    ranks = site.ranks()
    numbers = [(rank["TRIAL"], rank["RANK"]) for rank in ranks]
    assert sorted(numbers) == [(t, r) for t in "01" for r in "01"]
    assert {(rank["TASK"], rank["SEEDS"]) for rank in ranks} == {("squad", "4,7")}
    models = {path.name for path in site.run_dir.glob("model_*")}
    assert models == {"model_0", "model_1"}
    # Nothing of the folders in which trials run, nor of a check of timed pretraining.
    assert not [*site.run_dir.glob("running_*"), *site.run_dir.glob("compliance_*")]
    finetune(site, *seeds, status=0)
    topology = (site.run_dir / "topology.txt").stat().st_mtime_ns
    for trial, seed in (("0", "3"), ("1", "4")):
        done = finetune(site, *seeds, FINISHED=f"another:{trial}", SEED="3", status=2)
        why = f"trial {trial} is of a run with SEED {seed}"
        assert done.last_line == f"run: error: this configuration cannot run: {why}"
    assert (site.run_dir / "topology.txt").stat().st_mtime_ns == topology
    assert len(site.ranks()) == 4


def test_a_start_test_leaves_fine_tuning_nothing_of_its_own_settings(site):
    """MAX_STEPS would be refused, and a length is the task's."""
    done = finetune(site, "squad", START_TEST="1", status=0)
    assert "run: start test: certify" in done.stderr
    (rank,) = site.ranks()
    assert (rank["MAX_STEPS"], rank["MAX_SEQ_LENGTH"]) == (None, None)


def test_a_seed_that_fails_gives_its_reason_last_and_is_the_one_that_continues(site):
    words = ("squad", "SEEDS=4,7,9", "RUN_NAME=r")
    done = finetune(site, *words, TRIAL_1="crash", status=1)
    failed = "1 of 3 trials failed: trial 1: the loss is nan at step 3"
    assert done.last_line == f"run: error: {failed}"
    finetune(site, *words, status=0)
    assert [rank["TRIAL"] for rank in site.ranks()] == ["0", "1", "2", "1"]


def test_a_run_without_seeds_takes_its_trials_from_nexp(site):
    """One that was asked to stop is not complete."""
    words = ("glue", "TASK=MRPC", "NEXP=2", "SEED=5")
    done = finetune(site, *words, TRIAL_1="stopped", status=1)
    stopped = "trial 1: stopped at step 7 (STEPS_THIS_RUN); RESUME=1 continues"
    assert done.last_line.endswith(stopped)
    trials = [(rank["TRIAL"], rank["SEED"]) for rank in site.ranks()]
    assert trials == [("0", "5"), ("1", "6")]
    assert site.run_dir.name.startswith("finetune_MRPC_")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("squad", "batch"), "batch: expected NAME=VALUE"),
        (("glue", "task=TSV"), "task=TSV: expected NAME=VALUE; did you mean TASK=TSV?"),
        (("TASK=MRPC",), "TASK=MRPC: expected squad, glue or ner first"),
        (("squad", "--docker"), "--docker: expected NAME=VALUE"),
        (("glue", "--slurm"), "--slurm: expected NAME=VALUE"),
        (("squad", "BATCHSZIE=3"), "did you mean BATCHSIZE"),
        (("squad", "REHEARSAL=1"), "REHEARSAL=1 compares with published runs of pretraining: unset it"),
        (("squad", "POWER=1"), "POWER=1 measures the power of timed runs of pretraining: unset it"),
        (("squad", "STAGE_DIR=/tmp/x"), "STAGE_DIR copies the records of pretraining: unset it"),
        (("squad", "SEEDS=1,2", "NEXP=3"), "NEXP=3 and SEEDS=1,2: a seed is a trial; unset NEXP"),
        (("glue", "TASK=RTE", "NUM_EPOCHS=5"), "did you mean EPOCHS?"),
        (("glue", "TASK=RTE", "NUM_TRAIN_EPOCHS=5"), "did you mean EPOCHS?"),
        (("glue", "TASK=RTE", "MAX_LENGTH=64"), "did you mean MAX_SEQ_LENGTH?"),
        (("glue", "TASK=RTE", "MAX_LEN=64"), "did you mean MAX_SEQ_LENGTH?"),
        (("glue", "TASK=RTE", "OUTPUT_DIR=/tmp"), "did you mean LOGDIR?"),
        (("glue", "TASK=RTE", "XYZZY=3"), "XYZZY: no such setting: docs/variables.md"),
        (("squad", "KEEP_BEST=1"), "KEEP_BEST is gone: the last epoch is kept"),
        (("squad", "TASK=table"), "squad TASK=table: ./run_finetuning.sh glue"),
        (("glue", "TASK=squad"), "glue TASK=squad: ./run_finetuning.sh squad"),
        (("ner", "TASK=squad"), "ner TASK=squad: ./run_finetuning.sh squad"),
        (("ner", "TASK=RTE"), "ner TASK=RTE: ./run_finetuning.sh glue TASK=RTE"),
        (("glue", "TASK=ner"), "glue TASK=ner: ./run_finetuning.sh ner"),
        (("squad", "LR=fast"), "this configuration cannot run: LR='fast': expected a number"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(site, words, message):
    check = "bad" if "LR=fast" in words else ""
    done = finetune(site, *words, CHECK=check, status=2)
    assert message in done.last_line
    assert not site.logdir.exists()
    assert not site.ranks()


def test_without_slurm_a_job_is_refused(site):
    programs = site.root.parent / "programs"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name))
    done = finetune(site, "--slurm", "squad", PATH=str(programs), status=2)
    assert done.last_line == "run: error: --slurm: no sbatch here"


def test_without_a_kind_it_prints_its_usage(site):
    usage = "./run_finetuning.sh squad INIT_CHECKPOINT="
    assert usage in finetune(site, status=2).stderr
    assert usage in finetune(site, "glue", "--help", status=0).stdout


def test_a_container_mounts_the_data_and_the_files_beside_the_weights(site):
    folder = site.with_containers("docker")
    files = ("data/squad/dev-v1.1.json", "weights/vocab.txt")
    seen = ":".join(f"{folder}/{name}" for name in files)
    phase1 = f"CHECKPOINTDIR_PHASE1={folder}/weights"
    done = finetune(site, "--docker", "squad", phase1, CONT="mlperf-bert", LOOK_FOR=seen, status=0)  # fmt: skip
    assert done.last_line == f"run: all 1 trials are complete: {site.run_dir}"
    (rank,) = site.ranks()
    assert len(rank["SEES"]) == 2
    calls = site.recorded("docker")
    (training,) = [c for c in calls if "rank.sh" in " ".join(c.get("command", []))]
    volumes = training["options"]["--volume"]
    assert len(volumes) == len(set(volumes)), "docker refuses one that is named twice"


def test_on_several_machines_all_ranks_are_one_world(site):
    site.stand_in("ssh", SSH)
    words = ("--ssh", "squad", "DGXNNODES=2", "DGXNGPU=2")
    done = finetune(site, *words, HOSTS="dgx1 dgx2", status=0)
    assert done.last_line == f"run: all 1 trials are complete: {site.run_dir}"
    ranks = site.ranks()
    assert sorted(rank["RANK"] for rank in ranks) == list("0123")
    assert {(rank["WORLD_SIZE"], rank["TASK"]) for rank in ranks} == {("4", "squad")}


def test_a_job_of_slurm_trains_and_its_last_line_has_the_reason(site):
    platforms.job(site)
    site.stand_in("sbatch", 'cd / && exec "${@: -1}"')
    words = ("--slurm", "squad", "SEEDS=1,2", "DEVICE=cpu")
    done = finetune(site, *words, TRIAL_1="kill:0", status=1)
    assert site.calls("sbatch") == [f"'-N' '1' '{site.root}/run.sub'"]
    reason = "trial 1: rank 0 on node0 was killed by SIGKILL"
    assert done.last_line == f"run: error: 1 of 2 trials failed: {reason}"
    assert site.run_dir.name.endswith("_7")
    assert (site.run_dir / "model_0" / "figures.json").is_file()
