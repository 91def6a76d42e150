"""Memory of a rank by part, estimated before anything starts, also for GPUs that are not there.

Persistent memory is counted exactly: the optimizer is made on the meta device, without a process
group, and its buffers are added up. Activations follow from the operations: T tokens of width D,
feed-forward width F and b bytes per number keep in each layer (8 D + 2 F) T b with the fused
kernels: queries, keys, values, context, two LayerNorms with their inputs, GELU with its input.
Plain PyTorch also keeps dropout masks and the attention's result a second time, (11 D + 2 F) T b,
and on a CPU with dropout the attention probabilities.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bert import kernels, optim
from bert.checkpoint.save import CheckpointConfig
from bert.core.dist import DistConfig, World
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import uninitialized, use_placeholders
from bert.optim.gradients import MAX_IN_FLIGHT
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError
from common.files import text_of

META = torch.device("meta")
SAVE_MEMORY = "set RECOMPUTE_LAYERS=1, SHARD_GROUP=all"
GIB = 2**30
# CUDA context, kernels and NCCL's buffers: a guess, not measured.
RUNTIME = {"cuda": 1 * GIB, "cpu": 0}
PROCESS = GIB // 2  # host memory of Python with PyTorch: about, measured on CPUs


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the memory of a rank depends on. tokens, masked: most in a micro-batch; length: most
    tokens of a sequence; ranks_per_node: of the fullest node.
    """

    model: BertConfig
    optimizer: optim.OptimizerConfig
    dtype: torch.dtype
    fused: bool
    num_ranks: int
    tokens: int
    masked: int
    length: int
    accumulate: bool
    recompute_layers: int
    device_type: str
    ranks_per_node: int = 1

    @classmethod
    def of(cls, config: PretrainingConfig) -> Plan:
        """Plan of a run on this machine's device."""
        device, data = config.device, config.data
        num_ranks, group = config.dist.world_size, None
        sharded = config.optim.is_sharded(device)
        if sharded:
            group = str(config.optim.group_size(num_ranks, config.dist.ranks_per_node))
        return cls(
            model=config.model,
            optimizer=replace(config.optim, sharded=sharded, shard_group=group),
            dtype=config.numerics.dtype,
            fused="dropout_add_layer_norm" in config.kernels.names(device),
            num_ranks=num_ranks,
            tokens=data.capacity.tokens,
            masked=data.capacity.masked,
            length=data.max_seq_length,
            accumulate=data.gradient_steps > 1,
            recompute_layers=config.recompute.layers,
            device_type=device.type,
            ranks_per_node=-(-num_ranks // config.mlperf.num_nodes),
        )


def meta_model(config: BertConfig) -> BertForPreTraining:
    """The model on the meta device: shapes without values."""
    with uninitialized():
        return BertForPreTraining(
            config,
            kernels.bind_kernels(
                kernels.KernelsConfig(fused="none"), torch.device("cpu")
            ),
        )


def estimate(plan: Plan) -> dict[str, int]:
    """Bytes of one rank's device memory by part.

    weights, gradients and states (with the fp32 masters) are persistent; activations: the transient
    peak of the backward pass, with gradients not yet reduced, or of the update; runtime: the
    device's libraries. Raises ConfigError for an unavailable optimizer.
    """
    model = meta_model(plan.model)
    use_placeholders(model, plan.dtype, META)
    settings = plan.optimizer
    settings.check(torch.device(plan.device_type))
    masters, b = None, plan.dtype.itemsize
    if plan.dtype != torch.float32:
        masters = {
            name: torch.empty(p.shape, device=META)
            for name, p in model.named_parameters()
        }
    # Rank 0 of num_ranks, whose collectives send nothing.
    world = World(DistConfig(device="cpu"))
    world.size = world.ranks_per_node = plan.num_ranks
    world.device = META
    engine = optim.build(
        settings, model, masters, world, accumulate=plan.accumulate, fused=False
    )
    # The decoder's gradient of the word embeddings is held until the embeddings' own is there.
    peaks = [
        activations(plan) + plan.model.padded_vocab_size * plan.model.hidden_size * b
    ]
    # Gradients held in a bucket during the backward pass, and the copies from which slices are
    # reduced.
    buckets, layout, copied = engine.buckets, engine.layout, 0
    sent_in = buckets.reducer.dtype
    if plan.num_ranks > 1 and sent_in != buckets.whole.dtype:
        largest = sorted(part.size for part in layout.slices)[-MAX_IN_FLIGHT:]
        copied = sum(largest) * sent_in.itemsize
    peaks.append(max(bucket.size for bucket in layout.buckets) * b + copied)
    if not (plan.fused and settings.has_kernels):
        temporaries = settings.rule_class.num_temporaries
        peaks.append(temporaries * engine.shard.masters.nbytes)
    persistent: dict[str, list[Tensor]] = {
        "weights": [engine.weights.whole, engine.weights.shard],
        "gradients": [buckets.whole, buckets.shard, buckets.received],
        "states": [engine.shard.masters, *engine.shard.states.values()],
    }
    parts = {  # a tensor in two roles counts once
        name: sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        for name, tensors in persistent.items()
    }
    return {**parts, "activations": max(peaks), "runtime": RUNTIME[plan.device_type]}


def activations(plan: Plan) -> int:
    """Most bytes kept for the backward pass of a micro-batch."""
    shape, b = plan.model, plan.dtype.itemsize
    width, layers, tokens = shape.hidden_size, shape.num_hidden_layers, plan.tokens
    masks = 0 if plan.fused or not shape.hidden_dropout_prob else 2 * width
    # Per token: input, QKV, context and softmax.
    attention = 5 * width * b + 4 * shape.num_attention_heads
    # 16: mean and deviation of two LayerNorms for each token, in fp32.
    rest = (
        3 * width + 2 * shape.intermediate_size + masks + (0 if plan.fused else width)
    ) * b + 16
    joined = 3 * width * width * b  # weights of Q, K and V
    if not plan.fused and shape.attention_probs_dropout_prob:
        # In fp32 at least: of low-precision queries, keys and values only an fp32 copy is kept.
        attention += 3 * plan.length * shape.num_attention_heads * max(b, 4)
        attention += 3 * width * (b if b >= 4 else 4 - b)
    layer = tokens * (attention + rest) + joined
    # Tokens that the heads read: the last layer's after its attention.
    read = plan.masked + tokens // plan.length
    kept = (
        (layers - 1) * layer
        + tokens * attention
        + read * (rest + 2 * width * b)
        + joined
    )
    if k := plan.recompute_layers:
        # Pre-LN keeps the residual stream beside the input of the segment.
        inputs = (2 if shape.layer_norm_large_model else 1) * tokens * width * b
        # Inputs of all segments, and all of the one that is being recomputed.
        kept = -(-layers // k) * inputs + min(k, layers) * layer
    # The heads keep the logits and their gradient.
    heads = plan.masked * (shape.padded_vocab_size * 2 * b + 6 * width * b)
    return kept + 2 * tokens * width * b + heads


def host_bytes(plan: Plan, checkpoint: CheckpointConfig, parts: dict[str, int]) -> int:
    """Peak host memory of all ranks of a node, for rank 0's node, which needs the most.

    For the initial weights, then for the state while GPUs take untimed steps, then for checkpoints;
    on CPUs device memory as well. parts: result of ``estimate``.
    """
    beginning = saving = undoing = 0
    if plan.device_type == "cuda":
        undoing = plan.ranks_per_node * (parts["weights"] + parts["states"])
    if not plan.optimizer.sharded:
        num_parameters = sum(p.numel() for p in meta_model(plan.model).parameters())
        beginning = 4 * num_parameters * plan.ranks_per_node
    if checkpoint.directory is not None:
        saving = parts["states"]
        group = plan.optimizer.group_size(plan.num_ranks, 0)
        if checkpoint.shards:
            saving = saving * plan.ranks_per_node * group // plan.num_ranks
        elif plan.optimizer.sharded:
            saving *= group  # rank 0 gathers them
    device = sum(parts.values()) if plan.device_type == "cpu" else 0
    return max(beginning, undoing, saving) + plan.ranks_per_node * (PROCESS + device)


def describe(config: PretrainingConfig) -> str:
    """The estimate in words. Raises ConfigError if the GPU or its host has less memory.

    If DEVICE=auto finds no GPU nothing is refused: the check then does not run on the machine of
    the run.
    """
    if config.zero.is_deepspeed:
        return "not estimated: deepspeed.runtime.zero has estimators for each stage"
    plan = Plan.of(config)
    parts = estimate(plan)
    host, total = host_bytes(plan, config.checkpoint, parts), sum(parts.values())
    text = f"{total / GIB:.1f} GiB per rank: "
    text += ", ".join(
        f"{name} {size / GIB:.1f}" for name, size in parts.items() if size
    )
    if plan.device_type == "cuda":
        gpu = torch.cuda.get_device_properties(config.device).total_memory
        text += f"; the GPU has {gpu / GIB:.1f}"
        if total > gpu:
            raise ConfigError(
                f"out of memory: {text}: lower BATCHSIZE and raise GRADIENT_STEPS, or {SAVE_MEMORY}"
            )
    capacity = host_capacity()
    text += f"; host {host / GIB:.1f} GiB for the ranks of a node; this machine has {capacity / GIB:.1f}"
    if host <= capacity:
        return text
    if plan.device_type == "cuda" or config.dist.device == "cpu":
        raise ConfigError(
            f"out of memory: {text}: "
            "set SHARD_OPTIMIZER=1 and, with CHECKPOINT_DIR, CHECKPOINT_SHARDS=1, or start fewer ranks on a node"
        )
    return f"{text}: TOO LITTLE for a run here (not tested for another machine: DEVICE=cpu or a GPU does)"


def host_capacity(root: Path = Path("/")) -> int:
    """Bytes of memory for all processes of this node: the machine's, or the limit of a control
    group.

    The limits of the process's group (v1 or v2) and its ancestors count. root: parent of /proc and
    /sys.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        name = "memory/{}/memory.limit_in_bytes" if controllers else "{}/memory.max"
        below = Path(group.lstrip("/"))
        for folder in (below, *below.parents):
            text = text_of(root / "sys/fs/cgroup" / name.format(folder))
            if text.isdigit():  # else "max"
                limits.append(int(text))
    return min(limits)
