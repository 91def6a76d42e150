"""``python -m bert allreduce``: the test of the network before the trials."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as distributed

from bert.core import dist, rundir
from bert.core.dist import HangError, World
from common.env import ConfigError, env, from_env
from common.files import write_text
from common.process import hard_exit

# Sums are at most 30 x ranks, and fp32 is exact up to 2**24: any difference is a fault.
PERIOD = 31  # of the vectors' elements; prime, so that misplaced chunks are detected
# Each rank's vector is shifted by so much: among 31 ranks no two are alike.
STRIDE = 7
MIB = 1 << 20
# The largest on GPUs: BERT-large's gradients in 16 bits.
GPU_SIZES, CPU_SIZES = (MIB, 21 * MIB, 672_464_516), (MIB, 8 * MIB)
PROGRAM = "bert allreduce"
TIMED = 5
LIMIT_SECONDS = 300  # of the whole test; DIST_TIMEOUT if that is less


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(dist.Address):
    min_bandwidth: float = env(
        "NCCL_TEST_MIN_GBPS",
        at_least=0,
        doc="GB/s the largest all-reduce must reach; set by the launcher",
    )
    dist: dist.DistConfig = dist.DistConfig()
    run: rundir.RunConfig = rundir.RunConfig()

    @property
    def seconds(self) -> int:
        """Seconds the test may take."""
        return min(LIMIT_SECONDS, self.dist.timeout_seconds)


class AllReduceError(RuntimeError):
    """The test has failed. The message is for the user."""

    exit_status = 1


def pattern(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """Vector of ``rank``: small integers, whose float32 sums are exact. [count]"""
    return (
        torch.arange(count, device=device)
        .add_(STRIDE * rank)
        .remainder_(PERIOD)
        .float()
    )


def expected(world_size: int, device: torch.device) -> torch.Tensor:
    """One period of the sum of the vectors of all ranks. [PERIOD]"""
    ranks = torch.arange(world_size, device=device).unsqueeze(1)  # [world_size, 1]
    return (
        (torch.arange(PERIOD, device=device) + STRIDE * ranks)
        .remainder(PERIOD)
        .sum(0)
        .float()
    )


def wrong_elements(total: torch.Tensor, world_size: int) -> torch.Tensor:
    """Indices of the wrong elements of an all-reduced vector [n * PERIOD]."""
    return (
        (total.view(-1, PERIOD) != expected(world_size, total.device))
        .flatten()
        .nonzero()
        .flatten()
    )


def bus_bandwidth(num_bytes: int, seconds: float, world_size: int) -> float:
    """GB/s per link in an ideal ring: 2 (n - 1) / n of the bytes, as defined by nccl-tests."""
    # Reduce-scatter and all-gather each send (n - 1) / n of the bytes over every link.
    return 2 * (world_size - 1) / world_size * num_bytes / seconds / 1e9


def roll_call(
    store: distributed.Store, rank: int, world_size: int, seconds: float
) -> None:
    """Waits until every rank has arrived. Raises HangError naming those that have not."""
    store.set(f"here/{rank}", platform.node())
    missing, deadline = set(range(world_size)), time.monotonic() + seconds
    while missing := {other for other in missing if not store.check([f"here/{other}"])}:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)[:20])) + (
                ", ..." if len(missing) > 20 else ""
            )
            raise HangError(
                f"{len(missing)} of {world_size} ranks did not arrive in {seconds:.0f} s: rank {names}; "
                "see their output, or raise DIST_TIMEOUT",
                sorted(missing),
            )
        time.sleep(0.05)


def measure(num_bytes: int, world: World) -> float:
    """Seconds of an all-reduce of ``num_bytes``, after a verified one. Raises AllReduceError for a
    wrong sum.
    """
    # fp32 has 4 bytes; whole periods, so that the sums can be compared by them.
    total = world.sum(
        pattern(num_bytes // 4 // PERIOD * PERIOD, world.rank, world.device)
    )
    wrong = wrong_elements(total, world.size)
    if len(wrong):
        first, right = int(wrong[0]), expected(world.size, world.device)
        example = (
            f"element {first} is {total[first]:g} instead of {right[first % PERIOD]:g}"
        )
        raise AllReduceError(
            f"rank {world.rank} on {platform.node()}: {len(wrong)} of {len(total)} sums of an all-reduce are wrong, "
            f"{example}"
        )
    # Zeros for the timing: sums of sums would grow until they overflow.
    total.zero_()
    world.barrier()
    # The barriers before and after wait for the device and for all ranks.
    start = time.perf_counter()
    for _ in range(TIMED):
        world.sum(total)
    world.barrier()
    return (time.perf_counter() - start) / TIMED


def connect(config: AllReduceConfig) -> World:
    """Roll call, then the process group on the same store."""
    rank, size, seconds = config.dist.rank, config.dist.world_size, config.seconds
    try:
        store = config.store("allreduce", rank, size, seconds)
    except (RuntimeError, ValueError) as error:
        raise AllReduceError(
            f"rank {rank} on {platform.node()} "
            f"does not reach rank 0 at {config.master_addr}:{config.master_port}: {str(error).splitlines()[0]}"
        ) from None
    # Before the process group, whose own timeout names no rank.
    roll_call(store, rank, size, seconds)
    return World(dataclasses.replace(config.dist, timeout_seconds=seconds), store)


def run(config: AllReduceConfig) -> None:
    """The test on this rank. Rank 0 leaves RUN_DIR/bandwidth.txt. Raises AllReduceError and
    HangError.
    """
    with connect(config) as world:
        bandwidth, lines = 0.0, list[str]()
        # The largest last: its bandwidth is that of a step's gradients, and is judged below.
        for num_bytes in GPU_SIZES if world.device.type == "cuda" else CPU_SIZES:
            seconds = measure(num_bytes, world)
            bandwidth = bus_bandwidth(num_bytes, seconds, world.size)
            if world.is_main:
                backend = distributed.get_backend() if world.joined else "alone"
                rate = f"{num_bytes / MIB:4.0f} MiB in {seconds * 1e3:9.3f} ms, bus bandwidth {bandwidth:8.2f} GB/s"
                lines.append(
                    f"all-reduce of {world.size} ranks ({backend}): {rate}, all sums right\n"
                )
                print(lines[-1], end="", flush=True)
        if bandwidth < config.min_bandwidth:
            raise AllReduceError(
                f"the bus bandwidth of all-reduce is {bandwidth:.2f} GB/s, "
                f"below NCCL_TEST_MIN_GBPS={config.min_bandwidth:g}"
            )
        if world.is_main and config.run.run_dir is not None:
            config.run.run_dir.mkdir(parents=True, exist_ok=True)
            write_text(config.run.run_dir / "bandwidth.txt", "".join(lines))


def main(environ: Mapping[str, str]) -> int:
    """Runs the test in a thread, as a hung collective cannot be interrupted; returns the exit
    status.
    """
    run_config = rundir.RunConfig()
    try:
        run_config = from_env(rundir.RunConfig, environ)
        config = from_env(AllReduceConfig, environ)
        config.dist.check()
    except ConfigError as error:
        return rundir.fail(run_config, PROGRAM, str(error), 2)
    failure: list[Exception] = []

    def body() -> None:
        try:
            run(config)
        except Exception as error:
            failure.append(error)

    # A daemon, so that a rank that hangs does not outlive the report.
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    # Later than the timeout of the collectives and its ranks' names, which say more.
    thread.join(config.seconds + 2 * dist.PATIENCE + 5)
    if thread.is_alive():
        hangs = f"hangs in an all-reduce after {config.seconds} s; NCCL_DEBUG=INFO shows its interfaces"
        failure = [
            AllReduceError(f"rank {config.dist.rank} on {platform.node()} {hangs}")
        ]
    return rundir.failed(run_config, PROGRAM, failure[0]) if failure else 0


def allreduce(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """Checks that all ranks reach each other and add up correctly, and measures bandwidth. Run
    before the trials.

    The ranks first answer a roll call, which names missing ones. Then they all-reduce vectors with
    known sums, with the devices and the backend of training, and rank 0 prints the bandwidth. Exit
    status: 0, 1 if the test fails, 4 if ranks are missing, 2 for bad input; the reason is one line on stderr and in
    RUN_DIR.
    """
    parser.parse_args(arguments)
    return main(environ)


if __name__ == "__main__":  # as the launch scripts start it, by RANK_MODULE
    # Without exit handlers, which would wait for ranks that hang.
    hard_exit(main(os.environ))
