"""Training steps on this machine's CPU, in turns with an alternative. Prints one JSON line.

transformers  ours on packed rows with Wikipedia's length distribution (synthetic) against BertForPreTraining with AdamW
              on the same sequences padded, in one batch and in micro-batches of 4 that fit the cache: wall time,
              4 layers x 256
recompute     forward and backward pass by RECOMPUTE_LAYERS: CPU time, 4 layers as wide as BERT-1.5B on rows of 128
last-layer    forward and backward pass of 4 layers x 256, the last one only for the tokens that the heads read, against
              all tokens: CPU time
network       SHARD_GROUP=all against node, on two nodes of 1 and of 2 ranks: network namespaces with a rate limit
              between them; wall time of a step, and how much of the reduction, timed separately, the backward pass
              hides; fp32, 4 layers x 256, a vocabulary of 4,000, buckets of 4 MiB; needs root

The ratios are the figures; the rates depend on the machine.

usage: python bench/cpu_step.py transformers|recompute|last-layer|network [--repeats 6] [--rows 4] [--threads 1]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from lib import (
    Parser,
    cpu_seconds,
    emit,
    in_turns,
    integer,
    medians,
    positive,
    ratios,
    wall_seconds,
)
from torch.multiprocessing import spawn
from torch_lib import SMALL, TINY, new_model, new_step, packed_batches, whole_last_layer
from train_step import build_peer

from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.config import BertConfig
from bert.model.recompute import Recomputation
from bert.optim.sharded import Sharded
from bert.training.step import Step

# BERT-1.5B's width, and its LayerNorm before each block (configs/models/bert_1.5b.json).
WIDE = SMALL | {
    "hidden_size": 1600, "num_attention_heads": 25, "intermediate_size": 6400, "max_position_embeddings": 128,
    "layer_norm_large_model": True,
}  # fmt: skip
# A small model must have several buckets, or the backward pass could hide nothing.
SMALL_BUCKET = 4 << 20
# Of <sched.h>; Python's os has it from 3.12 on.
CLONE_NEWNET = 0x40000000


def transformers(options: argparse.Namespace, config: BertConfig) -> dict[str, Any]:
    config = dataclasses.replace(
        config, hidden_act="gelu_erf"
    )  # their tanh GELU is many operations
    (batch,) = packed_batches(options.rows, 1, config)
    ours = new_step(new_model(config), PrecisionConfig(precision="fp32"))
    # Sequences in a micro-batch; both ways, so that the faster one is the opponent.
    peers = {"hugging_face_padded": 4, "hugging_face_padded_one_batch": batch.num_sequences}
    steps: dict[str, Callable[[], object]] = {"ours_packed": lambda: ours([batch], 1e-4)}
    for name, size in peers.items():
        steps[name] = partial(
            build_peer(config, [batch], packed=False, compiled=False, micro_batch=size), 0
        )
    in_turns(steps, 1)  # allocator and thread pools warm
    times = in_turns(steps, options.repeats, wall_seconds)
    fastest, middle = {name: min(spans) for name, spans in times.items()}, medians(times)
    return {
        "sequences": batch.num_sequences,
        "mean_length": round(batch.num_tokens / batch.num_sequences, 1),
        "sequences_per_second": {
            name: round(batch.num_sequences / span, 2) for name, span in fastest.items()
        },
        # The fastest step shows what the machine can do; slower ones had to share it.
        "ratio": round(min(fastest[name] for name in peers) / fastest["ours_packed"], 2),
        "ratio_of_medians": round(min(middle[name] for name in peers) / middle["ours_packed"], 2),
        "seconds": {name: [round(span, 3) for span in spans] for name, spans in times.items()},
    }


def recompute(options: argparse.Namespace, config: BertConfig) -> dict[str, Any]:
    model, (batch,) = new_model(config), packed_batches(options.rows, 1, config)

    def both_passes(layers: int) -> None:
        model.bert.encoder.recomputation = (
            # The random state is restored, so that dropout repeats its masks.
            Recomputation(layers, random_state=True) if layers else None
        )
        model.zero_grad()
        sum(model(batch)).backward()

    # 0: none, the base of the ratios.
    runs = {f"recompute_{layers}": partial(both_passes, layers) for layers in (0, 1, 2, 4)}
    in_turns(runs, 1)
    times = in_turns(runs, options.repeats, cpu_seconds)
    return {
        name: {
            "seconds": round(statistics.median(spans), 2),
            "time_ratio": ratios(spans, times["recompute_0"]),
        }
        for name, spans in times.items()
    }


def last_layer(options: argparse.Namespace, config: BertConfig) -> dict[str, Any]:
    model, (batch,) = new_model(config), packed_batches(options.rows, 1, config)
    of_rows = model.bert.forward

    def both_passes(forward: Callable[..., Any]) -> None:
        model.bert.forward = forward  # type: ignore[method-assign]
        model.zero_grad()
        sum(model(batch)).backward()

    runs = {
        "whole": partial(both_passes, whole_last_layer(of_rows)),
        "of_rows": partial(both_passes, of_rows),
    }
    in_turns(runs, 1)
    times = in_turns(runs, options.repeats, cpu_seconds)
    return {"seconds": medians(times), "time_ratio": ratios(times["of_rows"], times["whole"])}


class Node(NamedTuple):
    """A network namespace, the name of its network interface and that interface's address."""

    name: str
    card: str
    address: str


@contextlib.contextmanager
def slow_nodes(megabits: float) -> Iterator[list[Node]]:
    """Two nodes with a link of ``megabits`` per second each way."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    nodes = [
        Node(f"bert-{os.getpid()}-{number}", f"bert{number}", f"10.99.0.{number + 1}")
        for number in range(2)
    ]
    try:
        # In a namespace each, since packets to an address of one's own never pass the limit.
        for node in nodes:
            ip("netns", "add", node.name)
        one, other = nodes
        ends = [
            "name",
            one.card,
            "netns",
            one.name,
            "type",
            "veth",
            "peer",
            "name",
            other.card,
            "netns",
            other.name,
        ]
        ip("link", "add", *ends)
        # Packets may queue for 2 s, so that TCP sees a slow link and not a lossy one.
        limit = ["root", "tbf", "rate", f"{megabits:g}mbit", "burst", "256kb", "latency", "2s"]
        for node in nodes:
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.card)
            for card in ("lo", node.card):
                ip("-n", node.name, "link", "set", card, "up")
            ip("netns", "exec", node.name, "tc", "qdisc", "add", "dev", node.card, *limit)
        yield nodes
    finally:
        for node in nodes:
            # Its interface goes with it; an error here would hide the one that led here.
            subprocess.run(["ip", "netns", "delete", node.name], check=False, capture_output=True)


def network_rank(
    rank: int,
    options: argparse.Namespace,
    config: BertConfig,
    nodes: list[Node],
    ranks_per_node: int,
    folder: Path,
) -> None:
    """Measures both groupings in turns; rank 0 writes the slowest rank's figures."""
    node = nodes[rank // ranks_per_node]
    with open(f"/run/netns/{node.name}", encoding="utf-8") as namespace:
        # Of this thread and those it starts, so before gloo and PyTorch start any.
        if ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(f"cannot enter {node.name}")
    os.environ.update(
        MASTER_ADDR=nodes[0].address, MASTER_PORT="29500", GLOO_SOCKET_IFNAME=node.card
    )
    # The ranks share this machine's CPUs.
    torch.set_num_threads(1)
    layout = DistConfig(
        rank=rank, local_rank=rank % ranks_per_node, world_size=len(nodes) * ranks_per_node,
        ranks_per_node=ranks_per_node, device="cpu",
    )  # fmt: skip
    groups = {"all": layout.world_size, "node": ranks_per_node}
    with (
        World(layout) as world,
        mock.patch.dict(Sharded.__init__.__kwdefaults__ or {}, bucket_bytes=SMALL_BUCKET),
    ):
        (batch,) = packed_batches(options.rows, 1, config, seed=rank)
        spent: dict[str, list[list[float]]] = {name: [] for name in groups}

        def timed(run: Callable[[], object]) -> float:
            # All begin together: a rank that waits for another would time that.
            world.barrier()
            return wall_seconds(run)

        def turn(name: str, step: Step) -> None:
            """Seconds of the step, from the last rank's end of the backward pass to the end of the reduction, and of
            the reductions alone; all ranks share a clock.
            """
            assert isinstance(step.optimizer, Sharded)
            buckets = step.optimizer.buckets
            finish, moments = buckets.finish, []

            def watched() -> None:
                moments.append(time.perf_counter())
                finish()
                moments.append(time.perf_counter())

            with mock.patch.object(buckets, "finish", watched):
                whole = timed(lambda: step([batch], 1e-4))
            # The reduction alone, of the same gradients, is what the backward pass could hide.
            buckets.num_sent = 0  # send all again
            # A step ends when its slowest rank does.
            most = world.max(
                torch.tensor([whole, *moments, timed(buckets.finish)], dtype=torch.float64)
            ).tolist()
            spent[name].append([most[0], most[2] - most[1], most[3]])

        turns: dict[str, Callable[[], object]] = {}
        for name, group in groups.items():
            precision, rules = (
                PrecisionConfig(precision="fp32"),
                {"sharded": True, "shard_group": str(group)},
            )
            turns[name] = partial(
                turn, name, new_step(new_model(config), precision, world, **rules)
            )
        in_turns(turns, 1)
        for times in spent.values():
            # The first turn warmed up.
            times.clear()
        in_turns(turns, options.repeats)
        if world.is_main:
            (folder / "figures.json").write_text(json.dumps(spent))


def network(options: argparse.Namespace, config: BertConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"megabits": options.megabits}
    for ranks_per_node in (1, 2):
        with slow_nodes(options.megabits) as nodes, tempfile.TemporaryDirectory() as folder:
            spawn(
                network_rank,
                (options, config, nodes, ranks_per_node, Path(folder)),
                len(nodes) * ranks_per_node,
            )
            spent = json.loads((Path(folder) / "figures.json").read_text())
        steps = {name: [times[0] for times in turns] for name, turns in spent.items()}
        alone = {
            name: statistics.median(times[2] for times in turns) for name, turns in spent.items()
        }
        found[f"{2 * ranks_per_node}_ranks"] = {
            "seconds": {name: [round(span, 3) for span in spans] for name, spans in steps.items()},
            "reduction_seconds": {name: round(seconds, 3) for name, seconds in alone.items()},
            "hidden": {
                # The part of the reduction that did not remain after the backward pass.
                name: round(statistics.median(1 - after / alone for _, after, alone in turns), 3)
                for name, turns in spent.items()
            },
            "time_node_by_all": ratios(steps["node"], steps["all"]),
        }
    return found


def main() -> None:
    parser = Parser(__doc__)
    measures = {
        "transformers": transformers,
        "recompute": recompute,
        "last-layer": last_layer,
        "network": network,
    }
    parser.add_argument("what", choices=list(measures))
    parser.add_argument("--repeats", type=integer, default=6, help="turns (default 6)")
    parser.add_argument("--rows", type=integer, default=4, help="packed rows (default 4)")
    parser.add_argument("--threads", type=integer, default=1, help="of PyTorch (default 1)")
    parser.add_argument(
        "--megabits", type=positive, default=100.0, help="per second between nodes (default 100)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try out the script")
    options = parser.parse_args()
    if options.what == "network" and (os.geteuid() or not shutil.which("ip")):
        parser.error("network needs root and iproute2")
    torch.set_num_threads(options.threads)
    shape = (
        TINY | {"num_hidden_layers": 4}
        if options.tiny
        else WIDE
        if options.what == "recompute"
        else SMALL
    )
    if options.what == "network" and not options.tiny:
        shape = SMALL | {"vocab_size": 4000}
    figures = measures[options.what](options, BertConfig(**shape))
    settings = {
        "rows": options.rows,
        "threads": options.threads,
        "model": f"4 layers x {shape['hidden_size']}",
    }
    emit(options.what, settings | figures, data="Wikipedia mix (synthetic)")


if __name__ == "__main__":
    main()
