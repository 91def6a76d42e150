"""The real trainer under run.sub on a real Slurm: two nodes of two CPU ranks each, joined by
gloo.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from bert import kernels
from bert.model.config import BertConfig
from finetune import models
from finetune.models import Classification

from .tiny_data import LENGTH, TO_A_TARGET, write

pytestmark = pytest.mark.slurm

CONFIG = "configs/config_demo_1x2x16x1_pack.sh"
SETTINGS = TO_A_TARGET | {
    "DGXNNODES": "2",
    "DGXNGPU": "2",
    "BATCHSIZE": "3",
    "NCCL_TEST": "0",
}


def settings(**changes: str) -> str:
    return "export " + " ".join(
        f"{name}={value}" for name, value in (SETTINGS | changes).items()
    )


@pytest.fixture
def training(slurm, repository):
    """The cluster with this repository instead of stand-ins, and tiny data."""
    folder = slurm.folder
    write(folder)
    kept = {
        name: slurm.checkout.env[name]
        for name in ("SLURM_CONF", "SBATCH_TIMELIMIT", "LOGDIR", "HOME")
    }
    slurm.checkout.env = kept | {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "DATADIR": str(folder),
    }
    slurm.checkout.root = repository
    return slurm


def test_two_nodes_of_two_ranks_train_to_the_target_in_each_trial(training):
    job = training.run(config=CONFIG, after=settings(NEXP="2", NCCL_TEST="1"), status=0)
    expected = f"run: all 2 trials reached the target: {training.checkout.run_dir}"
    assert job.last_line == expected
    test = (training.checkout.run_dir / "nccl_test" / "bandwidth.txt").read_text()
    assert test.count("all-reduce of 4 ranks (gloo)") == 2
    assert test.count("all sums right") == 2
    seeds = set()
    for trial in "01":
        log = (training.checkout.run_dir / f"result_{trial}.txt").read_text()
        events = [
            json.loads(line.removeprefix(":::MLLOG "))
            for line in log.splitlines()
            if line.startswith(":::MLLOG")
        ]
        values = {event["key"]: event["value"] for event in events}
        assert values["global_batch_size"] == 3 * 4
        assert values["eval_accuracy"] >= 0.3
        seeds.add(values["seed"])
    assert len(seeds) == 2


@pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"),
    reason="needs DeepSpeed (requirements/deepspeed.txt)",
)
def test_two_nodes_train_to_the_target_with_deepspeed(training):
    path, saved = training.folder / "ds.json", training.folder / "saved"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    engine = {
        "ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path), "CHECKPOINT_SHARDS": "1",
    }  # fmt: skip
    job = training.run(
        config=CONFIG,
        after=settings(NEXP="1", CHECKPOINT_DIR=str(saved), **engine),
        status=0,
    )
    expected = f"run: the trial reached the target: {training.checkout.run_dir}"
    assert job.last_line == expected
    described = json.loads((training.checkout.run_dir / "config.json").read_text())
    assert (described["zero"]["engine"], described["dist"]["world_size"]) == (
        "deepspeed",
        4,
    )
    (checkpoint,) = saved.rglob("index.pt")
    assert len(list(checkpoint.parent.glob("rank_*.pt"))) == 4, "a shard of each rank"


def test_a_data_set_that_is_missing_ends_the_job_naming_its_variable(training):
    job = training.run(
        config=CONFIG, after=settings(DATADIR_PHASE2_PACKED="/nowhere/packed"), status=2
    )
    assert "bert: error: DATADIR_PHASE2_PACKED=/nowhere/packed" in job.output
    expected = "run: error: this configuration cannot run: DATADIR_PHASE2_PACKED=/nowhere/packed"
    assert job.last_line.startswith(expected)
    assert not training.checkout.logdir.exists()


def process_of_rank(number: str) -> int:
    """Trainer process of that rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (folder / "cmdline").read_bytes(),
                (folder / "environ").read_bytes().split(b"\0"),
            )
        except OSError:
            continue
        if (
            command.endswith(b"-u\0-m\0bert\0")
            and f"RANK={number}".encode() in environment
        ):
            return int(folder.name)
    raise AssertionError(f"rank {number} does not run")


def test_a_rank_killed_while_it_trains_is_restarted_once_then_the_run_gives_up(
    training,
):
    """The node is not to blame: the run does not restart without it."""
    resumes = {
        "RESUME": "1", "CHECKPOINT_DIR": str(training.folder / "saved"), "CHECKPOINT_EVERY_STEPS": "100000",
    }  # fmt: skip
    job = training.submit(
        config=CONFIG,
        after=settings(MAX_STEPS="100000", TARGET_MLM_ACCURACY="0.99", **resumes),
    )
    for told in ("starts: result_0", "run: warning: restarts on dgx1 dgx2, rank 3"):
        # Steps after that line.
        job.wait_for(
            lambda told=told: job.output.partition(told)[2].count("  norm ") > 3
        )
        os.kill(process_of_rank("3"), signal.SIGKILL)
    job.wait()
    assert job.exit_code == 1
    assert job.last_line == (
        "run: error: gave up: 1 restart brought no new checkpoint after step 0; "
        "trial 0: rank 3 on dgx2 was killed by SIGKILL"
    )


def test_fine_tuning_on_two_nodes_trains_each_seed_and_reports_failures_last(training):
    folder = training.folder
    words = ["red", "blue", "north", "here"]
    lines = [f"{word}\t{'colour' if word in words[:2] else 'place'}" for word in words]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(lines * 6))
    shape = BertConfig.from_json(folder / "phase1" / "bert_config.json")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    vocabulary += [
        f"[unused{number}]" for number in range(shape.vocab_size - len(vocabulary))
    ]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    model = Classification(
        shape, kernels.bind_kernels(kernels.KernelsConfig(fused="none"), torch.device("cpu")), 2,
    )  # fmt: skip
    models.initialize(model, 0)
    torch.save(dict(model.bert.named_parameters()), folder / "weights.pt")
    (folder / "config.json").write_text(
        (folder / "phase1" / "bert_config.json").read_text()
    )
    own = {
        "RANK_MODULE": "finetune", "TASK": "TSV", "DATA": folder, "INIT_CHECKPOINT": folder / "weights.pt",
    }  # fmt: skip
    own |= {
        "BERT_CONFIG": folder / "config.json", "LR": "0.003", "EPOCHS": "20",
    }  # fmt: skip
    own |= {
        "DGXNNODES": "2", "DGXNGPU": "1", "DEVICE": "cpu", "OMP_NUM_THREADS": "1", "NCCL_TEST": "0", "SEEDS": "4,7",
    }  # fmt: skip
    settings = {
        "RUN_NAME": "r",
        "MAX_SEQ_LENGTH": str(LENGTH),
        "BATCHSIZE": "6",
        "GRADIENT_STEPS": "1",
    } | own
    exports = "export " + " ".join(
        f"{name}={value}" for name, value in settings.items()
    )
    config = "configs/finetune_MRPC_DGXA100_1x8x16.sh"
    job = training.run(config=config, after=exports, status=0)
    assert (
        job.last_line == f"run: all 2 trials are complete: {training.checkout.run_dir}"
    )
    for trial in "01":
        figures = json.loads(
            (training.checkout.run_dir / f"model_{trial}" / "figures.json").read_text()
        )
        assert figures["accuracy"] == 1
    (training.checkout.run_dir / "model_1" / "figures.json").unlink()
    (folder / "train.tsv").write_text("red\tcolour\tmore\tthan\tenough\n")
    job = training.run(config=config, after=exports, status=2)
    assert "this configuration cannot run" in job.last_line
    assert "train.tsv:1" in job.last_line
    assert "set TEXT_COLUMNS and LABEL_COLUMN" in job.last_line


def test_trials_and_runs_share_no_checkpoints_and_a_refusal_spoils_nothing(training):
    saved = training.folder / "saved"
    first = settings(
        NEXP="2", RUN_NAME="first", RESUME="1", CHECKPOINT_DIR=str(saved), CHECKPOINT_EVERY_STEPS="1",
    )  # fmt: skip
    training.run(config=CONFIG, after=first, status=0)
    logs = [(training.checkout.run_dir / f"result_{n}.txt").read_text() for n in "01"]
    assert not any("continued_at_step" in log for log in logs)
    assert len({log.partition('"seed", "value": ')[2][:9] for log in logs}) == 2
    kept = sorted(saved.rglob("*"))
    assert saved / "trial_1" in kept
    for change, said in (
        ("RUN_NAME=second RESUME=0", "of another or an earlier run"),
        ("LR=0.04", "LR"),
    ):
        refused = training.run(config=CONFIG, after=f"{first} {change}")
        assert (refused.exit_code, said in refused.last_line) == (2, True)
        assert sorted(saved.rglob("*")) == kept
    training.run(config=CONFIG, after=first, status=0)


def test_the_second_of_two_jobs_in_one_folder_is_refused(training):
    own = settings(
        DGXNNODES="1", RUN_NAME="first", CHECKPOINT_DIR=str(training.folder / "saved"), MAX_STEPS="100000",
        TARGET_MLM_ACCURACY="0.99",
    )  # fmt: skip
    job = training.submit(config=CONFIG, after=own)
    job.wait_for(lambda: job.output.count("  norm ") > 3)
    for name, said in (("first", "writes to"), ("second", "CHECKPOINT_DIR=")):
        file = training.folder / f"{name}.out"
        other = training.submit(
            f"--output={file}", config=CONFIG, after=f"{own} RUN_NAME={name}"
        )
        other = dataclasses.replace(other, file=file).wait()
        assert other.exit_code != 0
        assert said in other.last_line
    assert job.field("JobState") == "RUNNING"
