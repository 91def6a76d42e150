"""Checkpoints as tests compare them."""

import dataclasses
import json
import re
import threading
from pathlib import Path

import torch

from bert.checkpoint.save import CheckpointConfig, save_checkpoint
from bert.checkpoint.sharded import Part

from .plain import step_of

# What a checkpoint notes of whose it is: another run's may hold the same.
OWNER = {"trial", "run_dir"}


def same(a, b):
    """Whether two states, nested dicts and lists of tensors and values, are equal bit for bit."""
    if isinstance(a, dict):
        names = a.keys() - OWNER
        return names == b.keys() - OWNER and all(same(a[key], b[key]) for key in names)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def newest(folder, pattern="step_*.pt"):
    """The state in the newest checkpoint of a folder, or in the named one."""
    return torch.load(sorted(Path(folder).glob(pattern))[-1], weights_only=True)


# A run that is trained to its last step and saved on its way.
UNTIMED = {"EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0", "CHECKPOINT_EVERY_STEPS": "2"}  # fmt: skip


def folders(parent, name):
    """Settings of a run that keeps its checkpoints in one folder, and all else in another."""
    own = {"CHECKPOINT_DIR": name, "RUN_DIR": f"run_{name}"}
    return {variable: str(parent / folder) for variable, folder in own.items()}


def events(environment, trial=0):
    """What the log of a run holds, which is all of a form."""
    text = Path(environment["RUN_DIR"], f"result_{trial}.txt").read_text()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def values(environment, key, trial=0):
    """The values of a key in the log of a run."""
    return [e["value"] for e in events(environment, trial) if e["key"] == key]


def losses(finished):
    """As a run's progress lines print them."""
    return re.findall(r"loss ([\d.]+) \(mlm", finished.stderr)


def content(*folders):
    """Of all files."""
    files = [path for folder in folders for path in folder.rglob("*")]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def zero_json(folder, stage=2):
    """Settings of a run by DeepSpeed in a stage of ZeRO."""
    path = Path(folder, f"ds_{stage}.json")
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return {"ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(path)}


def without_dropout(prepared):
    """The prepared run's model has none from now on."""
    path = Path(prepared["CHECKPOINTDIR_PHASE1"], "bert_config.json")
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    path.write_text(json.dumps(json.loads(path.read_text()) | none))


def save_model(folder, model, steps, **facts):
    """A checkpoint of a model as a run writes it."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    shape = dataclasses.asdict(model.config)
    state = {"model": weights, "step": steps, "bert_config": shape, **facts}
    return save_checkpoint(CheckpointConfig(directory=folder, keep=9), steps, state)


def save_in_shards(folder, model, steps, **facts):
    """As one rank that writes shards, with its index."""
    shard, index = step_of(model, sharded=True).shard_state()
    part = Part(rank=0, num_ranks=1, token=steps, abandoned=threading.Event())
    index |= {"step": steps, "bert_config": dataclasses.asdict(model.config), **facts}
    return part.write(folder, steps, {"shard": shard, "index": index}, keep=9)
