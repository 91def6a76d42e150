"""How much memory a rank needs, by part: before anything starts, and for GPUs that are not there.

What stays from step to step is counted, not estimated: the optimizer is made on the meta device, with no process group,
its buffers are added up, and an update of it is watched for what it needs on the way. What the forward pass keeps for
the backward pass follows from the operations. T tokens of width D, feed-forward width F and b bytes a number keep in
each layer (8 D + 2 F) T b with the fused kernels: queries, keys, values, context, two LayerNorms with their inputs,
GELU with its input. Plain PyTorch keeps the masks of dropout and the attention's result once more, (11 D + 2 F) T b,
and on a CPU with dropout the attention's probabilities.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bert import kernels, optim
from bert.config import Config
from bert.dist import PlannedWorld
from bert.env import ConfigError
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import hollow, on_meta
from bert.optim.buckets import MOST_UNDER_WAY, GradientBuckets
from bert.optim.replicated import Replicated
from bert.optim.sharded import Sharded
from bert.peak import Peak

META = torch.device("meta")
GIB = 2**30
RUNTIME = {"cuda": 1 * GIB, "cpu": 0}  # CUDA context, kernels and NCCL's buffers: about; not measured


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the memory of one rank depends on. tokens, masked: of a micro-batch, at most; length: of a sequence."""

    model: BertConfig
    optimizer: optim.Config
    dtype: torch.dtype
    fused: bool
    num_ranks: int
    tokens: int
    masked: int
    length: int
    accumulate: bool
    recompute_layers: int
    device_type: str

    @classmethod
    def of(cls, config: Config) -> Plan:
        """Of a run on this machine's device."""
        device, data = config.device, config.data
        return cls(
            model=config.model,
            optimizer=replace(config.optim, sharded=config.optim.is_sharded(device)),
            dtype=config.numerics.dtype,
            fused="dropout_add_layer_norm" in config.kernels.names(device),
            num_ranks=config.dist.world_size,
            tokens=data.capacity.tokens,
            masked=data.capacity.masked,
            length=data.max_seq_length,
            accumulate=data.gradient_steps > 1,
            recompute_layers=config.recompute.layers,
            device_type=device.type,
        )


def estimate(plan: Plan) -> dict[str, int]:
    """Bytes of one rank's device memory by part.

    weights, gradients, states (with the fp32 masters) stay; activations: the most that is needed besides at once, by
    the backward pass with the gradients that wait in it, or by the update; runtime: what the device's libraries take.
    """
    with on_meta():
        model = BertForPreTraining(plan.model, kernels.select(kernels.Config(fused="none"), torch.device("cpu")))
    hollow(model, plan.dtype, META)
    settings = plan.optimizer if not plan.optimizer.is_apex else replace(plan.optimizer, optimizer="lamb")
    low = plan.dtype != torch.float32
    masters = {name: torch.empty(p.shape, device=META) for name, p in model.named_parameters()} if low else None
    fused_update = plan.fused and settings.optimizer == "lamb"
    made = optim.build(
        settings, model, model.stages(), masters, PlannedWorld(plan.num_ranks, META),
        accumulate=plan.accumulate, fused=False,
    )  # fmt: skip
    assert isinstance(made, (Sharded, Replicated))
    rest, waiting = _sharded(made) if isinstance(made, Sharded) else _replicated(made, low)
    # The first gradient of the table of words, of the scores, waits for its second one, of the embeddings.
    words = plan.model.padded_vocab_size * plan.model.hidden_size * plan.dtype.itemsize
    needed = max(activations(plan) + words, waiting, 0 if fused_update else _update(made))
    return {**rest, "activations": needed, "runtime": RUNTIME[plan.device_type]}


def _replicated(made: Replicated, low: bool) -> tuple[dict[str, int], int]:
    """What stays, and the gradients that wait at most in a backward pass."""
    weights = _size(*made.parameters)
    states = _size(*(t for state in made.pieces.states.values() for t in state))
    return {
        "weights": weights,
        "gradients": weights,
        "states": states + (_size(*made.pieces.masters) if low else 0),
    }, 0


def _sharded(made: Sharded) -> tuple[dict[str, int], int]:
    buckets, layout, b = made.buckets, made.layout, made.parameters[0].dtype.itemsize
    largest = sorted(bucket.size for bucket in layout.buckets)[-MOST_UNDER_WAY:]
    waiting = sum(largest) * b
    if isinstance(buckets, GradientBuckets):
        gradients = _size(buckets.whole, buckets.shard, buckets.received, buckets.wire_shard)
    else:
        gradients = _size(buckets.shard)
        waiting += sum(largest) * buckets.wire_dtype.itemsize
    return {
        "weights": _size(made.weights.whole, made.weights.shard),
        "gradients": gradients,
        "states": _size(made.shard.masters, *made.shard.states.values()),
    }, waiting


def _update(made: Sharded | Replicated) -> int:
    """What an update needs besides, at most."""
    if isinstance(made, Replicated):
        for parameter in made.parameters:
            parameter.grad = torch.empty_like(parameter)
    with Peak() as peak:
        made.step(0.1)
    return peak.most


def _size(*tensors: Tensor) -> int:
    """Bytes of all, of one that is there twice once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def activations(plan: Plan) -> int:
    """Bytes that are kept at most for the backward pass of a micro-batch."""
    shape, b = plan.model, plan.dtype.itemsize
    width, layers, tokens = shape.hidden_size, shape.num_hidden_layers, plan.tokens
    masks = 0 if plan.fused or not shape.hidden_dropout_prob else 2 * width
    numbers = 8 * width + 2 * shape.intermediate_size + masks + (0 if plan.fused else width)
    statistics = 4 * (4 + shape.num_attention_heads)
    layer = tokens * (numbers * b + statistics) + 3 * width * width * b  # and the joined weights of Q, K and V
    if not plan.fused and shape.attention_probs_dropout_prob:
        layer += 3 * tokens * plan.length * shape.num_attention_heads * b + 3 * tokens * width * b
    kept = layers * layer
    if k := plan.recompute_layers:
        inputs = (2 if shape.layer_norm_large_model else 1) * tokens * width * b
        kept = -(-layers // k) * inputs + min(k, layers) * layer
    scores = plan.masked * (shape.padded_vocab_size * 2 * b + 6 * width * b)  # the logits and their gradient
    return kept + 2 * tokens * width * b + scores


def host(config: Config, plan: Plan, states: int) -> int:
    """Bytes of host memory that a rank needs at most for weights that it begins with, and for checkpoints.

    states: of its device memory.
    """
    with on_meta():
        model = BertForPreTraining(plan.model, kernels.select(kernels.Config(fused="none"), torch.device("cpu")))
    whole = 4 * sum(p.numel() for p in model.parameters())
    beginning = 0 if config.checkpoint.init_checkpoint is None and plan.optimizer.sharded else whole
    if config.checkpoint.directory is None:
        return beginning
    gathered = plan.optimizer.sharded and not config.checkpoint.shards
    return max(beginning, states * plan.num_ranks if gathered else states)


def describe(config: Config) -> str:
    """The estimate in words. Raises ConfigError where a GPU has less than that."""
    plan = Plan.of(config)
    parts = estimate(plan)
    total = sum(parts.values())
    said = f"{total / GIB:.1f} GiB per rank: " + ", ".join(f"{n} {size / GIB:.1f}" for n, size in parts.items() if size)
    said += f"; host {host(config, plan, parts['states']) / GIB:.1f} GiB on the rank that needs most"
    if plan.device_type == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return f"{said}; this machine has {there / GIB:.0f}"
    there = torch.cuda.get_device_properties(config.device).total_memory
    if total > there:
        raise ConfigError(
            f"out of memory: {said}; the GPU has {there / GIB:.1f}: lower BATCHSIZE and raise GRADIENT_STEPS, or set "
            "RECOMPUTE_LAYERS=1, SHARD_GRADIENTS=1"
        )
    return f"{said}; the GPU has {there / GIB:.1f}"
