"""How long a run takes to its clock: BERT-large on CPU ranks, from init_start to run_start, and by part.

Ranks joined by gloo, the optimizer sharded as on GPUs; weights from a checkpoint, as the benchmark has them.
Steps before the clock are left out, whose time on a CPU says nothing of a GPU's. With --kernels, how long it
takes ranks that start together to compile every Triton kernel of a step for a Hopper GPU that is not there: each for
itself, once between them, and from the cache folder. Prints one JSON line.

usage: python bench/start.py [--ranks 2] [--repeats 3] [--layers 24] [--replicated]
       python bench/start.py --kernels [--ranks 2] [--repeats 3]
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lib import ROOT, Parser, cpu_seconds, emit, free_port, integer, medians
from torch_lib import TINY, new_model

from bert.model.config import BertConfig

TIMEOUT = 200  # seconds of one start
STEP = {  # one, as small as can be
    "SYNTH_DATA": "1", "BATCHSIZE": "1", "MAX_SEQ_LENGTH": "32", "PACKING_FACTOR": "2", "MAX_STEPS": "1", "LR": "1e-4",
    "SUBMISSION_DIVISION": "open", "DEVICE": "cpu", "SEED": "1", "WARMUP_RUN": "0", "OMP_NUM_THREADS": "1",
    "EVAL_ITER_SAMPLES": "0", "TARGET_MLM_ACCURACY": "0", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip
COMPILE = """
import os, sys
import ahead_of_time, triton
from triton.backends.compiler import GPUTarget
from bert.kernels.compile_once import Compilations, lock_folder
launches = ahead_of_time.record(sys.argv[2])
compile_kernel = Compilations(lock_folder() if sys.argv[1] == "once" else None).guarded(triton.compile)
print("ready", flush=True)
sys.stdin.readline()
begin = sum(os.times()[:4])
for source, options in launches.values():
    compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
print([sum(os.times()[:4]) - begin, len(launches)], flush=True)
"""


@contextlib.contextmanager
def started(command: Sequence[str], environments: Sequence[dict[str, str]], **pipes: Any) -> Iterator[list[Any]]:
    """A process in each environment; all are ended with the block."""
    processes = [subprocess.Popen(command, env=environment, **pipes) for environment in environments]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start(settings: dict[str, str], ranks: int, checkout: Path = ROOT) -> dict[str, float]:
    """One run of one step: seconds from init_start to run_start, CPU seconds of all ranks, and of the parts."""
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | STEP | settings | {"PYTHONPATH": str(checkout / "implementations"), "RUN_DIR": folder}
        common |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]

        def run() -> None:
            command, deadline = [sys.executable, "-m", "bert"], time.monotonic() + TIMEOUT
            with started(command, environments, cwd=folder, stdout=subprocess.DEVNULL) as processes:
                codes = [process.wait(max(deadline - time.monotonic(), 1)) for process in processes]
            if any(codes):
                raise SystemExit(f"start: a rank of {checkout} ended with {codes}, see above")

        spent = cpu_seconds(run)
        events = [json.loads(line[9:]) for line in Path(folder, "result_0.txt").read_text().splitlines()]
        at = {event["key"]: event["time_ms"] for event in events if event["key"] in ("init_start", "run_start")}
        parts = json.loads(Path(folder, "environment.json").read_text()).get("start_seconds", {})
        return {"init": (at["run_start"] - at["init_start"]) / 1e3, "cpu_of_the_run": spent, **parts}


def by_part(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    found = medians({part: [run[part] for run in runs] for part in runs[0]})
    return {part: round(value, 2) for part, value in found.items()}


def compile_together(ranks: int, how: str, cache: Path, only: str) -> dict[str, float]:
    """Wall seconds of ranks that compile all kernels from the same moment on, and CPU seconds of all of them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [ROOT / "implementations", ROOT / "tests" / "bert" / "kernels"]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", COMPILE, how, only]
    with started(command, [environment] * ranks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as processes:
        if any(process.stdout.readline() != "ready\n" for process in processes):
            raise SystemExit("start: the kernels cannot be recorded, see above")
        begin = time.monotonic()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [json.loads(process.communicate(timeout=TIMEOUT)[0]) for process in processes]
        wall = time.monotonic() - begin
    return {"wall": wall, "cpu": sum(cpu for cpu, _ in found), "kernels": found[0][1]}


def kernels(ranks: int, repeats: int, only: str) -> dict[str, Any]:
    """Ranks with an empty cache folder, each for itself and once between them in turns, and with a full one."""
    found: dict[str, list[dict[str, float]]] = {"each for itself": [], "once": [], "from the cache": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            found["each for itself"].append(compile_together(ranks, "each", Path(one), only))
            found["once"].append(compile_together(ranks, "once", Path(other), only))
            found["from the cache"].append(compile_together(ranks, "once", Path(other), only))
    return {name: by_part(runs) for name, runs in found.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=integer, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--repeats", type=integer, default=3, help="starts (default 3)")
    parser.add_argument("--layers", type=integer, default=24, help="of the model (default 24: 5 GB of memory a rank)")
    parser.add_argument("--replicated", action="store_true", help="SHARD_OPTIMIZER=0")
    parser.add_argument("--kernels", action="store_true", help="the compilation of the kernels instead")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few kernels, to try the script out")
    options = parser.parse_args()
    if options.kernels:
        figures = kernels(options.ranks, options.repeats, "bias_gelu" if options.tiny else "")
        emit("start", figures, data="launches of BERT-large")
        return
    shape = json.loads((ROOT / "configs" / "models" / "bert_large.json").read_text(encoding="utf-8"))
    shape |= TINY | {"max_position_embeddings": 512} if options.tiny else {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        model, weights = Path(folder, "bert_config.json"), Path(folder, "weights.pt")
        model.write_text(json.dumps(shape), encoding="utf-8")
        settings = {"BERT_CONFIG": str(model), "SHARD_OPTIMIZER": str(int(not options.replicated))}
        settings["INIT_CHECKPOINT"] = str(weights)
        parameters = new_model(BertConfig.from_json(model)).named_parameters()
        torch.save({name: parameter.detach() for name, parameter in parameters}, weights)
        figures = by_part([start(settings, options.ranks) for _ in range(options.repeats)])
    emit("start", {"now": figures}, data=f"BERT-large's shape, {options.layers} layers, weights made up")


if __name__ == "__main__":
    main()
