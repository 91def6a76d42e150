"""What an acceptance test was: what a baseline and a burn-in that continues must have in common with it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bert.core import rundir
from bert.core.env import Variable, variables
from bert.kernels import precision
from bert.pretraining.config import Config as TrainerConfig
from certify.meeting import Meeting

DRIVER = Path("/proc/driver/nvidia/version")


def derived(trainer: TrainerConfig) -> dict[str, Any]:
    """For config.json: the model itself, which a path may no longer lead to, and the precision that `auto` is here."""
    model = dataclasses.asdict(trainer.model) | {"gelu_form": trainer.model.gelu_form}
    return {"model": model, "settled_precision": precision.resolved(trainer.precision.precision, trainer.device)}


def facts(trainer: TrainerConfig, meeting: Meeting) -> dict[str, Any]:
    """What decides the bits that the steps compute, but for the kernels: ranks, settings, devices and versions."""
    described, environment = derived(trainer), rundir.environment()
    groups = (trainer.optim, trainer.recompute, trainer.data, trainer.zero, trainer.graph, trainer.precision)
    found: dict[str, Any] = {"ranks": meeting.size, "nodes": ", ".join(meeting.nodes)}
    for group in groups:
        found |= settings(group)
    found |= {"PRECISION": described["settled_precision"], **described["model"]}
    found |= {"OMP_NUM_THREADS": trainer.dist.num_threads, "device": device_name(trainer.device)}
    found |= environment["packages"] | {name: environment[name] for name in ("cuda", "cudnn", "nccl", "python")}
    found["driver"] = DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.is_file() else None
    found["commit"] = (environment["git_commit"] or "unknown").removesuffix("-dirty")
    return found


def settings(group: Any) -> dict[str, Any]:
    """The values of a part of the Config by the names of their variables; paths, which may move, left out."""
    found: dict[str, Any] = {}
    paths = {variable.name for _, variable, kind, _ in variables(type(group)) if kind is Path}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        variable: Variable | None = field.metadata.get("env")
        if dataclasses.is_dataclass(value):
            found |= settings(value)
        elif variable is not None and variable.name not in paths:
            found[variable.name] = value
    return found


def difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first of these facts that another test had otherwise, in words; empty where they are the same."""
    for name, value in now.items():
        if name not in earlier:
            return f"nothing is known of its {name}"
        if earlier[name] != value:
            return f"its {name} is {earlier[name]}, and now {value}"
    return ""


def device_name(device: torch.device) -> str:
    """Of a rank's device, as the records and baselines have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
