"""The real trainer under run.sub on a real Slurm: two nodes of two CPU ranks, joined by gloo."""

import importlib.util
import json
import os
import shutil
import sys

import pytest
import torch

from bert import kernels
from bert.model.config import BertConfig
from finetune import models
from finetune.models import Classification

from .tiny_data import LENGTH, TO_A_TARGET, write

pytestmark = pytest.mark.slurm

CONFIG = "configs/config_demo_1x2x16x1_pack.sh"
NODES = {"DGXNNODES": "2", "DGXNGPU": "2", "BATCHSIZE": "3", "NCCL_TEST": "0"}


def exports(**settings: object) -> str:
    return "export " + " ".join(f"{name}={value}" for name, value in settings.items())


@pytest.fixture
def training(slurm, repository):
    """The cluster with this repository instead of stand-ins, and tiny data."""
    write(slurm.folder)
    names = ("SLURM_CONF", "SBATCH_TIMELIMIT", "LOGDIR", "HOME")
    own = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    kept = {name: slurm.checkout.env[name] for name in names}
    slurm.checkout.env = kept | own | {"DATADIR": str(slurm.folder)}
    slurm.checkout.root = repository
    return slurm


def trained(training, **changes: str) -> str:
    """Trains to the end; the job's last line."""
    settings = exports(**(TO_A_TARGET | NODES | changes))
    return training.run(config=CONFIG, after=settings, status=0).last_line


def test_two_nodes_of_two_ranks_train_to_the_target_in_each_trial(training):
    last, folder = trained(training, NEXP="2", NCCL_TEST="1"), training.checkout.run_dir
    assert last == f"run: all 2 trials reached the target: {folder}"
    test = (folder / "nccl_test" / "bandwidth.txt").read_text()
    assert test.count("all-reduce of 4 ranks (gloo)") == 2
    assert test.count("all sums right") == 2
    seeds = set()
    for trial in "01":
        lines = (folder / f"result_{trial}.txt").read_text().splitlines()
        logged = [line.removeprefix(":::MLLOG ") for line in lines if ":::MLLOG" in line]  # fmt: skip
        values = {event["key"]: event["value"] for event in map(json.loads, logged)}
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
    given = {"ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path), "NEXP": "1"}
    given |= {"CHECKPOINT_SHARDS": "1", "CHECKPOINT_DIR": str(saved)}
    last, folder = trained(training, **given), training.checkout.run_dir
    assert last == f"run: the trial reached the target: {folder}"
    used = json.loads((folder / "config.json").read_text())
    assert (used["zero"]["engine"], used["dist"]["world_size"]) == ("deepspeed", 4)
    (checkpoint,) = saved.rglob("index.pt")
    assert len(list(checkpoint.parent.glob("rank_*.pt"))) == 4, "a shard of each rank"


def test_fine_tuning_on_two_nodes_trains_each_seed_and_reports_failures_last(training):
    folder, words = training.folder, ["red", "blue", "north", "here"]
    lines = [f"{word}\t{'colour' if word in words[:2] else 'place'}" for word in words]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(lines * 6))
    shutil.copy(folder / "phase1" / "bert_config.json", folder / "config.json")
    shape = BertConfig.from_json(folder / "config.json")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    unused = range(shape.vocab_size - len(vocabulary))
    vocabulary += [f"[unused{number}]" for number in unused]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    plain = kernels.KernelsConfig(fused="none")
    bound = kernels.bind_kernels(plain, torch.device("cpu"))
    model = Classification(shape, bound, 2)
    models.initialize(model, 0)
    torch.save(dict(model.bert.named_parameters()), folder / "weights.pt")
    settings = NODES | {
        "RANK_MODULE": "finetune", "TASK": "TSV", "DATA": folder, "INIT_CHECKPOINT": folder / "weights.pt",
        "BERT_CONFIG": folder / "config.json", "LR": "0.003", "EPOCHS": "20", "DEVICE": "cpu", "OMP_NUM_THREADS": "1",
        "SEEDS": "4,7", "RUN_NAME": "r", "MAX_SEQ_LENGTH": LENGTH, "DGXNGPU": "1", "BATCHSIZE": "6",
        "GRADIENT_STEPS": "1",
    }  # fmt: skip
    how = {"config": "configs/finetune_MRPC_DGXA100_1x8x16.sh", "after": exports(**settings)}  # fmt: skip
    job = training.run(**how, status=0)
    made = training.checkout.run_dir
    assert job.last_line == f"run: all 2 trials are complete: {made}"
    for trial in "01":
        figures = json.loads((made / f"model_{trial}" / "figures.json").read_text())
        assert figures["accuracy"] == 1
    (made / "model_1" / "figures.json").unlink()
    (folder / "train.tsv").write_text("red\tcolour\tmore\tthan\tenough\n")
    job = training.run(**how, status=2)
    assert "this configuration cannot run" in job.last_line
    assert "train.tsv:1" in job.last_line
    assert "set TEXT_COLUMNS and LABEL_COLUMN" in job.last_line
