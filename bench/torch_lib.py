"""Shared by benchmarks that use torch: small models, batches with Wikipedia's lengths, GPU timing and ceilings."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from lib import explain, in_turns, output_of

from bert import kernels, optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import Config as PrecisionConfig
from bert.kernels.support.graph_capture import capture, warm_stream
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.training.step import Step, build_step

TINY = {
    "vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
# Takes the number of the call, to rotate among inputs so that caches stay cold.
Call = Callable[[int], object]


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


PLAIN = kernels.Config(fused="none", attention="sdpa_loop")


def new_model(
    config: BertConfig, choice: kernels.Config = PLAIN, seed: int = 0
) -> BertForPreTraining:
    """The initial model of a run with this seed, on the CPU."""
    model = BertForPreTraining(config, kernels.bind_kernels(choice, device()))
    initialize(model, seed)
    return model


def new_step(
    model: BertForPreTraining, precision: PrecisionConfig, world: World | None = None, fused_update: bool = False,
    **optimizer: Any,
) -> Step:  # fmt: skip
    """A step of the trainer, on one rank unless a world is given; ``optimizer``: settings of optim.Config."""
    # A step needs a world even on one rank: it joins no process group then.
    world = world or World(DistConfig(device=next(model.parameters()).device.type))
    rules, resolved = optim.Config(**optimizer), precision.resolve(world.device)
    return build_step(model, resolved, rules, world, accumulate=False, fused_update=fused_update)


def packed_batches(
    num_rows: int, count: int, config: BertConfig, seed: int = 0
) -> list[PretrainingBatch]:
    """``count`` batches of ``num_rows`` packed rows with Wikipedia's length distribution (synthetic), on the CPU."""
    length = config.max_position_embeddings
    records = synthetic_records(num_rows * count, length, config.vocab_size, packed=True, seed=seed)
    assert records.row_offsets is not None
    rows = np.array_split(np.arange(records.num_rows)[: num_rows * count], count)
    ranges = [(records.row_offsets[row[0]], records.row_offsets[row[-1] + 1]) for row in rows]
    return [make_batch(records, np.arange(begin, end), length) for begin, end in ranges]


def model_flops(config: BertConfig, batch: PretrainingBatch) -> float:
    """Floating-point operations of forward and backward on real tokens: 2 per multiply-add, backward twice forward.

    Matrix products only: encoder, attention (each sequence's length squared), masked-LM head on masked tokens with the
    unpadded vocabulary, pooler and next-sentence head.
    """
    width, inner = config.hidden_size, config.intermediate_size
    lengths = np.diff(batch.cu_seqlens.numpy()[: batch.num_sequences + 1]).astype(np.float64)
    # Query, key, value and output projections; two products of the feed-forward layers.
    per_token = 2 * (4 * width * width + 2 * width * inner)
    # Queries by keys and probabilities by values, 2 operations each.
    attention = 4 * width * float((lengths**2).sum())
    encoder = config.num_hidden_layers * (per_token * float(lengths.sum()) + attention)
    # Transform and decoder, of the M masked tokens only.
    masked = 2 * batch.num_masked * (width * width + width * config.vocab_size)
    # Pooler, and the next-sentence head with its two classes.
    sequences = 2 * batch.num_sequences * (width * width + 2 * width)
    return 3 * (encoder + masked + sequences)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Mean time of ``repeats`` calls back to back, by CUDA events on a GPU."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) * 1e3 / repeats
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    # The host waits here, after all calls, so that launches overlap with kernels as in training.
    stop.synchronize()
    return float(start.elapsed_time(stop)) / repeats


def median_milliseconds(run: Callable[[], object], rounds: int = 5, repeats: int = 10) -> float:
    """Median over rounds, after a warm-up."""
    milliseconds(run, 3)
    return statistics.median(milliseconds(run, repeats) for _ in range(rounds))


def matmul_ceiling(size: int = 8192) -> float:
    """TFLOP/s of a large bf16 product of random numbers: what the chip reaches within its power limit."""
    dtype, size = (torch.bfloat16, size) if torch.cuda.is_available() else (torch.float32, 128)
    # Random: zeros toggle fewer transistors and ran 13% faster on a power-limited H200.
    a, b = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_milliseconds(lambda: a @ b) / 1e9


def copy_bandwidth() -> float:
    """GB/s of a 2 GiB copy on the GPU, bytes read plus written: what memory-bound kernels can reach."""
    # Far above the L2 cache of 50 MB, so that every byte comes from memory.
    source = torch.randint(0, 127, (2**31,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_milliseconds(lambda: target.copy_(source), repeats=2) / 1e6


def gpu_state() -> dict[str, str]:
    """Current clocks (MHz), power (W) and temperature (C); empty without nvidia-smi."""
    fields = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
    line = output_of(
        "nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"
    )
    return (
        dict(zip(fields, [value.strip() for value in line.split(",")], strict=False))
        if line
        else {}
    )


def graphs_in_turns(functions: Mapping[str, Call]) -> dict[str, dict[str, float]]:
    """Microseconds per call of each function: median, minimum and maximum.

    By CUDA graphs of 12 calls, replayed in 15 turns after two warm-ups. A function that fails is
    reported on stderr and left out.
    """
    # In a graph of many calls, the gaps of launches from Python do not count.
    graphs = {}

    def calls(function: Call, count: int) -> None:
        for call in range(count):
            function(call)

    for name, function in functions.items():
        try:
            # Compiles, selects algorithms.
            stream = warm_stream(partial(calls, function, 3), 1, device())
            graphs[name] = capture(partial(calls, function, 12), stream).replay
        except Exception as error:
            print(f"{name}: left out: {explain(error)}", file=sys.stderr)
        gc.collect()
    # Every other turn runs backwards, so two turns warm up each graph once in either order.
    times = in_turns(graphs, 2 + 15, lambda replay: milliseconds(replay, 1) * 1e3 / 12)
    figures = {}
    for name, spans in times.items():
        kept = spans[2:]
        figures[name] = {
            "us": round(statistics.median(kept), 2),
            "min": round(min(kept), 2),
            "max": round(max(kept), 2),
        }
    return figures
