"""How long a training step of BERT-large should take on a GPU that is not there: its launches recorded, rates given.

Every launch of forward, backward and update is recorded on the meta device at real sizes, with the bytes of its
operands and the operations of its products. A product takes its operations over the rate of its precision, attention
its instructions (tests/bert/kernels/compiled_kernels.json) over the rate at which they issue, everything else its bytes
over the memory's rate. On several GPUs gradients go out bucket by bucket while the backward pass runs, and parameters
come back while the next forward pass does: what does not fit beside them is added. A model, not a measurement: where
both are there, the difference by part says where to look next.

Prints one JSON line; with --markdown a table of both precisions on both GPUs, with --pretraining one of the recipes of
configs/pretrain_large_*.sh on a node of 8 GPUs. FP8_FAST_SUMS and FP8_OUTPUT_PROJECTION count as for a run.

usage: python bench/step_model.py [--gpu h200] [--precision fp8] [--rows 48] [--gpus 8] [--network nvlink] [--markdown]
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton  # noqa: F401  before bert, which takes Triton where it is there already
from lib import ROOT, Parser, at_least, emit, file, integer, positive
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_lib import TINY, packed_batches
from train_step import PARTS, beside, capacity
from triton.runtime.jit import JITFunction

from bert import kernels, optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.core.env import from_env
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels import fp8_feed_forward, fp8_linear, lamb, triton_support
from bert.kernels.fp8 import Recipe
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.optim.sharded import Sharded
from bert.training.evaluate import evaluation_room, fill_batches, share
from bert.training.graph import graph_capacity, static_batch

META = torch.device("meta")
TABLE = ROOT / "tests" / "bert" / "kernels" / "compiled_kernels.json"
TILE, ATTENTION_WARPS = 64, 4  # of attention_triton: queries and keys of a block, warps of a program


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Throughput of a GPU, per second.

    bf16, fp8_fast, fp8_exact: operations of products; memory: bytes; issue: instructions of all its warps; launches:
    kernels of a CUDA graph, one after the other.
    """

    bf16: float = 0.9 * 770e12
    fp8_fast: float = 0.9 * 1350e12
    fp8_exact: float = 0.9 * 1100e12
    memory: float
    issue: float = 0.55 * 132 * 4 * 1.755e9  # 132 multiprocessors issue 4 a clock at best; 55% of that is assumed
    launches: float = 5e5  # 2 us for the smallest is assumed


# Products: 90%, for a layer's sizes, of what large ones reach (bf16 measured on an H200, fp8 assumed); memory: 90% of
# measured copies.
# A100 and B200 are not measured: the H100's share of their published peaks (bf16: 312 and 2,250 Tflop/s, 2 and 8 TB/s;
# the B200's fp8 is twice its bf16 by the H100's ratio), their multiprocessors and clocks. An A100 has no fp8.
GPUS = {
    "h100": Rates(memory=0.9 * 3.0e12),
    "h200": Rates(memory=0.9 * 4.3e12),
    "a100": Rates(bf16=0.9 * 243e12, memory=0.9 * 1.8e12, issue=0.55 * 108 * 4 * 1.41e9),
    "b200": Rates(
        bf16=0.9 * 1750e12, fp8_fast=0.9 * 3070e12, fp8_exact=0.9 * 3070e12, memory=0.9 * 7.1e12,
        issue=0.55 * 148 * 4 * 1.965e9,
    ),
}  # fmt: skip
NETWORKS = {"nvlink": 450e9 * 0.8, "infiniband": 50e9 * 0.8}  # bytes a second and GPU each way, and the share reached

IN_PLACE = {  # operands that are read and written
    ("LAMB", "_moments"): ("first", "second"),
    ("LAMB", "_update"): ("master",),
    ("head, loss", "_backward"): ("logits",),
}
NOTHING_MOVED = ("aten::empty", "aten::new_empty", "aten::detach", "aten::set_")
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel: its part of the step, and what bounds it."""

    part: str
    phase: str  # forward, backward or update; of an evaluation weights, which are cast once, or forward
    num_bytes: float = 0.0
    operations: float = 0.0
    precision: str = ""
    instructions: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """By whatever takes longest."""
        product = self.operations / getattr(rates, self.precision) if self.precision else 0.0
        return max(product, self.num_bytes / rates.memory, self.instructions / rates.issue, 1 / rates.launches)


@dataclass
class Recording(TorchDispatchMode):
    """Records the launches of what runs inside of it."""

    config: BertConfig
    tile_pairs: float  # blocks of queries and keys that attend, over all sequences and heads of a layer
    loops: dict[str, int]  # instructions of attention's loops, by kernel
    launches: list[Launch] = field(default_factory=list)
    phase: str = "forward"

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        moved = _tensors((args, kwargs, result))
        name = function._schema.name
        if name in PRODUCTS:
            a, b = [tensor for tensor in _tensors(args) if tensor.ndim >= 2][-2:]
            self.product(a, b, "bf16", _bytes(moved))
        elif not function.is_view and not name.startswith(NOTHING_MOVED):
            self.launches.append(Launch(part="other", phase=self.phase, num_bytes=_bytes(moved)))
        return result

    def product(self, a: Tensor, b: Tensor, precision: str, num_bytes: float) -> None:
        """A product of the last two dimensions."""
        vocabulary = self.config.padded_vocab_size in (*a.shape, *b.shape)
        part = "head, loss" if vocabulary else "products"
        operations = 2.0 * a.numel() * b.shape[-1]
        self.launches.append(
            Launch(part=part, phase=self.phase, num_bytes=num_bytes, operations=operations, precision=precision)
        )

    def triton(self, function: JITFunction, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """A Triton kernel, in place of its launch."""
        part = PARTS[function.fn.__module__.rpartition(".")[2]]
        moved = _bytes(_tensors((positional, named)))
        given = dict(zip(function.arg_names, positional, strict=False)) | named
        moved += _bytes([given[argument] for argument in IN_PLACE.get((part, function.__name__), ())])
        loop = self.loops.get(function.__name__, 0) if part == "attention" else 0
        instructions = self.tile_pairs * loop * ATTENTION_WARPS
        self.launches.append(Launch(part=part, phase=self.phase, num_bytes=moved, instructions=instructions))

    def scaled_product(
        self, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, bias: Any, dtype: torch.dtype, fast: bool,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """In place of fp8.product, which without a GPU is many operations."""
        output = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device) if out is None else out
        self.product(a, b, "fp8_fast" if fast else "fp8_exact", _bytes([a, b, output]))
        return output


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> float:
    """Bytes of different tensors; one that is read and written counts once."""
    return float(sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values()))


def recipe() -> Recipe:
    """How a run with the variables that are set would do its products in fp8."""
    settings = dataclasses.replace(from_env(PrecisionConfig, os.environ), precision="fp8")
    found = settings.resolve(META).fp8
    assert found is not None
    return found


def record(config: BertConfig, batch: PretrainingBatch, precision: str, evaluates: bool = False) -> list[Launch]:
    """The launches of a step on a batch as a graph takes it: forward, backward, LAMB; or of an evaluation pass."""
    lengths = np.diff(batch.cu_seqlens.numpy())  # padding is sequences of its own
    pairs = float((np.ceil(lengths / TILE) ** 2).sum()) * config.num_attention_heads
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    newest = table[max(table)]
    loops = {name.partition(":")[2].split("-")[0]: f["loop"] for name, f in newest.items() if "attention:" in name}
    recording = Recording(config, pairs, loops)
    with (
        mock.patch.object(JITFunction, "run", lambda *args, **kwargs: recording.triton(*args, **kwargs)),
        mock.patch.object(fp8_feed_forward, "product", recording.scaled_product),
        mock.patch.object(fp8_linear, "product", recording.scaled_product),
        triton_support.interpreted(),
        META,
    ):
        model = BertForPreTraining(config, kernels.select(kernels.Config(fused="all", attention="triton"), META))
        model.to(torch.bfloat16)
        if precision == "fp8":
            model.use_fp8(recipe(), META).calibrated = True
        data = batch.to(META)
        world = World(DistConfig(device="cpu"))
        world.device = META
        sharded = Sharded(  # of one GPU, for its flat buffers of weights and gradients
            model.named_parameters(), lambda shard: optim.Config().flat_rule(shard, fused=True), world,
            stages=model.stages(), side_by_side=optim.side_by_side(model),
        )  # fmt: skip
        if evaluates:
            recording.phase = "weights"
            with torch.no_grad(), recording, model.evaluating():
                recording.phase = "forward"
                model.scored(data)
            return recording.launches
        with recording, sharded.buckets.backward_pass(first=True, reduce=False):
            losses = model(data)
            recording.phase = "backward"
            torch.autograd.backward([losses.mlm + losses.nsp])
        recording.phase = "update"  # clipping and LAMB on flat buffers
        sizes = [parameter.numel() for parameter in model.parameters()]
        layout = lamb.make_layout(sizes, [0.01] * len(sizes), META)
        gradient, low = (torch.empty(layout.size, dtype=torch.bfloat16, device=META) for _ in range(2))
        master, first, second = (torch.empty(layout.size, device=META) for _ in range(3))
        scalars = torch.empty(4, device=META)
        lamb.fused.squared_norm(gradient)
        norms = lamb.fused.moments(layout, gradient, master, first, second, scalars, 0.9, 0.999, 1e-6)
        lamb.fused.update(layout, master, first, second, low, norms, scalars, 1e-6)
    return recording.launches


def exposed_seconds(buckets: list[float], spans: list[float], rate: float, ranks: int) -> float:
    """Transfer time of ``buckets`` (bytes) not hidden by a pass, seconds; bucket i is ready when its ``span`` ends.

    A ring: each rank sends (ranks - 1) / ranks of the bytes. The same time holds for parameters that a pass waits for,
    with the order of both turned around.
    """
    sent = now = 0.0
    for num_bytes, span in zip(buckets, spans, strict=True):
        now += span
        sent = max(sent, now) + num_bytes * (ranks - 1) / ranks / rate
    return max(sent - now, 0.0) if ranks > 1 else 0.0


def predict(
    config: BertConfig, batch: PretrainingBatch, rows: int, precision: str, rates: Rates, ranks: int, network: float,
    accumulate: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds by part, their sum and sequences a second and GPU, for a batch of ``rows`` packed rows.

    accumulate: such batches a step, which updates and communicates once.
    """
    launches = record(config, static_batch(batch, capacity(rows, config.max_position_embeddings)), precision)
    parts: dict[str, float] = {}
    phases = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for launch in launches:
        spent = launch.seconds(rates)
        name = f"products {launch.phase}" if launch.part == "products" else launch.part
        parts[name] = parts.get(name, 0.0) + spent
        phases[launch.phase] += spent
    if ranks > 1:
        parts["LAMB"] /= ranks  # each rank updates its share
    parts = {name: spent if name == "LAMB" else accumulate * spent for name, spent in parts.items()}
    layers = config.num_hidden_layers
    of_layer = 2.0 * (4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size)
    of_rest = 2.0 * (config.padded_vocab_size + config.max_position_embeddings) * config.hidden_size
    buckets = [of_layer] * layers + [of_rest]
    spans = [[phases[phase] / len(buckets)] * len(buckets) for phase in ("backward", "forward")]
    parts["communication"] = sum(exposed_seconds(buckets, span, network, ranks) for span in spans)
    total = sum(parts.values())
    return {
        "milliseconds": {name: round(spent * 1e3, 3) for name, spent in parts.items()},
        "total": round(total * 1e3, 2),
        "sequences_per_second": round(accumulate * batch.num_sequences / total, 1),
        "launches": len(launches),
        "gigabytes": round(sum(launch.num_bytes for launch in launches) / 1e9, 1),
        "product_operations": sum(launch.operations for launch in launches),
    }


def evaluation(
    config: BertConfig, rows: int, precision: str, rates: Rates, ranks: int, every: int, step_rate: float
) -> dict[str, float]:
    """Seconds of an evaluation of 10,000 sequences on ``ranks`` GPUs with EVAL_BATCHSIZE = ``rows``, and its share of a
    run that evaluates every ``every`` sequences and trains ``step_rate`` a second and GPU.
    """
    length = config.max_position_embeddings
    records, room = synthetic_records(10_000, length, config.vocab_size, False, 0), evaluation_room(rows, length)
    shares = [share(records, 10_000, rank, ranks) for rank in (0, ranks - 1)]  # the least tokens and the most
    slowest = max((fill_batches(records, mine, room) for mine in shares), key=len)
    batch = static_batch(make_batch(records, slowest[0], length), graph_capacity(room, rows))
    launches = record(config, batch, precision, evaluates=True)
    spent = sum(each.seconds(rates) * (1 if each.phase == "weights" else len(slowest)) for each in launches)
    part = spent / (spent + every / (step_rate * ranks))
    return {"batches": len(slowest), "seconds": round(spent, 3), "share": round(part, 4)}


def markdown(config: BertConfig, batch: PretrainingBatch, rows: int) -> str:
    """Both precisions on both GPUs, alone, as a table."""
    columns = {
        f"{precision} {gpu.upper()}": predict(config, batch, rows, precision, GPUS[gpu], 1, 1.0)
        for precision, gpu in itertools.product(("bf16", "fp8"), ("h100", "h200"))
    }
    names = list(dict.fromkeys(name for column in columns.values() for name in column["milliseconds"]))
    lines = [f"| ms, modelled | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        figures = [column["milliseconds"].get(name, 0.0) for column in columns.values()]
        if any(figures):
            lines.append(f"| {name} | {' | '.join(f'{figure:.1f}' for figure in figures)} |")
    lines.append(f"| **step** | {' | '.join(str(column['total']) for column in columns.values())} |")
    rates = " | ".join(f"{column['sequences_per_second']:,.0f}" for column in columns.values())
    return "\n".join([*lines, f"| **sequences/s** | {rates} |"])


# Of two_phases.sh: tokens of a row; rows at once on a GPU of 80 GB, and of more; rows of a step on 8 GPUs; steps.
PHASES = [(128, 256, 512, 65_536, 7_038), (512, 32, 64, 16_384, 1_563)]


def pretraining(gpus: list[str]) -> str:
    """Both phases of BERT-large in bf16 on 8 GPUs of a node, as a table: rows a second and hours."""
    lines = ["| modelled, 8 GPUs | rows of 128 a second | phase 1, hours | rows of 512 a second | phase 2, hours |"]
    lines.append("|---" * 5 + "|")
    for gpu in gpus:
        cells = []
        for length, small, large, rows_a_step, steps in PHASES:
            rows = small if gpu in ("a100", "h100") else large
            config = BertConfig(max_position_embeddings=length)
            batch = packed_batches(rows, 1, config)[0]
            accumulate = rows_a_step // (8 * rows)
            found = predict(config, batch, rows, "bf16", GPUS[gpu], 8, NETWORKS["nvlink"], accumulate)
            seconds = found["total"] / 1e3
            cells += [f"{rows_a_step / seconds:,.0f}", f"{steps * seconds / 3600:.1f}"]
        lines.append(f"| {gpu.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--gpu", choices=list(GPUS), default="h200", help="(default h200)")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="fp8", help="(default fp8)")
    parser.add_argument("--rows", type=integer, default=48, help="packed rows on each GPU (default 48)")
    parser.add_argument("--length", type=at_least(8), default=512, help="tokens of a row (default 512)")
    parser.add_argument("--gpus", type=integer, default=1, help="ranks that share the update (default 1)")
    parser.add_argument("--network", choices=list(NETWORKS), default="nvlink", help="between them (default nvlink)")
    for rate in dataclasses.fields(Rates):
        parser.add_argument(f"--{rate.name.replace('_', '-')}", type=positive, help="per second, such as 7e14")
    parser.add_argument("--pretraining", action="store_true", help="a table of the recipes of pretraining instead")
    parser.add_argument("--evaluation", type=integer, metavar="EVERY", help="evaluations too, every EVERY sequences")
    parser.add_argument("--evaluation-rows", type=integer, default=16, help="EVAL_BATCHSIZE (default 16, as its own)")
    parser.add_argument("--evaluation-precision", choices=("bf16", "fp8"), help="(default: that of the training)")
    parser.add_argument("--measured", type=file, metavar="FILE", help="beside it, results.jsonl of gpu_all.py by part")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    parser.add_argument("--markdown", action="store_true", help="a table of both precisions and GPUs instead")
    options = parser.parse_args()
    if options.gpu == "a100" and options.precision == "fp8":
        parser.error("an A100 has no fp8: --precision bf16")
    if options.pretraining:
        print(pretraining(list(GPUS)))
        return
    config = BertConfig(**TINY) if options.tiny else BertConfig(max_position_embeddings=options.length)
    batch = packed_batches(options.rows, 1, config)[0]
    if options.markdown:
        print(markdown(config, batch, options.rows))
        return
    given = {rate.name: getattr(options, rate.name) for rate in dataclasses.fields(Rates)}
    rates = dataclasses.replace(GPUS[options.gpu], **{name: value for name, value in given.items() if value})
    found = predict(config, batch, options.rows, options.precision, rates, options.gpus, NETWORKS[options.network])
    if options.measured:
        found["parts"] = beside(found["milliseconds"], options.measured, options.precision, options.rows)
    if options.evaluation:
        step_rate = found["sequences_per_second"]
        rows, precision = options.evaluation_rows, options.evaluation_precision or options.precision
        found["evaluation"] = evaluation(config, rows, precision, rates, options.gpus, options.evaluation, step_rate)
    settings = {name: getattr(options, name) for name in ("gpu", "precision", "rows", "length", "gpus", "network")}
    if options.precision == "fp8":
        settings["fp8"] = dataclasses.asdict(recipe())
    emit("step_model", settings | found)


if __name__ == "__main__":
    main()
