"""Wall time of `python -m review show` on ten logs of 130 KB, interpreter start included.

The logs are made up, with the lines of a real one: an init_start of each rank, 400 tensors, 17 evaluations. Prints
one JSON line. The target is half a second.

usage: python bench/review_show.py [--repeats 15] [--logs 10]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib import ROOT, Parser, cpu_seconds, emit, integer, wall_seconds

START_MS = 1_750_000_000_000
HYPERPARAMETERS = {
    "global_batch_size": 768, "gradient_accumulation_steps": 1, "opt_base_learning_rate": 0.00096,
    "opt_lamb_epsilon": 1e-6, "opt_lamb_beta_1": 0.60466, "opt_lamb_beta_2": 0.85437, "opt_lamb_weight_decay_rate": 0.1,
    "opt_learning_rate_training_steps": 3680, "opt_learning_rate_warmup_steps": 0, "num_warmup_steps": 0,
    "start_warmup_step": 0,
}  # fmt: skip


def log(seed: int) -> str:
    """A valid log of about 130 KB: 8 ranks, 400 tensors, 17 evaluations."""
    submission = {"benchmark": "bert", "org": "EXAMPLE", "division": "closed", "status": "onprem", "platform": "1xBOX"}
    settings = {f"submission_{key}": value for key, value in submission.items()} | {"seed": seed} | HYPERPARAMETERS
    tensors = [f"bert.encoder.layer.{i % 24}.attention.output.LayerNorm.weight_{i}" for i in range(400)]
    events: list[tuple[str, Any, dict[str, Any]]] = [
        ("cache_clear", True, {}), *[("init_start", None, {})] * 8, *((*item, {}) for item in settings.items()),
        *(("weights_initialization", None, {"tensor": tensor}) for tensor in tensors),
        ("init_stop", None, {}), ("run_start", None, {}), ("epoch_start", None, {"epoch_num": 0}),
    ]  # fmt: skip
    for i in range(1, 18):
        at = {"epoch_num": 150_000 * i}
        events += [
            ("tracked_stats", {"throughput": 11_600.0}, at), ("eval_start", at["epoch_num"], at),
            ("eval_stop", at["epoch_num"], at), ("eval_accuracy", 0.7203 if i == 17 else 0.38 + 0.02 * i, at),
        ]  # fmt: skip
    events += [
        ("epoch_stop", None, at), ("train_samples", at["epoch_num"], {}), ("eval_samples", 10_000, {}),
        ("run_stop", None, {"status": "success"}),
    ]  # fmt: skip
    lines = []
    for number, (key, value, metadata) in enumerate(events):
        metadata = {"file": "/workspace/bert/run_pretraining.py", "lineno": 1000 + len(key), **metadata}
        line = {"namespace": "", "time_ms": START_MS + 100 * number, "event_type": "POINT_IN_TIME"}
        lines.append(f":::MLLOG {json.dumps(line | {'key': key, 'value': value, 'metadata': metadata})}\n")
    return "".join(lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=integer, default=15)
    parser.add_argument("--logs", type=integer, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sizes = [(Path(name) / f"result_{i}.txt").write_text(log(i)) for i in range(options.logs)]

        def show() -> None:
            command = [sys.executable, "-m", "review", "show", name]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

        show()  # compiles the modules
        walls, cpus = [], []
        for _ in range(options.repeats):
            cpus.append(cpu_seconds(lambda: walls.append(wall_seconds(show))))
    figures = {
        "logs": options.logs,
        "kilobytes_per_log": round(statistics.mean(sizes) / 1000),
        "wall_seconds_median": round(statistics.median(walls), 3),
        "wall_seconds_best": round(min(walls), 3),
        "cpu_seconds_best": round(min(cpus), 3),
    }
    emit("review_show", figures, targets={"wall_seconds_median": (0.5, False)})


if __name__ == "__main__":
    main()
