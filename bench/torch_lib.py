"""Shared by benchmarks with torch: batches with Wikipedia's lengths, GPU timing, ceilings."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lib import output_of

from bert import kernels, optim
from bert.core.dist import DistConfig, World
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.training.step import Step, build_step
from common.env import ConfigError

TINY = {
    "vocab_size": 211,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
PLAIN = kernels.KernelsConfig(fused="none", attention="sdpa_loop")
# Takes the number of the call, to rotate among inputs so that caches stay cold.
Call = Callable[[int], object]


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def no_fp8() -> str:
    """Why the device does not compute in fp8; empty if it does."""
    try:
        PrecisionConfig(precision="fp8").check(device())
    except ConfigError as error:
        return str(error)
    return ""


def precisions() -> list[str]:
    """What is compared, as far as the device has it."""
    return ["bf16"] if no_fp8() else ["bf16", "fp8"]


def new_model(
    config: BertConfig, choice: kernels.KernelsConfig = PLAIN
) -> BertForPreTraining:
    """The initial model of a run, on the CPU."""
    model = BertForPreTraining(config, kernels.bind_kernels(choice, device()))
    initialize(model, seed=0)
    return model


def new_step(
    model: BertForPreTraining,
    precision: PrecisionConfig,
    fused_update: bool = False,
    **optimizer: Any,
) -> Step:
    """A step of the trainer on one rank; ``optimizer``: settings of OptimizerConfig."""
    # A step needs a world even on one rank: it joins no process group then.
    world = World(DistConfig(device=next(model.parameters()).device.type))
    return build_step(
        model,
        precision.resolve(world.device),
        optim.OptimizerConfig(**optimizer),
        world,
        accumulate=False,
        fused_update=fused_update,
    )


def packed_batches(
    num_rows: int, count: int, config: BertConfig
) -> list[PretrainingBatch]:
    """``count`` batches of packed rows with Wikipedia's lengths (synthetic), on the CPU."""
    length = config.max_position_embeddings
    records = synthetic_records(
        num_rows * count, length, config.vocab_size, packed=True, seed=0
    )
    assert records.row_offsets is not None
    first = records.row_offsets[: num_rows * count + 1 : num_rows]
    return [
        make_batch(records, np.arange(begin, end), length)
        for begin, end in itertools.pairwise(first)
    ]


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


def median_milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median over five rounds, after a warm-up."""
    milliseconds(run, 3)
    return statistics.median(milliseconds(run, repeats) for _ in range(5))


def matmul_ceiling() -> float:
    """TFLOP/s of a large bf16 product: what the chip reaches within its power limit."""
    dtype, size = (
        (torch.bfloat16, 8192) if torch.cuda.is_available() else (torch.float32, 128)
    )
    # Random: zeros toggle fewer transistors and ran 13% faster on a power-limited H200.
    a, b = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_milliseconds(lambda: a @ b) / 1e9


def copy_bandwidth() -> float:
    """GB/s of a 2 GiB copy on the GPU, bytes read plus written."""
    # Far above the L2 cache of 50 MB, so that every byte comes from memory.
    source = torch.randint(0, 127, (2**31,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        / median_milliseconds(lambda: target.copy_(source), repeats=2)
        / 1e6
    )


def gpu_state() -> dict[str, str]:
    """Current clocks (MHz), power (W) and temperature (C); empty without nvidia-smi."""
    fields = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
    query = f"--query-gpu={','.join(fields)}"
    line = output_of("nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0")
    if not line:
        return {}
    return dict(zip(fields, [value.strip() for value in line.split(",")], strict=False))
