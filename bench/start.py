"""How long a run takes to its clock: BERT-large on CPU ranks, from init_start to run_start, and by part.

Ranks joined by gloo, the optimizer sharded as on GPUs; weights from a checkpoint, as the benchmark has them.
Steps before the clock are left out, whose time on a CPU says nothing of a GPU's. Prints one JSON line.

usage: python bench/start.py [--ranks 2] [--repeats 3] [--layers 24] [--replicated]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lib import ROOT, Parser, cpu_seconds, emit, free_port, integer
from torch_lib import TINY, new_model

from bert.model.config import BertConfig

TIMEOUT = 200  # seconds of one start
STEP = {  # one, as small as can be
    "SYNTH_DATA": "1", "BATCHSIZE": "1", "MAX_SEQ_LENGTH": "32", "PACKING_FACTOR": "2", "MAX_STEPS": "1", "LR": "1e-4",
    "SUBMISSION_DIVISION": "open", "DEVICE": "cpu", "SEED": "1", "WARMUP_RUN": "0", "OMP_NUM_THREADS": "1",
    "EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def start(settings: dict[str, str], ranks: int, checkout: Path = ROOT) -> dict[str, float]:
    """One run of one step: seconds from init_start to run_start, CPU seconds of all ranks, and of the parts."""
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | STEP | settings | {"PYTHONPATH": str(checkout / "implementations"), "RUN_DIR": folder}
        common |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}

        def run() -> None:
            environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            command, deadline = [sys.executable, "-m", "bert"], time.monotonic() + TIMEOUT
            processes = [
                subprocess.Popen(command, env=each, cwd=folder, stdout=subprocess.DEVNULL) for each in environments
            ]
            try:
                codes = [process.wait(max(deadline - time.monotonic(), 1)) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            if any(codes):
                raise SystemExit(f"start: a rank of {checkout} ended with {codes}, see above")

        spent = cpu_seconds(run)
        events = [json.loads(line[9:]) for line in Path(folder, "result_0.txt").read_text().splitlines()]
        at = {event["key"]: event["time_ms"] for event in events if event["key"] in ("init_start", "run_start")}
        parts = json.loads(Path(folder, "environment.json").read_text()).get("start_seconds", {})
        return {"init": (at["run_start"] - at["init_start"]) / 1e3, "cpu_of_the_run": spent, **parts}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=integer, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--repeats", type=integer, default=3, help="starts (default 3)")
    parser.add_argument("--layers", type=integer, default=24, help="of the model (default 24: 5 GB of memory a rank)")
    parser.add_argument("--replicated", action="store_true", help="SHARD_OPTIMIZER=0")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    shape = json.loads((ROOT / "configs" / "models" / "bert_large.json").read_text(encoding="utf-8"))
    shape |= TINY | {"max_position_embeddings": 512} if options.tiny else {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        model, weights = Path(folder, "bert_config.json"), Path(folder, "weights.pt")
        model.write_text(json.dumps(shape), encoding="utf-8")
        settings = {"BERT_CONFIG": str(model), "SHARD_OPTIMIZER": str(int(not options.replicated))}
        settings["INIT_CHECKPOINT"] = str(weights)
        parameters = new_model(BertConfig.from_json(model)).named_parameters()
        torch.save({name: parameter.detach() for name, parameter in parameters}, weights)
        runs = [start(settings, options.ranks) for _ in range(options.repeats)]
    figures = {part: round(statistics.median(run[part] for run in runs), 2) for part in runs[0]}
    emit("start", figures, data=f"BERT-large's shape, {options.layers} layers, weights made up")


if __name__ == "__main__":
    main()
