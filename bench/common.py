"""What the GPU measurements share: batches of Wikipedia's lengths, operation counts, clocks, versions, timing."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "implementations"))  # a plain checkout will do

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bert.data.batch import PretrainingBatch, make_batch  # noqa: E402
from bert.data.synthetic import synthetic_records  # noqa: E402
from bert.model.config import BertConfig  # noqa: E402

TINY = {
    "vocab_size": 211,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def packed_batches(num_rows: int, count: int, config: BertConfig, seed: int = 0) -> list[PretrainingBatch]:
    """``count`` batches of ``num_rows`` packed rows with Wikipedia's mix of lengths (synthetic), on the CPU."""
    length = config.max_position_embeddings
    records = synthetic_records(num_rows * count, length, config.vocab_size, packed=True, seed=seed)
    assert records.row_offsets is not None
    rows = np.array_split(np.arange(records.num_rows)[: num_rows * count], count)
    ranges = [(records.row_offsets[row[0]], records.row_offsets[row[-1] + 1]) for row in rows]
    return [make_batch(records, np.arange(begin, end), length) for begin, end in ranges]


def model_flops(config: BertConfig, batch: PretrainingBatch) -> float:
    """Floating-point operations of forward and backward on the real tokens: 2 a multiply-add, backward twice forward.

    Products only: encoder, attention (with each sequence's own length squared), masked-LM head on masked tokens with
    the vocabulary unpadded, pooler and next-sentence head.
    """
    width, inner = config.hidden_size, config.intermediate_size
    lengths = np.diff(batch.cu_seqlens.numpy()[: batch.num_sequences + 1]).astype(np.float64)
    per_token = 2 * (4 * width * width + 2 * width * inner)
    attention = 4 * width * float((lengths**2).sum())
    encoder = config.num_hidden_layers * (per_token * float(lengths.sum()) + attention)
    masked = 2 * batch.num_masked * (width * width + width * config.vocab_size)
    sequences = 2 * batch.num_sequences * (width * width + 2 * width)
    return 3 * (encoder + masked + sequences)


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Time of one call among ``repeats`` back to back; on a GPU by its own clock."""
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
    stop.synchronize()
    return float(start.elapsed_time(stop)) / repeats


def median_milliseconds(run: Callable[[], object], rounds: int = 5, repeats: int = 10) -> float:
    """Median over rounds, after one to warm up."""
    milliseconds(run, 3)
    return statistics.median(milliseconds(run, repeats) for _ in range(rounds))


def gpu_state() -> dict[str, str]:
    """Clocks (MHz), power (W) and temperature (C) at this moment; empty without nvidia-smi."""
    fields = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, [value.strip() for value in line.splitlines()[0].split(",")], strict=False))


def machine() -> dict[str, Any]:
    """Names and versions that a figure depends on."""
    described: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("triton", "transformers"):
        if name in sys.modules:
            described[name] = sys.modules[name].__version__
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name(0)
        described["cuda"] = torch.version.cuda
        described["cudnn"] = torch.backends.cudnn.version()
    else:
        described["gpu"] = "none"
        described["cpu"] = platform.processor() or platform.machine()
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        described["commit"] = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        described["commit"] = "unknown"
    return described


def matmul_ceiling(size: int = 8192) -> float:
    """TFLOP/s of a large bf16 product of random numbers: what the chip gives, power limit included."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    size = size if torch.cuda.is_available() else 128
    a, b = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_milliseconds(lambda: a @ b) / 1e9


def emit(result: dict[str, Any]) -> None:
    """Prints the result as the JSON line that ends a benchmark's output."""
    print(json.dumps(result), flush=True)
