"""How much memory a rank needs, by part: before anything starts, and for GPUs that are not there.

What stays from step to step is counted, not estimated: the optimizer is made on the meta device, with no process group,
its buffers are added up, and an update of it is watched for what it needs on the way. What the forward pass keeps for
the backward pass follows from the operations. T tokens of width D, feed-forward width F and b bytes a number keep in
each layer (8 D + 2 F) T b with the fused kernels: queries, keys, values, context, two LayerNorms with their inputs,
GELU with its input. Plain PyTorch keeps the masks of dropout and the attention's result once more, (11 D + 2 F) T b,
and on a CPU with dropout the attention's probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bert import kernels, optim
from bert.core.dist import EmulatedWorld
from bert.core.env import ConfigError
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import uninitialized, use_placeholders
from bert.optim.replicated import Replicated
from bert.optim.sharded import MOST_UNDER_WAY, GradientBuckets, Sharded
from bert.pretraining import host_memory
from bert.pretraining.config import Config
from bert.pretraining.peak import Peak

META = torch.device("meta")
GIB = 2**30
RUNTIME = {"cuda": 1 * GIB, "cpu": 0}  # CUDA context, kernels and NCCL's buffers: about; not measured
PROCESS = GIB // 2  # of host memory, which Python with PyTorch takes: about, measured on CPUs


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the memory of one rank depends on. tokens, masked: of a micro-batch, at most; length: of a sequence;
    held_in_fp8: numbers of the weights that evaluations in fp8 hold in it."""

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
    held_in_fp8: int = 0

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
            held_in_fp8=_held_in_fp8(config),
        )


def _held_in_fp8(config: Config) -> int:
    recipe, width = config.numerics.fp8, config.model.hidden_size
    if recipe is None or not recipe.evaluation or not config.evaluates:
        return 0
    of_layer = (4 if recipe.output_projection else 3) * width * width + 2 * width * config.model.intermediate_size
    return config.model.num_hidden_layers * of_layer


def shapes(config: BertConfig) -> BertForPreTraining:
    """The model without numbers."""
    with uninitialized():
        return BertForPreTraining(config, kernels.select(kernels.Config(fused="none"), torch.device("cpu")))


def estimate(plan: Plan) -> dict[str, int]:
    """Bytes of one rank's device memory by part.

    weights, gradients, states (with the fp32 masters) stay; activations: the most that is needed besides at once, by
    the backward pass with the gradients that wait in it, or by the update; runtime: what the device's libraries take.
    """
    model = shapes(plan.model)
    use_placeholders(model, plan.dtype, META)
    settings = plan.optimizer if not plan.optimizer.is_apex else replace(plan.optimizer, optimizer="lamb")
    low = plan.dtype != torch.float32
    masters = {name: torch.empty(p.shape, device=META) for name, p in model.named_parameters()} if low else None
    fused_update = plan.fused and settings.has_fused_update
    made = optim.build(
        settings, model, model.stages(), masters, EmulatedWorld(plan.num_ranks, 0, META, META),
        accumulate=plan.accumulate, fused=False,
    )  # fmt: skip
    rest = held(made) if isinstance(made, Sharded) else _replicated(made, low)
    waiting = _waiting(made) if isinstance(made, Sharded) else 0
    # The first gradient of the table of words, of the scores, waits for its second one, of the embeddings.
    words = plan.model.padded_vocab_size * plan.model.hidden_size * plan.dtype.itemsize
    needed = max(activations(plan) + words, waiting, 0 if fused_update else _update(made))
    rest["weights"] += plan.held_in_fp8  # a byte each
    return {**rest, "activations": needed, "runtime": RUNTIME[plan.device_type]}


def _replicated(made: Replicated, low: bool) -> dict[str, int]:
    weights = _size(*made.parameters)
    states = _size(*(t for state in made.pieces.states.values() for t in state))
    return {
        "weights": weights,
        "gradients": weights,
        "states": states + (_size(*made.pieces.masters) if low else 0),
    }


def held(made: Sharded, *, with_numbers: bool = False) -> dict[str, int]:
    """Bytes that a sharded optimizer keeps from step to step, by part. with_numbers: not those on the meta device."""
    parts = {
        "weights": [made.weights.whole, made.weights.shard],
        "gradients": gradient_buffers(made),
        "states": [made.shard.masters, *made.shard.states.values()],
    }
    return {name: _size(*(t for t in some if not (with_numbers and t.is_meta))) for name, some in parts.items()}


def gradient_buffers(made: Sharded) -> list[Tensor]:
    """The tensors in which gradients stay."""
    buckets = made.buckets
    if isinstance(buckets, GradientBuckets):
        return [buckets.whole, buckets.shard, buckets.received, buckets.wire_shard]
    return [buckets.shard]


def _waiting(made: Sharded) -> int:
    """Gradients that wait at most in a backward pass."""
    buckets = made.buckets
    largest = sorted(bucket.size for bucket in made.layout.buckets)[-MOST_UNDER_WAY:]
    waiting = sum(largest) * made.parameters[0].dtype.itemsize
    return waiting if isinstance(buckets, GradientBuckets) else waiting + sum(largest) * buckets.wire_dtype.itemsize


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
        # In fp32 at least: of low precision queries, keys and values are kept so, and no longer as they came.
        layer += 3 * tokens * plan.length * shape.num_attention_heads * max(b, 4)
        layer += 3 * tokens * width * (b if b >= 4 else 4 - b)
    kept = layers * layer
    if k := plan.recompute_layers:
        inputs = (2 if shape.layer_norm_large_model else 1) * tokens * width * b
        kept = -(-layers // k) * inputs + min(k, layers) * layer
    scores = plan.masked * (shape.padded_vocab_size * 2 * b + 6 * width * b)  # the logits and their gradient
    return kept + 2 * tokens * width * b + scores


def ranks_of_node(config: Config, plan: Plan) -> int:
    """Of the node that has most of them."""
    return -(-plan.num_ranks // config.mlperf.num_nodes)


def host(config: Config, plan: Plan, parts: dict[str, int]) -> int:
    """Bytes of host memory that the ranks of a node need together, at most: rank 0's node has most to hold.

    For weights that they begin with, then for checkpoints; on CPUs what else would be on the device too. parts: what
    ``estimate`` gives.
    """
    ranks = ranks_of_node(config, plan)
    model = shapes(plan.model)
    whole = 4 * sum(p.numel() for p in model.parameters())
    beginning = 0 if plan.optimizer.sharded else whole * ranks
    saving = 0
    if config.checkpoint.directory is not None:
        saving = parts["states"]
        if config.checkpoint.shards:
            saving *= ranks
        elif plan.optimizer.sharded:
            saving *= plan.num_ranks  # rank 0 gathers them
    device = sum(parts.values()) if plan.device_type == "cpu" else 0
    return max(beginning, saving) + ranks * (PROCESS + device)


def describe(config: Config) -> str:
    """The estimate in words. Raises ConfigError where a GPU or its host has less than that.

    Where DEVICE=auto finds no GPU nothing is refused: the check then runs on another machine than the run.
    """
    plan = Plan.of(config)
    parts = estimate(plan)
    total = sum(parts.values())
    said = f"{total / GIB:.1f} GiB per rank: " + ", ".join(f"{n} {size / GIB:.1f}" for n, size in parts.items() if size)
    said = on_device(
        config, plan, said, total,
        "lower BATCHSIZE and raise GRADIENT_STEPS, or set RECOMPUTE_LAYERS=1, SHARD_GRADIENTS=1",
    )  # fmt: skip
    return on_host(
        config, plan, said, host(config, plan, parts),
        "set SHARD_OPTIMIZER=1 and, with CHECKPOINT_DIR, CHECKPOINT_SHARDS=1, or start fewer ranks on a node",
    )  # fmt: skip


def device_bytes(config: Config) -> int:
    """Of the GPU."""
    return int(torch.cuda.get_device_properties(config.device).total_memory)


def on_device(config: Config, plan: Plan, said: str, needed: int, cure: str) -> str:
    """The words said, with what the GPU has, where there is one. Raises ConfigError where that is less than needed."""
    if plan.device_type != "cuda":
        return said
    there = device_bytes(config)
    said += f"; the GPU has {there / GIB:.1f}"
    if needed > there:
        raise ConfigError(f"out of memory: {said}: {cure}")
    return said


def on_host(config: Config, plan: Plan, said: str, needed: int, cure: str) -> str:
    """The same for the host of a node's ranks; where DEVICE=auto finds no GPU nothing is refused, see ``describe``."""
    there = host_memory.capacity()
    said += f"; host {needed / GIB:.1f} GiB for the ranks of a node; this machine has {there / GIB:.1f}"
    if needed > there and (plan.device_type == "cuda" or config.dist.device == "cpu"):
        raise ConfigError(f"out of memory: {said}: {cure}")
    return said
