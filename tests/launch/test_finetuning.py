"""Fine-tuning starts like every run: a trial is a seed, and the last line gives the result of
all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from .captured import captured

FAKES = Path(__file__).resolve().parent / "fakes"
SCRIPT = "./run_finetuning.sh"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture
def site(checkout, tmp_path):
    """The checkout, with data and weights at paths without spaces."""
    for name in (
        "data/squad/dev-v1.1.json",
        "weights/model.safetensors",
        "weights/vocab.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    checkout.root = checkout.root.rename(tmp_path / "checkout")
    checkout.env |= {
        "LOGDIR": str(tmp_path / "results"), "PYTHONPATH": str(checkout.root), "NCCL_TEST": "0",
    }  # fmt: skip
    return checkout


def finetune(site, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    folder = site.root.parent
    paths = [
        f"DATA={folder}/data/squad",
        f"INIT_CHECKPOINT={folder}/weights/model.safetensors",
    ]
    command = [SCRIPT, *words, *paths] if words else [SCRIPT]
    return captured(command, cwd=site.root, env=site.env | env, timeout=240)


def test_every_seed_is_a_trial_and_runs_once(site):
    words = ("squad", "SEEDS=4,7", "DGXNGPU=2", "RUN_NAME=r")
    done = finetune(site, *words)
    assert done.returncode == 0, done.stderr
    assert last_line(done.stderr) == f"run: all 2 trials are complete: {site.run_dir}"
    assert last_line(done.stdout) == f"seeds of {site.run_dir}"
    assert sorted((rank["TRIAL"], rank["RANK"]) for rank in site.ranks()) == [
        (t, r) for t in "01" for r in "01"
    ]
    assert {(rank["TASK"], rank["SEEDS"]) for rank in site.ranks()} == {
        ("squad", "4,7")
    }
    assert {path.name for path in site.run_dir.glob("model_*")} == {
        "model_0",
        "model_1",
    }
    assert not list(site.run_dir.glob("running_*")), (
        "nothing is left of the folders in which trials run"
    )
    assert not list(site.run_dir.glob("compliance_*")), (
        "compliance is of timed pretraining"
    )
    assert finetune(site, *words).returncode == 0
    assert len(site.ranks()) == 4, "a seed that has its figures is not trained again"
    topology = (site.run_dir / "topology.txt").stat().st_mtime_ns
    done = finetune(site, *words, FINISHED="another:1", SEED="3")
    assert (done.returncode, last_line(done.stderr)) == (
        2,
        "run: error: this configuration cannot run: trial 1 is of a run with SEED 4",
    )
    assert finetune(site, *words, FINISHED="another:0").returncode == 2
    assert (site.run_dir / "topology.txt").stat().st_mtime_ns == topology
    assert len(site.ranks()) == 4


def test_a_start_test_leaves_fine_tuning_nothing_of_its_own_settings(site):
    """MAX_STEPS would be refused, and a length is the task's."""
    done = finetune(site, "squad", START_TEST="1")
    assert done.returncode == 0, done.stderr
    assert "run: start test: certify" in done.stderr
    assert {(rank["MAX_STEPS"], rank["MAX_SEQ_LENGTH"]) for rank in site.ranks()} == {
        (None, None)
    }


def test_a_seed_that_fails_gives_its_reason_last_and_is_the_one_that_continues(site):
    words = ("squad", "SEEDS=4,7,9", "RUN_NAME=r")
    done = finetune(site, *words, TRIAL_1="crash")
    assert done.returncode == 1
    assert (
        last_line(done.stderr)
        == "run: error: 1 of 3 trials failed: trial 1: the loss is nan at step 3"
    )
    assert finetune(site, *words).returncode == 0
    assert [rank["TRIAL"] for rank in site.ranks()] == ["0", "1", "2", "1"]


def test_a_run_that_was_asked_to_stop_is_not_complete(site):
    done = finetune(site, "squad", TRIAL_0="stopped")
    assert done.returncode == 1
    assert last_line(done.stderr).endswith(
        "trial 0: stopped at step 7 (STEPS_THIS_RUN); RESUME=1 continues"
    )


def test_a_run_without_seeds_takes_its_trials_from_nexp(site):
    done = finetune(site, "glue", "TASK=MRPC", "NEXP=2", "SEED=5")
    assert done.returncode == 0, done.stderr
    assert [(rank["TRIAL"], rank["SEED"]) for rank in site.ranks()] == [
        ("0", "5"),
        ("1", "6"),
    ]
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
    done = finetune(site, *words, CHECK="bad" if "LR=fast" in words else "")
    assert done.returncode == 2
    assert message in last_line(done.stderr)
    assert not site.logdir.exists()
    assert not site.ranks()


def test_without_slurm_a_job_is_refused(site):
    programs = site.root.parent / "programs"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name))
    done = finetune(site, "--slurm", "squad", PATH=str(programs))
    assert (done.returncode, last_line(done.stderr)) == (
        2,
        "run: error: --slurm: no sbatch here",
    )


def test_without_a_kind_it_prints_its_usage(site):
    done = finetune(site)
    assert done.returncode == 2
    assert "./run_finetuning.sh squad INIT_CHECKPOINT=" in done.stderr
    done = finetune(site, "glue", "--help")
    assert done.returncode == 0
    assert "./run_finetuning.sh squad INIT_CHECKPOINT=" in done.stdout


def test_another_trainer_is_refused_by_name(site):
    done = site.run("./run_local.sh", RANK_MODULE="berd")
    assert done.returncode == 2
    assert (
        last_line(done.stderr)
        == "run: error: RANK_MODULE=berd: expected bert or finetune"
    )


def test_a_container_mounts_the_data_and_the_files_beside_the_weights(site):
    site.stand_in("docker", "")
    docker = site.root.parent / "bin" / "docker"
    docker.write_text(
        f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -S "{FAKES / "container.py"}" docker "$@"\n'
    )
    folder = site.root.parent
    done = finetune(site, "--docker", "squad", f"CHECKPOINTDIR_PHASE1={folder}/weights", CONT="mlperf-bert",
                    LOOK_FOR=f"{folder}/data/squad/dev-v1.1.json:{folder}/weights/vocab.txt")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert last_line(done.stderr) == f"run: all 1 trials are complete: {site.run_dir}"
    (rank,) = site.ranks()
    assert len(rank["SEES"]) == 2
    (training,) = [
        call
        for call in map(json.loads, site.calls("docker"))
        if "rank.sh" in " ".join(call.get("command", []))
    ]
    volumes = training["options"]["--volume"]
    assert len(volumes) == len(set(volumes)), (
        "docker refuses a mount point that is named twice"
    )


def test_on_several_machines_all_ranks_are_one_world(site):
    site.stand_in(
        "ssh",
        """
while [[ $1 == -* ]]; do case $1 in -o | -p) shift 2 ;; *) shift ;; esac; done
[[ $2 != *identity.sh* ]] || { cat >/dev/null; exec echo "$1"; }
exec setsid --wait env -i PATH="$PATH" HOME="$HOME" REAL_PYTHON="$REAL_PYTHON" FAKE_CALLS="$FAKE_CALLS" bash -c "$2"
""",
    )
    done = finetune(
        site, "--ssh", "squad", "DGXNNODES=2", "DGXNGPU=2", HOSTS="dgx1 dgx2"
    )
    assert done.returncode == 0, done.stderr
    assert last_line(done.stderr) == f"run: all 1 trials are complete: {site.run_dir}"
    assert sorted(rank["RANK"] for rank in site.ranks()) == list("0123")
    assert {(rank["WORLD_SIZE"], rank["TASK"]) for rank in site.ranks()} == {
        ("4", "squad")
    }


def test_a_job_of_slurm_trains_and_its_last_line_has_the_reason(site):
    site.stand_in("srun", (FAKES / "srun.sh").read_text())
    site.stand_in(
        "scontrol",
        """case "$*" in
      'show config') echo 'TaskPlugin = task/none' ;;
      'show hostnames'*) echo node0 ;;
      'show node'*) echo 'NodeAddr=127.0.0.1 NodeHostName=node0' ;;
      *) exit 1 ;;
    esac""",
    )
    site.stand_in("sbatch", 'cd / && exec "${@: -1}"')
    site.env |= {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node0",
    }  # fmt: skip
    done = finetune(
        site, "--slurm", "squad", "SEEDS=1,2", "DEVICE=cpu", TRIAL_1="kill:0"
    )
    assert site.calls("sbatch") == [f"'-N' '1' '{site.root}/run.sub'"]
    assert done.returncode == 1
    reason = "rank 0 on node0 was killed by SIGKILL"
    assert (
        last_line(done.stderr) == f"run: error: 1 of 2 trials failed: trial 1: {reason}"
    )
    assert site.run_dir.name.endswith("_7")
    assert (site.run_dir / "model_0" / "figures.json").is_file()
