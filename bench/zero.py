"""Our sharding against DeepSpeed's ZeRO on CPU ranks: time of a step and the most that tensors hold in one.

The same model, batches and AdamW in fp32, each rank a process of one thread, joined by gloo. An engine and its
counterpart take steps in turns in the same processes; the ratio of their times is the figure. Memory is counted in
bytes of tensors, not in pages of the process. Prints one JSON line.

usage: python bench/zero.py [--turns 6] [--steps 2] [--rows 4] [--ranks 2] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lib import Parser, emit, integer
from torch import Tensor
from torch.multiprocessing import spawn
from torch_lib import SMALL, TINY, new_model, packed_batches

from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.core.env import ConfigError
from bert.core.process import hard_exit
from bert.data.batch import PretrainingBatch
from bert.deepspeed.settings import Config as ZeroConfig
from bert.deepspeed.step import DeepSpeedStep, load
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.model.init import first_weights, use_placeholders
from bert.optim import Config as OptimizerConfig
from bert.pretraining.memory import Peak
from bert.training.step import build_step

# DeepSpeed's stage, and whether ours shards gradients, to shard as much; our engine has no stage 3.
PAIRS = {1: False, 2: True, 3: True}
BUCKET = 1 << 24  # numbers at most: our own engine's 64 MiB in fp32. DeepSpeed's default of 5e8 is more than the model
FP32 = Precision(dtype=torch.float32)
TrainingStep = Callable[[list[PretrainingBatch], float], Any]


def our_step(world: World, config: BertConfig, shard_gradients: bool) -> TrainingStep:
    """SHARD_OPTIMIZER=1, with SHARD_GRADIENTS=1 or without."""
    rules = OptimizerConfig(optimizer="adamw", sharded=True, shard_gradients=shard_gradients)
    return build_step(new_model(config), FP32, rules, world, accumulate=False, fused_update=False)


def deepspeed_step(world: World, config: BertConfig, stage: int, folder: Path) -> TrainingStep:
    """ENGINE=deepspeed."""
    path, model, rules = folder / f"ds_{world.rank}.json", new_model(config), OptimizerConfig(optimizer="adamw")
    bucket = min(BUCKET, sum(parameter.numel() for parameter in model.parameters()))
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, "reduce_bucket_size": bucket}}))
    settings = ZeroConfig(engine="deepspeed", path=path).complete(rules, FP32, 1, 1)
    weights = partial(first_weights, new_model(config), 0)
    use_placeholders(model, FP32.dtype, world.device)
    return DeepSpeedStep(model, FP32, rules, world, settings, weights(), weights)


def measured(make: Callable[[], TrainingStep], batch: PretrainingBatch) -> tuple[TrainingStep, int]:
    """The step, and the most bytes that its tensors hold while it is taken."""

    def tensors() -> list[Tensor]:
        gc.collect()
        return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type != "meta"]

    before = {one.untyped_storage()._cdata for one in tensors()}
    step = make()
    for _ in range(2):  # states come with the first
        step([batch], 1e-4)
    with Peak([one for one in tensors() if one.untyped_storage()._cdata not in before]) as peak:
        step([batch], 1e-4)
    return step, peak.most


def seconds(world: World, step: TrainingStep, batches: list[PretrainingBatch], count: int) -> float:
    """Of a step, until the last rank has taken it."""
    world.barrier()
    begin = time.perf_counter()
    for number in range(count):
        step([batches[number % len(batches)]], 1e-4)
    world.barrier()
    return (time.perf_counter() - begin) / count


def rank_main(rank: int, options: argparse.Namespace, port: int, folder: Path) -> None:
    """All pairs, one after the other; rank 0 writes the figures."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    config = BertConfig(**(TINY if options.tiny else SMALL))
    figures: dict[str, Any] = {"model": f"{config.num_hidden_layers} layers x {config.hidden_size}"}
    with World(DistConfig(rank=rank, world_size=options.ranks, device="cpu")) as world:
        batches = packed_batches(options.rows, 2, config, seed=rank)
        for stage, shard_gradients in PAIRS.items():
            ours, our_bytes = measured(partial(our_step, world, config, shard_gradients), batches[0])
            theirs, their_bytes = measured(partial(deepspeed_step, world, config, stage, folder), batches[0])
            times: list[tuple[float, float]] = []
            for turn in range(options.turns):
                order = [(0, ours), (1, theirs)][:: -1 if turn % 2 else 1]
                spans = {which: seconds(world, step, batches, options.steps) for which, step in order}
                times.append((spans[0], spans[1]))
            most = [float(value) for value in world.max(torch.tensor([our_bytes, their_bytes], dtype=torch.float64))]
            figures[f"stage_{stage}"] = {
                "seconds_ours": [round(mine, 3) for mine, _ in times],
                "seconds_deepspeed": [round(other, 3) for _, other in times],
                "time_ours_by_deepspeed": round(statistics.median(mine / other for mine, other in times), 3),
                "megabytes_ours": round(most[0] / 1e6, 1),
                "megabytes_deepspeed": round(most[1] / 1e6, 1),
                "memory_ours_by_deepspeed": round(most[0] / most[1], 3),
            }
            del ours, theirs
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    hard_exit(0)  # threads of DeepSpeed's process groups do not always end with Python


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--turns", type=integer, default=6, help="of each engine (default 6)")
    parser.add_argument("--steps", type=integer, default=2, help="of a turn (default 2)")
    parser.add_argument("--rows", type=integer, default=4, help="packed rows a rank and step (default 4)")
    parser.add_argument("--ranks", type=integer, default=2, help="processes (default 2)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    try:
        load("the engine to compare with")
    except ConfigError as error:
        parser.error(str(error))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(options, port, Path(folder)), nprocs=options.ranks)
        figures = json.loads((Path(folder) / "figures.json").read_text())
    figures |= {"deepspeed": version("deepspeed"), "ranks": options.ranks, "rows": options.rows}
    emit("zero", figures, data="Wikipedia mix (synthetic)")


if __name__ == "__main__":
    main()
