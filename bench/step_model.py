"""Models a BERT-large training step on a GPU from its recorded launches and the GPU's rates.

Every launch of forward, backward and update is recorded on the meta device at real sizes, with the
bytes of its operands and the operations of its products. A launch takes the longest of three: its
operations over the rate of their kind, its bytes over the memory bandwidth, and the time of the
smallest launch. On several GPUs gradients are reduced bucket by bucket during the backward pass,
and parameters gathered during the next forward pass; only exposed communication is added. GPUs
shard an update within a node, and shards are averaged over nodes. A model, not a measurement.

Prints one JSON line; with --published a table of the league's systems, for which two constants are
fitted: the fraction of the modelled rate that they reach, and the latency of a collective.

usage: python bench/step_model.py [--gpu h200] [--precision fp8] [--rows 48] [--gpus 8]
       python bench/step_model.py --published
"""

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton  # noqa: F401  before bert, which uses Triton only if it is imported already
from lib import Parser, emit, integer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_lib import packed_batches
from train_step import PARTS, capacity
from triton.runtime.jit import JITFunction

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingBatch
from bert.kernels.fp8 import linear as fp8_linear
from bert.kernels.operations import fp8_feed_forward
from bert.kernels.support import launches, triton_support
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.optim.layout import layout_of
from bert.optim.sharded import BUCKET_BYTES, FlatOptimizer
from bert.pretraining.memory import meta_model
from bert.training.graph import static_batch
from review.league import entries

META = torch.device("meta")
# Products of queries by keys by head width in each attention kernel: the backward ones repeat the
# forward's first two.
ATTENTION_PRODUCTS = {"_forward": 2, "_query_gradient": 3, "_key_gradient": 4}
# Queries and keys of a program's block: sequences are computed in whole blocks.
ATTENTION_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput of a GPU, per second.

    bf16, fp8_fast, fp8_exact: operations of products; attention: those of its products; memory:
    bytes; launches: consecutive kernels of a CUDA graph; latency, no rate: seconds of a collective
    per doubling of the ranks, see --published.
    """

    bf16: float = 0.9 * 770e12
    fp8_fast: float = 0.9 * 1350e12
    fp8_exact: float = 0.9 * 1100e12
    # Of the products' rate: what the instructions of the kernels compiled for sm_90 (at commit
    # 72881f4) leave to tensor cores beside exp2, dropout and masks, at 55% of the issue slots,
    # which is assumed. The A100's share is sm_80's.
    attention: float = 0.523 * 0.9 * 770e12
    memory: float
    launches: float = 5e5  # 2 us for the smallest is assumed
    # Bytes per second each way, within a node; here and below 80% is assumed.
    nvlink: float = 0.8 * 450e9
    # A GPU's share of its node's network: 8 x 400 Gbit/s for 8 GPUs.
    nic: float = 0.8 * 50e9
    latency: float = 5e-6


# Products: at a layer's sizes, 90% of what large ones reach (bf16 measured on an H200, fp8
# assumed); memory: 90% of measured copies. An A100 is not measured: the H100's fraction of its
# published peaks (bf16: 312 Tflop/s, 2 TB/s). It has no fp8.
GPUS = {
    "h100": Rates(memory=0.9 * 3.0e12),
    # The H200 is an H100 with faster memory.
    "h200": Rates(memory=0.9 * 4.3e12),
    "a100": Rates(
        bf16=0.9 * 243e12,
        attention=0.897 * 0.9 * 243e12,
        memory=0.9 * 1.8e12,
        nvlink=0.8 * 300e9,
        nic=0.8 * 25e9,
    ),
}
# These allocate or rename memory, and launch no kernel.
NOTHING_MOVED = ("aten::empty", "aten::new_empty", "aten::detach", "aten::set_")
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


@dataclass(frozen=True)
class Launch:
    """A kernel launch: its part of the step, and its cost."""

    part: str
    phase: str  # forward, backward or update
    num_bytes: float
    operations: float
    kind: str  # of the operations: a rate

    def seconds(self, rates: Rates) -> float:
        """The longest of its costs."""
        computed = self.operations / getattr(rates, self.kind) if self.kind else 0.0
        return max(computed, self.num_bytes / rates.memory, 1 / rates.launches)


@dataclass
class Recording(TorchDispatchMode):
    """Records the launches within its context."""

    config: BertConfig
    attention: dict[str, float]  # operations of the attention kernels of a layer
    launches: list[Launch] = field(default_factory=list)
    phase: str = "forward"

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        moved = _tensors((args, kwargs, result))
        name = function._schema.name
        if name in PRODUCTS:
            # addmm has a bias before its two factors.
            a, b = [tensor for tensor in _tensors(args) if tensor.ndim >= 2][-2:]
            self.product(a, b, "bf16", _bytes(moved))
        elif not function.is_view and not name.startswith(NOTHING_MOVED):
            self.add("other", _bytes(moved))
        return result

    def add(
        self, part: str, num_bytes: float, operations: float = 0.0, kind: str = ""
    ) -> None:
        self.launches.append(Launch(part, self.phase, num_bytes, operations, kind))

    def product(self, a: Tensor, b: Tensor, kind: str, num_bytes: float) -> None:
        """Records a matrix product over the last two dimensions."""
        # Only the decoder has the vocabulary's width.
        of_head = self.config.padded_vocab_size in (*a.shape, *b.shape)
        part = "head, loss" if of_head else "products"
        self.add(part, num_bytes, 2.0 * a.numel() * b.shape[-1], kind)

    def triton(
        self,
        function: JITFunction,
        *positional: Any,
        grid: Any,
        warmup: bool,
        **named: Any,
    ) -> None:
        """Records a Triton kernel instead of launching it."""
        part = PARTS[function.fn.__module__.rpartition(".")[2]]
        # Every operand is read or written once.
        moved = _bytes(_tensors((positional, named)))
        operations = (
            self.attention.get(function.__name__, 0.0) if part == "attention" else 0.0
        )
        self.add(part, moved, operations, "attention" if operations else "")

    def scaled_product(
        self,
        a: Tensor,
        b: Tensor,
        _a_inverse: Any,
        _b_inverse: Any,
        _bias: Any,
        dtype: torch.dtype,
        fast: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """Replaces fp8.product, which is many operations without a GPU."""
        if out is None:
            out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
        self.product(a, b, "fp8_fast" if fast else "fp8_exact", _bytes([a, b, out]))
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> float:
    """Bytes of distinct tensors."""
    return float(
        # A tensor given twice is read once.
        sum(
            {
                id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors
            }.values()
        )
    )


def attention_operations(config: BertConfig, lengths: Any) -> dict[str, float]:
    """Operations of a layer's attention kernels, for sequences of these lengths."""
    # Programs work on whole blocks, and mask what is beyond the end of the sequence.
    blocks = np.ceil(lengths / ATTENTION_BLOCK) * ATTENTION_BLOCK
    product = 2.0 * config.hidden_size * float((blocks * blocks).sum())
    return {kernel: count * product for kernel, count in ATTENTION_PRODUCTS.items()}


def record(
    config: BertConfig, batch: PretrainingBatch, precision: str, whole: bool = False
) -> list[Launch]:
    """Launches of a step on a static batch: forward, backward, LAMB.

    whole: the last layer is computed for all tokens.
    """
    lengths = np.diff(batch.cu_seqlens.numpy())  # padding forms sequences too
    launches.assumed = 90  # of the kernels' choices: Hopper
    recording = Recording(config, attention_operations(config, lengths))
    with (
        mock.patch.object(
            JITFunction,
            "run",
            lambda *args, **kwargs: recording.triton(*args, **kwargs),
        ),
        mock.patch.object(fp8_feed_forward, "product", recording.scaled_product),
        mock.patch.object(fp8_linear, "product", recording.scaled_product),
        triton_support.interpreted(),
        META,
    ):
        chosen = kernels.bind_kernels(
            kernels.KernelsConfig(fused="all", attention="triton"), META
        )
        model = BertForPreTraining(config, chosen)
        model.to(torch.bfloat16)
        name, *trials = precision.split("+")
        if name == "fp8":
            # As after the first step, which measures the scales by additional work.
            model.use_fp8(META, trials).calibrated = True
        if whole:
            of_rows = model.bert.forward
            model.bert.forward = (  # type: ignore[method-assign]
                lambda batch, rows: of_rows(batch).index_select(0, rows)  # type: ignore[assignment]
            )
        data = batch.to(META)
        world = World(DistConfig(device="cpu"))
        # On one rank, and without a GPU; the buffers are on the meta device as well.
        world.device = META
        sharded = FlatOptimizer(  # for its flat buffers of weights and gradients
            model.named_parameters(),
            lambda shard: optim.OptimizerConfig().flat_rule(shard, fused=True),
            world,
            stages=model.stages(),
            contiguous_groups=optim.contiguous_groups(model),
        )
        # Recorded from here on, as building the model is no part of a step.
        with recording, sharded.buckets.backward_pass(first=True, reduce=False):
            losses = model(data)
            recording.phase = "backward"
            torch.autograd.backward([losses.mlm + losses.nsp])
        # The gradient is read twice, masters and moments are read twice and written once,
        # parameters are written: by one rank; predict divides LAMB by the ranks that share it.
        recording.phase = "update"
        recording.add(
            "LAMB", 42.0 * sum(parameter.numel() for parameter in model.parameters())
        )
    return recording.launches


def exposed_seconds(transfers: list[tuple[float, ...]], spans: list[float]) -> float:
    """Seconds of transfers that a pass does not hide; transfer i can start when its ``span`` ends.

    A transfer's parts are sequential, each on its own link. Reversed in order, the same holds for
    parameters that a pass waits for.
    """
    sent, now = [0.0, 0.0], 0.0
    for parts, span in zip(transfers, spans, strict=True):
        # A link sends one transfer at a time, in the order in which they are ready.
        ready = now = now + span
        for link, seconds in enumerate(parts):
            ready = sent[link] = max(sent[link], ready) + seconds
    return max(*sent, now) - now


def transfer_seconds(num_bytes: float, rates: Rates, gpus: int) -> tuple[float, float]:
    """Seconds of a bucket within a node, and of the all-reduce of each GPU's shard between nodes.

    Within: a reduce-scatter or an all-gather by a ring; between nodes by trees.
    """
    local, nodes = layout_of_nodes(gpus)
    within = num_bytes * (local - 1) / local / rates.nvlink
    within += rates.latency * math.log2(max(local, 2))
    # An all-reduce is a reduce-scatter and an all-gather; each GPU has a NIC.
    between = num_bytes * (nodes - 1) / nodes / (rates.nic * local)
    return within, 2 * (between + rates.latency * math.log2(nodes))


def layout_of_nodes(gpus: int) -> tuple[int, int]:
    """GPUs per node, and nodes of at most 8 GPUs."""
    return min(gpus, 8), -(-gpus // 8)


@functools.cache
def recorded_step(
    config: BertConfig, rows: int, precision: str, whole: bool
) -> tuple[list[Launch], int]:
    """Launches of a step on packed rows, and the number of sequences."""
    batch = packed_batches(rows, 1, config)[0]
    # Padded as in a graph, which computes on padding, too.
    room = capacity(rows, config.max_position_embeddings)
    launched = record(config, static_batch(batch, room), precision, whole)
    return launched, batch.num_sequences


@functools.cache
def buckets(config: BertConfig, sharers: int) -> list[tuple[int, bool]]:
    """Elements of each slice of the buckets, and whether it is a bucket's first.

    In the order of the backward pass.
    """
    model = meta_model(config)
    elements = BUCKET_BYTES // torch.bfloat16.itemsize
    layout = layout_of(
        list(model.parameters()), sharers, elements, optim.contiguous_groups(model)
    )
    return [
        (part.size, not number)
        for bucket in layout.buckets
        for number, part in enumerate(bucket.slices)
    ]


def predict(
    config: BertConfig,
    rows: int,
    precision: str,
    rates: Rates,
    gpus: int = 1,
    accumulate: int = 1,
    whole: bool = False,
) -> dict[str, Any]:
    """Milliseconds by part, their sum, and sequences per second and GPU.

    rows: packed rows of a batch.

    accumulate: batches per step, which updates and communicates once, with gradients in fp32 if
    above 1. whole: see ``record``.
    """
    recorded, num_sequences = recorded_step(config, rows, precision, whole)
    parts: dict[str, float] = {}
    phases = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for launch in recorded:
        spent = launch.seconds(rates)
        name = f"products {launch.phase}" if launch.part == "products" else launch.part
        parts[name] = parts.get(name, 0.0) + spent
        phases[launch.phase] += spent
    sharers, _ = layout_of_nodes(gpus)
    parts["LAMB"] /= sharers  # each rank updates its share
    parts = {
        name: spent if name == "LAMB" else accumulate * spent
        for name, spent in parts.items()
    }
    parts["communication"] = 0.0
    if gpus > 1:
        sent = buckets(config, sharers)
        count = sum(is_first for _, is_first in sent)
        # Bytes of a gradient: accumulated ones are sent in fp32. Parameters are gathered in bf16.
        for phase, width in (("backward", 4 if accumulate > 1 else 2), ("forward", 2)):
            transfers = [
                transfer_seconds(width * size, rates, gpus) for size, _ in sent
            ]
            if phase == "forward":  # the parameters are in the node already
                transfers = [(gather, 0.0) for gather, _ in transfers]
            # A bucket's slices are ready together, so its time counts with the first.
            spans = [phases[phase] / count * is_first for _, is_first in sent]
            parts["communication"] += exposed_seconds(transfers, spans)
        # Sums of norms.
        parts["communication"] += 2 * rates.latency * math.log2(sharers)
    total = sum(parts.values())
    return {
        "milliseconds": {name: round(spent * 1e3, 3) for name, spent in parts.items()},
        "total": round(total * 1e3, 2),
        "sequences_per_second": round(accumulate * num_sequences / total, 1),
        "launches": len(recorded),
        "product_operations": sum(
            launch.operations for launch in recorded if launch.part != "attention"
        ),
    }


class System(NamedTuple):
    """A system of the league."""

    gpu: str
    gpus: int
    rows: int
    accumulate: int

    def predicted(self, latency: float) -> float:
        precision = "bf16" if self.gpu == "a100" else "fp8"
        rates = dataclasses.replace(GPUS[self.gpu], latency=latency)
        # Their trainers compute the last layer for all tokens.
        figures = predict(
            BertConfig(),
            self.rows,
            precision,
            rates,
            self.gpus,
            self.accumulate,
            whole=True,
        )
        return float(figures["sequences_per_second"])


def system_of(entry: entries.Entry) -> System | None:
    """The system of a closed result from v1.1 on with nodes of 8.

    Such nodes have a NIC per GPU; for nodes of 4 that is not published.
    """
    name = entry.accelerator.upper()
    gpu = next((gpu for gpu in ("a100", "h100", "h200") if gpu.upper() in name), "")
    if (
        not gpu
        or "PCI" in name
        or entry.division != "closed"
        or float(entry.round) < 1.1
    ):
        return None
    if not (entry.nodes and entry.batch_size and entry.accelerators == 8 * entry.nodes):
        return None
    gpus = int(entry.accelerators)
    steps = int(entry.hyperparameters.get("gradient_accumulation_steps", 1))
    # Two sequences per row.
    rows = max(round(entry.batch_size / gpus / 2 / steps), 1)
    return System(gpu, gpus, rows, steps)


def systems() -> dict[System, set[float]]:
    """Sequences per second and GPU of equal systems; of resubmissions once."""
    alike: dict[System, set[float]] = {}
    for entry in entries.published():
        # The rate between evaluations where a log has it, as the model has no evaluations.
        rate = entry.training_rate or entry.sequences_per_second
        if rate and (system := system_of(entry)):
            alike.setdefault(system, set()).add(rate / system.gpus)
    return dict(sorted(alike.items()))


def published() -> str:
    """Table of the league's systems and the model, with the fitted constants."""
    middles = {system: statistics.median(rates) for system, rates in systems().items()}

    def errors(latency: float) -> list[float]:
        return [
            math.log(system.predicted(latency) / middle)
            for system, middle in middles.items()
        ]

    # By least squares. A common factor moves all logarithms alike, so the variance fits the
    # latency, and the mean then the factor.
    latency = min(
        (step * 1e-6 for step in range(1, 200)),
        key=lambda latency: statistics.pvariance(errors(latency)),
    )
    share = math.exp(-statistics.mean(errors(latency)))
    columns = "GPUs", "rows a GPU", "published", "predicted", "error"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    deviations = []
    for system, middle in middles.items():
        predicted = share * system.predicted(latency)
        deviations.append(predicted / middle - 1)
        steps = f" x {system.accumulate}" if system.accumulate > 1 else ""
        lines.append(
            f"| {system.gpus:,} {system.gpu.upper()} | {system.rows}{steps} "
            f"| {middle:.0f} | {predicted:.0f} | {deviations[-1]:+.0%} |"
        )
    absolute = sorted(map(abs, deviations))
    return "\n".join(
        [
            *lines,
            "",
            f"Fitted: {share:.2f} of the modelled rate, {latency * 1e6:.0f} us a collective for "
            "each doubling of ranks. "
            f"Error: {statistics.median(absolute):.0%} in the median, {absolute[-1]:.0%} at worst.",
        ]
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--gpu", choices=list(GPUS), default="h200", help="(default h200)"
    )
    parser.add_argument(
        "--precision",
        default="fp8",
        help="bf16, fp8 (default), or with trials: fp8+projection+fast_backward",
    )
    parser.add_argument(
        "--rows", type=integer, default=48, help="packed rows per GPU (default 48)"
    )
    parser.add_argument(
        "--gpus", type=integer, default=1, help="in nodes of 8 (default 1)"
    )
    parser.add_argument(
        "--accumulate", type=integer, default=1, help="batches per step (default 1)"
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="print a table of the league's systems instead",
    )
    options = parser.parse_args()
    if options.gpu == "a100" and options.precision != "bf16":
        parser.error("an A100 has no fp8: --precision bf16")
    if options.gpus > 8 and options.gpus % 8:
        parser.error(f"--gpus {options.gpus}: not a multiple of 8")
    if options.published:
        print(published())
        return
    rates = GPUS[options.gpu]
    figures = predict(
        BertConfig(),
        options.rows,
        options.precision,
        rates,
        options.gpus,
        options.accumulate,
    )
    emit("step_model", vars(options) | figures)


if __name__ == "__main__":
    main()
