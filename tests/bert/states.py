"""Checkpoints as tests compare them."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import torch

from bert.checkpoint.sharded import Part

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


def write_in_shards(folder, steps, tensors, **facts):
    """A checkpoint of two ranks, each with every other tensor and its half of the last one, and its
    index.
    """
    *most, (split, last) = (
        (name, tensor.detach().reshape(-1)) for name, tensor in tensors.items()
    )
    half = len(last) // 2
    for rank in (1, 0):  # rank 0 waits for the other
        held = [(name, 0, numbers) for name, numbers in most[rank::2]]
        held.append((split, half * rank, last[half * rank :] if rank else last[:half]))
        segments, begin = [], 0
        for name, start, numbers in held:
            segments.append((name, start, begin, len(numbers)))
            begin += len(numbers)
        shard = {
            "parts": {"masters": torch.cat([numbers for _, _, numbers in held])},
            "segments": segments,
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        optimizer = {"num_steps": steps, "shapes": shapes}
        index = {"optimizer": optimizer, "step": steps, **facts}
        part = Part(rank=rank, num_ranks=2, token=steps, abandoned=threading.Event())
        path = part.write(folder, steps, {"shard": shard, "index": index}, keep=9)
    return path


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
    return [
        event["value"] for event in events(environment, trial) if event["key"] == key
    ]


def losses(finished):
    """As a run's progress lines print them."""
    return re.findall(r"loss ([\d.]+) \(mlm", finished.stderr)


def content(*folders: Path) -> dict[str, bytes]:
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
