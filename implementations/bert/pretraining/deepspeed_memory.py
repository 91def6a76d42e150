"""How much memory DeepSpeed takes at least, a rank: its weights, masters and states, as its stage and offload say.

What it needs besides, for gradients, buckets and what it gathers, is DeepSpeed's and not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from bert.deepspeed import ds_zero
from bert.pretraining import memory
from bert.pretraining.config import Config

GIB = memory.GIB


class Need(NamedTuple):
    """Bytes. device: of a rank, by part; host: of the ranks of a node together; flat: see ``need``."""

    device: dict[str, int]
    host: int
    flat: int


def need(config: Config, plan: memory.Plan) -> Need:
    """What the run takes at least.

    In stages 1 and 2 every rank has all weights on its device, and makes one flat buffer of them, of ``flat`` bytes:
    on the device where there is room for both, else on the host, which then holds both. In stage 3 it has its part of
    them, and the largest parameter whole beside it. Rank 0 gathers the masters and states for a checkpoint of ours.
    """
    zero = ds_zero.of(config.zero.json())
    offloaded, ranks = ds_zero.offloads(zero), memory.ranks_of_node(config, plan)
    sizes = [parameter.numel() * plan.dtype.itemsize for parameter in memory.shapes(plan.model).parameters()]
    whole, states = sum(sizes), memory.estimate(plan)["states"]
    device = {"weights": whole, "states": states}
    host = memory.PROCESS
    if zero["stage"] == 3:
        device = {"weights": whole // plan.num_ranks, "largest parameter": max(sizes), "states": states}
        if "offload_param" in offloaded:
            host += device.pop("weights")
    if "offload_optimizer" in offloaded:
        host += device.pop("states")
    device |= {"activations": memory.activations(plan), "runtime": memory.RUNTIME[plan.device_type]}
    if plan.device_type == "cpu":
        host += sum(device.values())
    gathered = config.checkpoint.directory is not None and not config.zero.checkpoints
    return Need(device, host * ranks + gathered * states * plan.num_ranks, whole if zero["stage"] < 3 else 0)


def describe(config: Config) -> str:
    """The need in words. Raises ConfigError where a GPU or its host has less than that.

    Where DEVICE=auto finds no GPU nothing is refused: the check then runs on another machine than the run.
    """
    plan = memory.Plan.of(config)
    parts, host, flat = need(config, plan)
    total = sum(parts.values())
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    said = memory.on_device(
        config, plan, f"at least {total / GIB:.1f} GiB per rank: {named}", total,
        "set another stage, offload_optimizer or offload_param, or RECOMPUTE_LAYERS=1",
    )  # fmt: skip
    if plan.device_type == "cuda" and total - parts["activations"] + flat > memory.device_bytes(config):
        host += 2 * flat * memory.ranks_of_node(config, plan)
    return memory.on_host(
        config, plan, said, host,
        "with CHECKPOINT_DIR set DEEPSPEED_CHECKPOINTS=1, or start fewer ranks on a node",
    )  # fmt: skip
