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
    lines: list[str] = []

    def event(key: str, value: Any = None, **metadata: Any) -> None:
        place = {"file": "/workspace/bert/run_pretraining.py", "lineno": 1000 + len(key)}
        record = {"namespace": "", "time_ms": START_MS + 100 * len(lines), "event_type": "POINT_IN_TIME"}
        lines.append(f":::MLLOG {json.dumps({**record, 'key': key, 'value': value, 'metadata': place | metadata})}\n")

    event("cache_clear", True)
    for _ in range(8):
        event("init_start")
    submission = {"benchmark": "bert", "org": "EXAMPLE", "division": "closed", "status": "onprem", "platform": "1xBOX"}
    for key, value in (
        {f"submission_{k}": v for k, v in submission.items()} | {"seed": seed} | HYPERPARAMETERS
    ).items():
        event(key, value)
    for i in range(400):
        event("weights_initialization", tensor=f"bert.encoder.layer.{i % 24}.attention.output.LayerNorm.weight_{i}")
    event("init_stop")
    event("run_start")
    event("epoch_start", epoch_num=0)
    for i in range(1, 18):
        samples = 150_000 * i
        event("tracked_stats", {"throughput": 11_600.0}, epoch_num=samples)
        event("eval_start", samples, epoch_num=samples)
        event("eval_stop", samples, epoch_num=samples)
        event("eval_accuracy", 0.7203 if i == 17 else 0.38 + 0.02 * i, epoch_num=samples)
    event("epoch_stop", epoch_num=samples)
    event("train_samples", samples)
    event("eval_samples", 10_000)
    event("run_stop", status="success")
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
