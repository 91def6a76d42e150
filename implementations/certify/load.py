"""The load of one rank: the benchmark's training step alone, with its node, in pairs of nodes, and
with all ranks.

Every rank takes the same steps, on the same batches with the same random numbers, and every round
starts from the same weights: any difference between ranks or rounds, in time or in results, comes
from the machine.
"""

import contextlib
import dataclasses
import mmap
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert.commands import allreduce
from bert.core import rundir
from bert.core.dist import World
from bert.data.loader import TrainingData, open_source
from bert.data.sampler import Sampler
from bert.kernels import fp8
from bert.pretraining import build
from bert.pretraining.config import PretrainingConfig
from bert.training.graph import capture_or_warm_up
from bert.training.step import Step, TrainingStep
from certify import hardware
from certify.recorder import Recorder
from certify.store_group import StoreGroup, pairings
from common.env import ConfigError, env, settings
from review.acceptance.schema import NOBODY, PARTS, STAGES, STEP

SEED = 0  # the same for all ranks and rounds: the same work, bit for bit
LEARNING_RATE = 1e-4
WARM_UP_STEPS = 3
MIN_STEPS = 4  # per round
ROUNDS, MAX_ROUNDS = 16, 64  # of a stage; each is compared
ROUND_SECONDS = 1.25  # more time means more rounds, and beyond MAX_ROUNDS longer ones
# Of a stage of `certify.sh --quick` and of START_TEST.
QUICK_SECONDS, QUICK_ROUNDS = 2.0, 6
# Each pairing costs a process group, a model and its warm-up.
MAX_PAIRINGS = 7
MIN_BYTES = 1 << 20  # size of an all-reduce
# Back to back: the fastest shows the network, the others what disturbs it.
REDUCTIONS = 3
SIZE, CPU_SIZE = 8192, 256  # rows and columns of a square matrix
COPY_BYTES, CPU_COPY_BYTES = 1 << 30, 1 << 24
READ_BYTES, READS = 1 << 22, 4  # of the data set in a round, and written
HOST_BYTES = 1 << 26  # more than most caches hold
REPEATS = 10
# By bytes of an element.
INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Length of the test, and a drill that it must detect."""

    seconds: float = env(
        "CERTIFY_SECONDS", above=0, doc="seconds per stage; set by the launcher"
    )
    duration: str = env(
        "DURATION",
        "",
        doc="burn-in after the stages, such as 24h, 30m or 90s; unset: none",
    )
    disk: bool = env("CERTIFY_DISK", True, doc="reads the configured data set")
    flip: str = env(
        "CERTIFY_FLIP",
        "",
        doc="drill: flips a bit of a weight at RANK:STEP (ranks from 0, steps from 1)",
    )

    def __post_init__(self) -> None:
        if self.flip and not re.fullmatch(r"\d+:0*[1-9]\d*", self.flip):
            raise ConfigError(
                f"CERTIFY_FLIP={self.flip!r}: expected RANK:STEP, such as 5:3, steps counted from 1"
            )
        if self.duration and not re.fullmatch(r"\d+(\.\d+)?[smhd]", self.duration):
            raise ConfigError(
                f"DURATION={self.duration!r}: expected a number and s, m, h or d, such as 24h"
            )

    @property
    def rounds(self) -> int:
        if self.seconds <= QUICK_SECONDS:
            return QUICK_ROUNDS
        return min(max(ROUNDS, round(self.seconds / ROUND_SECONDS)), MAX_ROUNDS)

    @property
    def burn_in_seconds(self) -> float:
        """DURATION in seconds; 0 without one."""
        units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
        return (
            float(self.duration[:-1]) * units[self.duration[-1]]
            if self.duration
            else 0.0
        )

    @property
    def flipped(self) -> tuple[int, ...]:
        """(rank, step) of the drill, both counted from 0; empty without a drill."""
        rank, _, step = self.flip.partition(":")
        return (int(rank), int(step) - 1) if self.flip else ()


@dataclass
class Trainee:
    """A model in training on one rank or a process group. take_step: ``step``, or its CUDA
    graph.
    """

    model: torch.nn.Module
    step: Step
    recorder: Recorder
    take_step: TrainingStep


class Load:
    """Every rank creates one and calls ``run`` with the same settings; ``rows`` and ``probes`` are
    this rank's.
    """

    def __init__(
        self, config: LoadConfig, trainer: PretrainingConfig, peers: StoreGroup
    ) -> None:
        self.config, self.peers = config, peers
        # Alone, each rank does what rank 0 would, so that all do the same.
        self.alone = World(dataclasses.replace(trainer.dist, rank=0, world_size=1))
        with peers.world(range(peers.size)) as everyone:
            facts = (
                rundir.shared_facts(trainer)
                | settings(config)
                | {"BERT_CONFIG": trainer.model}
            )
            everyone.agree(facts, "give all ranks the same settings and code")
            self.source = open_source(trainer.data, trainer.model.vocab_size)
            everyone.agree(
                self.source.identity(), "are the training data the same on every node?"
            )
            # One backend for all: a rank with another one
            # rounds differently and would look corrupt.
            self.trainer = build.resolve_kernels(trainer, everyone)
            if everyone.is_main:
                chosen = build.chosen_kernels(self.trainer)
                rundir.add_to_environment(trainer.run, chosen)
            peers.barrier()  # a rank that leaves the group while another still joins would break it
        self.device = self.alone.device
        # By step; the same for all ranks, stages and rounds.
        self.sequences: dict[int, int] = {}
        self.rows: list[np.ndarray] = []
        self.probes: list[tuple[Any, ...]] = []  # rows of PROBE
        # Its name, blocks that this rank sees, and blocks that the test needs; empty without one.
        self.data_set: dict[str, Any] = {}
        # GB/s that each port of the node has sent while all ranks reduced.
        self.ports: dict[str, float] = {}

    def run(self) -> None:
        """Runs all stages, each for about CERTIFY_SECONDS."""
        peers, rounds = self.peers, self.config.rounds
        trainee = self.trainee(self.alone)
        count = self.count_steps(trainee, rounds)
        self.check_drill(count)
        peers.print_rank0(f"certify: single, parallel: {count} steps in each round")
        for number in range(rounds):
            # By local rank, so that one rank of each node is at
            # work, and all nodes take as many turns.
            for turn in range(1 + max(info.local_rank for info in peers.ranks)):
                peers.barrier()
                if turn == peers.ranks[peers.rank].local_rank:
                    self._round(trainee, "single", number, count)
            peers.barrier()
            # The drill spares the other rounds: most must agree for the odd one to be named.
            self._round(trainee, "parallel", number, count, drill=number == rounds - 1)
        probes = build_probes(self.device)
        for number in range(rounds):
            for name, amount, work in probes:  # on all ranks at once
                peers.barrier()
                self._probe(name, number, measure(work, self.device), amount)
        self._write_data()
        self._read_data()
        if len(peers.nodes) > 1:
            self._group("node", peers.members(peers.node), range(rounds))
            pairing = pairings(len(peers.nodes), MAX_PAIRINGS)
            for number, pairs in enumerate(pairing):  # all pairs at once
                partner = (dict(pairs) | {b: a for a, b in pairs}).get(
                    peers.node, NOBODY
                )
                # The ranks of a node that rests are a group each: creating a trainee needs one.
                members = (
                    [peers.rank]
                    if partner == NOBODY
                    else peers.members(peers.node, partner)
                )
                self._group("pairs", members, [number], len(pairing), partner)
        self._group("together", range(peers.size), range(rounds))

    def _write_data(self) -> None:
        """Writes to the file system of the results, all ranks at once, past the page cache's end."""
        folder = self.trainer.run.run_dir
        if folder is None or not self.config.disk:
            return
        block = os.urandom(
            READS * READ_BYTES
        )  # nothing that a file system can compress
        path = folder / f".written_{self.peers.rank}"
        for number in range(min(self.config.rounds, ROUNDS)):
            self.peers.barrier()
            begin = time.perf_counter()
            with open(path, "wb", buffering=0) as file:
                file.write(block)
                os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
            self._probe("disk_write", number, seconds, len(block))
        path.unlink(missing_ok=True)

    def _read_data(self) -> None:
        """Reads the configured data set: all ranks at once, then one node at a time. A collective.

        No cache answers: all ranks draw from one shuffled list of blocks, in an order that no test
        had before, and no block is read twice. A data set with too few blocks is not measured.
        """
        if not self.config.disk:
            return
        # A longer test needs no larger data set.
        peers, rounds = self.peers, min(self.config.rounds, ROUNDS)
        nodes = range(len(peers.nodes))
        turns = [("disk", nodes)]
        # With one node, its own turn would be that of all again.
        if len(nodes) > 1:
            turns += [("disk_node", range(node, node + 1)) for node in nodes]
        order: int = peers.exchange(int.from_bytes(os.urandom(8), "big"))[0]
        blocks = []
        # Two turns of READS blocks in each round: of all nodes, and of the own one.
        needed = READS * rounds * 2 * peers.size
        with contextlib.suppress(ConfigError):  # no folder is configured
            folder, variable = self.trainer.data.source
            blocks = blocks_of(folder, order)
            self.data_set = {
                "name": f"{variable}={folder}",
                "blocks": len(blocks),
                "needed": needed,
            }
        # All ranks or none: the barriers below count every rank.
        if peers.max(float(len(blocks) < needed)):
            return
        blocks = blocks[peers.rank :: peers.size]
        for number in range(rounds):
            for name, at_work in turns:
                peers.barrier()
                if peers.node in at_work:
                    begin = time.perf_counter()
                    for _ in range(READS):
                        read_block(*blocks.pop())
                    seconds = (time.perf_counter() - begin) / READS
                    self._probe(name, number, seconds, READ_BYTES)

    def check_drill(self, count: int) -> None:
        """Raises ConfigError on all ranks for a drill in a step that no round has. count: steps per
        round.
        """
        reason = ""
        if self.config.flipped and self.config.flipped[1] >= count:
            reason = (
                f"CERTIFY_FLIP={self.config.flip}: a round has only {count} steps: "
                f"give an earlier step, or raise CERTIFY_SECONDS above {self.config.seconds:g}"
            )
        self.peers.refuse(reason)

    def _group(
        self,
        stage: str,
        ranks: Sequence[int],
        numbers: Sequence[int],
        rounds: int = 0,
        partner: int = NOBODY,
    ) -> None:
        """Runs rounds of a process group of these ranks. A rank that rests joins the barriers
        only.
        """
        # A group's keys in the store bear the number of the
        # last barrier, so its ranks must share it.
        self.peers.barrier()
        with self.peers.world(ranks) as world:
            trainee = self.trainee(world)
            count = self.count_steps(trainee, rounds or len(numbers))
            self.peers.print_rank0(f"certify: {stage}: {count} steps in each round")
            for number in numbers:
                self.peers.barrier()
                if stage != "pairs" or partner != NOBODY:
                    self._round(trainee, stage, number, count, partner)
                    # All-reduces as large as the gradients in 16 bits; their sums are checked.
                    size = max(
                        MIN_BYTES,
                        2
                        * sum(
                            parameter.numel()
                            for parameter in trainee.model.parameters()
                        ),
                    )
                    before, begin = hardware.bytes_sent(), time.perf_counter()
                    for _ in range(REDUCTIONS if world.size > 1 else 0):
                        self._probe(
                            f"reduce_{stage}",
                            number,
                            allreduce.measure(size, world),
                            size,
                            partner,
                        )
                    elapsed = time.perf_counter() - begin
                    for port, sent in hardware.bytes_sent().items():
                        rate = (sent - before.get(port, sent)) / elapsed / 1e9
                        self.ports[port] = max(rate, self.ports.get(port, 0.0))
            self.peers.barrier()

    def trainee(self, world: World) -> Trainee:
        """A model trained by the ranks of ``world``; alone as in a benchmark run, with a CUDA graph
        if it uses one.
        """
        torch.manual_seed(SEED)
        graph = world is self.alone and self.trainer.uses_graph
        model, step = build.build(self.trainer, world, SEED)
        assert isinstance(step, Step)
        example = partial(build.dummy_batches, self.trainer, world)
        take_step = capture_or_warm_up(step, example, graph=graph, warm_up=False)
        recorder = Recorder(self.device)
        # A graph replays kernels alone: hooks and marks would run once, at its capture. The capture
        # may have failed.
        if take_step is step:
            step.mark = recorder.mark
            recorder.watch(model)
        return Trainee(model, step, recorder, take_step)

    def count_steps(self, trainee: Trainee, rounds: int) -> int:
        """Steps per round: as many as the slowest rank takes in its time. A collective."""
        with trainee.step.rollback():
            # This step shows which parameter's gradient comes last, and compiles.
            self.take_steps(trainee, 1)
            trainee.recorder.watch_last()
            self.take_steps(trainee, WARM_UP_STEPS)
            parts = trainee.recorder.take()
        # All take equally many steps, or the ranks of a group would wait for one another in vain.
        slowest = self.peers.max(statistics.median(parts.sum(axis=1).tolist()))
        return max(MIN_STEPS, int(self.config.seconds / rounds / slowest))

    def _round(
        self,
        trainee: Trainee,
        stage: str,
        number: int,
        count: int,
        partner: int = NOBODY,
        drill: bool = False,
    ) -> None:
        """Takes ``count`` steps from the initial weights and records their rows. drill: may flip a
        bit.
        """
        with trainee.step.rollback():
            checksums = self.take_steps(trainee, count, drill)
            parts = trainee.recorder.take()
        rows = np.zeros(count, STEP)
        rows["rank"], rows["stage"] = self.peers.rank, list(STAGES).index(stage)
        rows["round"], rows["partner"], rows["step"] = number, partner, np.arange(count)
        for column, part in enumerate(PARTS):
            rows[part] = parts[:, column]
        rows["cpu"], rows["checksum"] = (
            trainee.recorder.cpu,
            checksums.numpy(force=True),
        )
        rows["sequences"] = [self.sequences[step] for step in range(count)]
        self.rows.append(rows)

    def take_steps(
        self, trainee: Trainee, count: int, drill: bool = False
    ) -> torch.Tensor:
        """Takes steps; returns the checksum of the weights after each, int64 [count], on the
        device.
        """
        data = self.trainer.data
        # As the only rank of one, from the first row, so that
        # all ranks and rounds take the same batches.
        sampler = Sampler(self.source.row_counts(), data.rows_per_step, SEED, 0, 1)
        finish = build.pad_and_pin(self.trainer, self.alone)
        batches = TrainingData(
            self.source, sampler, data, self.trainer.model.vocab_size, 1, finish
        )
        checksums = torch.zeros(count, dtype=torch.int64, device=self.device)
        weights = list(trainee.model.parameters())
        try:
            for number in range(count):
                # Dropout's masks depend on the step alone, so that
                # rounds can be compared bit for bit.
                torch.manual_seed(SEED + number)
                trainee.recorder.begin()
                batch = batches.next_step()
                trainee.recorder.mark("data")
                trainee.take_step(batch, LEARNING_RATE)
                # Before the checksum, which is no part of the step.
                trainee.recorder.end(whole=trainee.take_step is not trainee.step)
                self.sequences[number] = sum(
                    micro_batch.num_sequences for micro_batch in batch
                )
                if drill and self.config.flipped == (self.peers.rank, number):
                    flip(weights[0])
                # Stays on the device: reading it here would stop the host in every step.
                checksums[number] = checksum(weights)
        finally:
            batches.close()
        return checksums

    def _probe(
        self,
        name: str,
        number: int,
        seconds: float,
        amount: float,
        partner: int = NOBODY,
    ) -> None:
        self.probes.append(
            (self.peers.rank, name.encode(), number, partner, seconds, amount)
        )


def measure(work: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of several runs, after one to warm up."""
    for repeats in (1, REPEATS):
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        # Kernels are only queued by now; the clock must not stop before they end.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / REPEATS


def build_probes(device: torch.device) -> list[tuple[str, float, Callable[[], object]]]:
    """(name in the record, operations or bytes, work) on random numbers: zeros draw less power and
    run faster.
    """
    cuda = device.type == "cuda"
    size, num_bytes = (SIZE, COPY_BYTES) if cuda else (CPU_SIZE, CPU_COPY_BYTES)
    # fp16, tf32 and fp8 are of GPUs, and the last two of Ampere and of Ada (8.9) on.
    capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    products: dict[str, Callable[[], object]] = {}
    if capability >= (8, 0):
        products["matmul_tf32"] = partial(tf32_product, a, b)
    if cuda:
        half = a.half(), b.half()
        products["matmul_fp16"] = lambda: half[0] @ half[1]
        a, b = a.bfloat16(), b.bfloat16()
    products["matmul"] = lambda: a @ b
    if capability >= (8, 9):
        unscaled = torch.ones((), device=device)
        left, right = a.to(fp8.FORWARD), b.to(fp8.FORWARD).t()
        products["matmul_fp8"] = partial(
            fp8.product, left, right, unscaled, unscaled, None, torch.bfloat16, True
        )
    probes = [(name, 2.0 * size**3, product) for name, product in products.items()]
    ours, theirs = (torch.empty(HOST_BYTES, dtype=torch.uint8) for _ in range(2))
    # Read and written, as below.
    probes.append(("host_memory", 2 * HOST_BYTES, lambda: theirs.copy_(ours)))
    source, target = (
        torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
    )
    probes.append(("copy", 2 * num_bytes, lambda: target.copy_(source)))
    if cuda:
        # Page-locked, since a copy from pageable memory would measure the host's own copying.
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        probes.append(
            ("host_copy", num_bytes, lambda: target.copy_(host, non_blocking=True))
        )
    return probes


def tf32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two fp32 matrices; the load keeps its own setting."""
    settings = torch.backends.cuda.matmul
    before, settings.allow_tf32 = settings.allow_tf32, True
    try:
        return a @ b
    finally:
        settings.allow_tf32 = before


def blocks_of(folder: Path, order: int) -> list[tuple[Path, int]]:
    """(file, offset) of all whole blocks of READ_BYTES below a folder, shuffled by ``order``."""
    blocks = [
        (path, offset)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for offset in range(0, path.stat().st_size - READ_BYTES + 1, READ_BYTES)
    ]
    random.Random(order).shuffle(blocks)
    return blocks


def read_block(path: Path, offset: int) -> None:
    """Reads a block past the page cache: by O_DIRECT, or where a file system has none after
    dropping its pages.
    """
    with mmap.mmap(-1, READ_BYTES) as buffer:  # page-aligned, as O_DIRECT needs it
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, offset, READ_BYTES, os.POSIX_FADV_DONTNEED)
        try:
            if os.preadv(file, [buffer], offset) != READ_BYTES:
                raise OSError(f"{path}: cut off at {offset:,} bytes while it was read")
        finally:
            os.close(file)


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all tensors' bits as integers (int64, 0-d, on their device); any flipped bit changes
    it.

    Integer sums do not depend on their order, so they agree between devices. Does not synchronize.
    """
    sums = [
        tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
        for tensor in tensors
    ]
    return torch.stack(sums).sum()


@torch.no_grad()
def flip(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the first element."""
    tensor.detach().view(INTEGERS[tensor.element_size()]).view(-1)[0] ^= 1
