"""From one phase of pretraining to the next, INIT_OPTIMIZER=1: weights, fp32 masters and moments, with steps from 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert.checkpoint.save import read_checkpoint
from bert.checkpoint.weights import canonical_name
from bert.core.env import ConfigError
from bert.core.files import damage
from bert.optim.rule import is_decayed
from bert.pretraining.config import Config
from bert.training.step import Trainer

DECODER = "cls.predictions.decoder.weight"  # tied: DeepLearningExamples names it twice and optimizes it once


def restore(config: Config, step: Trainer, shapes: Mapping[str, torch.Size]) -> None:
    """Gives a fresh optimizer the state in INIT_CHECKPOINT; ``shapes``, ConfigError: see read()."""
    step.optimizer.load_state_dict(read(config, shapes))


def read(config: Config, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    """The optimizer's state in INIT_CHECKPOINT: a step_*.pt of this trainer, or a ckpt_*.pt of DeepLearningExamples.

    shapes: of the model's parameters, by name. Raises ConfigError where it is neither, or is of another optimizer,
    vocabulary or shape.
    """
    path = config.checkpoint.init_checkpoint
    assert path is not None
    try:
        saved = read_checkpoint(path, mmap=True)
    except Exception as error:  # a damaged file, or none of PyTorch's
        raise ConfigError(f"INIT_OPTIMIZER=1: {path} is not a readable checkpoint ({damage(error)})") from None
    optimizer = saved.get("optimizer") if isinstance(saved, Mapping) else None
    if isinstance(optimizer, Mapping) and "masters" in optimizer:
        trained_with = saved.get("run", {}).get("OPTIMIZER")
        if trained_with != config.optim.optimizer:
            raise ConfigError(
                f"INIT_OPTIMIZER=1: {path} is of OPTIMIZER={trained_with}, this run has {config.optim.optimizer}: use "
                "the same, or INIT_OPTIMIZER=0"
            )
        state = dict(optimizer)
    elif isinstance(optimizer, Mapping) and {"state", "param_groups"} <= optimizer.keys():
        state = _deep_learning_examples(saved, path)
    else:
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} holds no optimizer's state: expected a step_*.pt of this trainer, or a "
            "ckpt_*.pt of DeepLearningExamples"
        )
    for part, tensors in state.items():
        if isinstance(tensors, Mapping):
            _check(part, tensors, shapes, path)
    return {**state, "num_steps": 0}


def _check(part: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], path: Path) -> None:
    wrong = [f"{name} is missing" for name in shapes if name not in tensors]
    wrong += [f"{name} is not in this model" for name in tensors if name not in shapes]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        rest = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"INIT_OPTIMIZER=1: {part} of {path} do not fit BERT_CONFIG: {'; '.join(wrong[:3])}{rest}")


def _deep_learning_examples(saved: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Its moments are by number: parameters that decay first, then the others, each in the order of the model.

    apex's masters are in the same order; without them the model's weights are fp32.
    """
    weights = {canonical_name(name): tensor for name, tensor in saved["model"].items() if not name.endswith(DECODER)}
    order = sorted(weights, key=is_decayed, reverse=True)  # stable: the model's order within each
    moments = saved["optimizer"]["state"]
    if len(moments) != len(order):
        raise ConfigError(
            f"INIT_OPTIMIZER=1: {path} has moments of {len(moments)} parameters and weights of {len(order)}: expected "
            "a ckpt_*.pt of DeepLearningExamples' BERT"
        )
    masters = list(saved.get("master params") or _in_order(weights, order))
    numbers = [number for group in saved["optimizer"]["param_groups"] for number in group["params"]]
    return {
        "masters": dict(zip(order, masters, strict=True)),
        "first_moments": {name: moments[n]["exp_avg"] for name, n in zip(order, numbers, strict=True)},
        "second_moments": {name: moments[n]["exp_avg_sq"] for name, n in zip(order, numbers, strict=True)},
    }


def _in_order(weights: Mapping[str, Tensor], order: list[str]) -> Iterator[Tensor]:
    return (weights[name] for name in order)
