"""Processes and devices: one process per GPU (or CPU rank), joined by torch.distributed."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.testing._internal.distributed import fake_pg

from common.env import ConfigError, announce, beginning_with, env
from common.lists import first_few
from common.missing import CAUSES, SHOWN, TIMEOUT_SECONDS, missed, named
from common.process import one_line

# Renamed in PyTorch 2.13.
_REDUCE_SCATTER = (
    getattr(distributed, "reduce_scatter_single", None)
    or distributed.reduce_scatter_tensor
)
_ALL_GATHER = (
    getattr(distributed, "all_gather_single", None)
    or distributed.all_gather_into_tensor
)


# Between two looks at an event of the GPU: far below the tens of ms of a step, and without a core
# that spins.
POLL_SECONDS = 1e-4
PATIENCE = 10.0  # seconds a rank whose collective failed waits for the others to report the same


class HangError(RuntimeError):
    """A collective timed out, or lost a peer. The message is for the user.

    absent: the ranks known to be missing.
    """

    exit_status = 4  # tells the launcher that the cause lies with the missing ranks

    def __init__(self, message: str, absent: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent = absent


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """This process's rank and device. torchrun or run_and_time.sh exports the rank variables."""

    rank: int = env(
        "RANK", 0, "number of this process; set by the launcher", at_least=0
    )
    local_rank: int = env(
        "LOCAL_RANK",
        0,
        "number of this process on its node; set by the launcher",
        at_least=0,
    )
    world_size: int = env(
        "WORLD_SIZE", 1, "number of processes; set by the launcher", at_least=1
    )
    ranks_per_node: int = env(
        "LOCAL_WORLD_SIZE",
        0,
        "number of processes of each node; set by the launcher; 0: all",
        at_least=0,
    )
    device: str = env(
        "DEVICE",
        "auto",
        "auto: a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
        synonyms=(("gpu", "cuda"),),
    )
    timeout_seconds: int = env(
        "DIST_TIMEOUT",
        TIMEOUT_SECONDS,
        "seconds before a hung collective is an error",
        at_least=1,
    )
    num_threads: int = env(
        "OMP_NUM_THREADS",
        0,
        "CPU threads per process; 0: PyTorch's default",
        at_least=0,
    )

    emulate: int = env(
        "EMULATE_RANKS",
        0,
        "trains rank 0 of so many, alone: its shard, memory and step without the network; no result",
        at_least=0,
    )

    def __post_init__(self) -> None:
        """With EMULATE_RANKS the world has so many ranks. Raises ConfigError if others are there
        too.
        """
        if self.emulate and self.world_size not in (1, self.emulate):
            raise ConfigError(
                f"EMULATE_RANKS={self.emulate} with WORLD_SIZE={self.world_size}: start one process"
            )
        # The dataclass is frozen; here its value is still being made.
        object.__setattr__(self, "world_size", self.emulate or self.world_size)

    def check(self) -> None:
        """Raises ConfigError for an impossible rank or an unavailable device."""
        if self.rank >= self.world_size:
            raise ConfigError(
                f"RANK={self.rank} with WORLD_SIZE={self.world_size}: a rank is below the world size"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "DEVICE=cuda, but PyTorch finds no GPU: set DEVICE=cpu, or check nvidia-smi"
            )


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the ranks of a job find each other."""

    master_addr: str = env("MASTER_ADDR", doc="host of rank 0; set by the launcher")
    master_port: int = env(
        "MASTER_PORT",
        at_least=1,
        at_most=65535,
        doc="port of rank 0; set by the launcher",
    )
    agent_store: bool = env(
        "TORCHELASTIC_USE_AGENT_STORE", False, "torchrun hosts the store; set by it"
    )

    def store(self, name: str, rank: int, size: int, seconds: int) -> distributed.Store:
        """The ranks' shared store, under a prefix. Raises RuntimeError if rank 0 is not reached
        within ``seconds``.
        """
        # torchrun's agent listens at this port already: rank 0 is then a client like the others.
        here = rank == 0 and not self.agent_store
        # Does not wait for the others: who waits by name (roll_call) can say which rank is missing.
        store = distributed.TCPStore(
            self.master_addr,
            self.master_port,
            size,
            here,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        return distributed.PrefixStore(name, store)


def spare_expandable_segments() -> None:
    """Keeps NCCL from registering the buffers of captured collectives as one allocation each, which
    such segments are not: illegal accesses, or a hang (pytorch 158029).
    """
    settings = beginning_with("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if "expandable_segments:True" in "".join(" ".join(settings.values()).split()):
        announce("NCCL_GRAPH_REGISTER", "0")


def pick_device(config: DistConfig) -> torch.device:
    use_cuda = config.device == "cuda" or (
        config.device == "auto" and torch.cuda.is_available()
    )
    return torch.device("cuda", config.local_rank) if use_cuda else torch.device("cpu")


def why_no_gpu() -> str:
    """Why PyTorch sees no GPU, in the driver's words if there are any; empty if it sees one."""
    if torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():
        return "PyTorch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver or PyTorch raises
        return one_line(error)
    return "torch.cuda.is_available() is False"


# Keeps destroyed groups alive. Otherwise the last reference may be dropped by an optimizer while it
# holds the GIL, and gloo's destructor waits for its threads, one of which may need the GIL to free
# a tensor.
_left: list[distributed.ProcessGroup] = []


class World:
    """The joined processes of one run and this process's device.

    As a context manager it destroys the process group on exit. With one process no group is made
    and every collective is the identity.
    """

    def __init__(
        self, config: DistConfig, store: distributed.Store | None = None
    ) -> None:
        """store: for the rendezvous; None: at MASTER_ADDR and MASTER_PORT."""
        self.rank = config.rank
        self.local_rank = config.local_rank
        self.size = config.world_size
        self.ranks_per_node = config.ranks_per_node or config.world_size
        self.device = pick_device(config)
        self.timeout_seconds = config.timeout_seconds
        self.joined = config.world_size > 1
        use_cuda = self.device.type == "cuda"
        if use_cuda:
            if config.local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"LOCAL_RANK={config.local_rank}, but this node shows {torch.cuda.device_count()} GPUs: "
                    "lower DGXNGPU or check CUDA_VISIBLE_DEVICES"
                )
            # Before the first collective: NCCL takes the current device, else GPU 0 for all ranks
            # of a node.
            torch.cuda.set_device(config.local_rank)
        elif config.num_threads:
            torch.set_num_threads(config.num_threads)
        if config.emulate:
            # Its collectives return at once, with this rank's own numbers.
            distributed.init_process_group(
                "fake", store=fake_pg.FakeStore(), rank=self.rank, world_size=self.size
            )
        elif self.joined:
            backend = "nccl" if use_cuda else "gloo"
            timeout = datetime.timedelta(seconds=config.timeout_seconds)
            # Turns on PyTorch's flight recorder of collectives.
            announce("TORCH_FR_BUFFER_SIZE", "2000")
            spare_expandable_segments()
            distributed.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )
            self.store = distributed.distributed_c10d._get_default_store()
            # Noted while all live: a rank that hangs cannot be asked for its node any more.
            self.store.set(f"node/{self.rank}", platform.node())
            self.first_node = "its node"
            with suppress(distributed.DistError):  # rank 0 may be done already
                # Read now: it may not answer once ranks hang.
                self.first_node = self.store.get("node/0").decode()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Raises HangError, naming the missing ranks, if a collective failed."""
        if self.joined and error is None:
            if distributed.group.WORLD is not None:
                _left.append(distributed.group.WORLD)
            distributed.destroy_process_group()
        elif self.joined and (
            # gloo raises plain RuntimeErrors; only the source file in their text tells them apart.
            isinstance(error, (HangError, distributed.DistError))
            or "/gloo/" in str(error)
        ):
            # No clean shutdown, which would wait for peers that may be gone. The store is asked in
            # a thread: it never answers if its node hangs. What is known if the store stays silent:
            # its host is the one that is gone.
            known = [
                ([0], f"rank 0 on {self.first_node}, where the store of the ranks is,")
            ]
            asking = threading.Thread(
                target=lambda: known.insert(0, self._absent()), daemon=True
            )
            asking.start()
            asking.join(2 * PATIENCE)
            absent, names = known[0]
            reason = str(error).partition("\n")[0].rpartition("] ")[2]
            collective = _collective(self.device.type == "cuda")
            missing = missed(names, collective, self.timeout_seconds)
            raise HangError(f"{missing} ({reason}): {CAUSES}", absent) from error

    def _absent(self) -> tuple[list[int], str]:
        """Reports this rank's failed collective, waits for the others' reports: the ranks without
        one, and a text.
        """

        def have_reported(ranks: list[int]) -> bool:
            return bool(self.store.check([f"waits/{rank}" for rank in ranks]))

        # Each rank whose collective failed says so: those that say nothing are the ones waited for.
        self.store.set(f"waits/{self.rank}", "")
        # Rank 0, which may host the store, gives up last.
        deadline = time.monotonic() + PATIENCE / (2 if self.rank else 1)
        everyone = [*range(self.size)]
        while not have_reported(everyone) and time.monotonic() < deadline:
            time.sleep(0.2)
        absent = [rank for rank in everyone if not have_reported([rank])]
        node_of = {
            rank: self.store.get(f"node/{rank}").decode() for rank in absent[:SHOWN]
        }
        return absent, named(absent, node_of) or "each rank waits: the others"

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only one that logs."""
        return self.rank == 0

    def warm_up(self) -> None:
        """Runs each kind of collective once, small, so that all connections exist before the first
        step.
        """
        numbers = torch.ones(self.size, device=self.device)
        self.sum(numbers.clone())
        self.max(numbers.clone())
        for work in (
            self.reduce_scatter(numbers[:1], numbers.clone()),
            self.all_gather(numbers.clone(), numbers[:1]),
        ):
            if work is not None:
                work.wait()
        self.broadcast_int(0)
        self.barrier()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Waits for the device to reach the event. Raises HangError after DIST_TIMEOUT.

        NCCL's watchdog does not watch collectives inside CUDA graphs, so a lost peer would never be
        noticed.
        """
        deadline = time.monotonic() + self.timeout_seconds
        while not event.query():
            if time.monotonic() > deadline:
                raise HangError(
                    f"rank {self.rank}: the GPU did not finish a step within DIST_TIMEOUT={self.timeout_seconds} s; "
                    "another rank is gone or hangs"
                )
            time.sleep(POLL_SECONDS)

    def barrier(self) -> None:
        """Waits for every process, and on a GPU for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.joined:
            distributed.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Sums a tensor over all processes, in place."""
        if self.joined:
            distributed.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The largest of all processes' values, element by element, in place."""
        if self.joined:
            distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
        return values

    def subgroup(self, ranks: Sequence[int]) -> distributed.ProcessGroup | None:
        """A process group of ``ranks``, this one among them, which all call it; None if no
        processes are joined.
        """
        if not self.joined:
            return None
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        # Otherwise new_group is a collective of all ranks, not of the group's alone.
        group = distributed.new_group(
            [*ranks], timeout=timeout, use_local_synchronization=True
        )
        # As this process is one of ranks.
        member = cast(distributed.ProcessGroup, group)
        _left.append(member)
        return member

    def reduce_scatter(
        self,
        shard: Tensor,
        gathered: Tensor,
        group: distributed.ProcessGroup | None = None,
    ) -> distributed.Work | None:
        """Starts averaging ``gathered`` [ranks x n] over a group, None: all; each rank gets its n
        in ``shard``.

        Operations are in NCCL's order for an average on every backend: each process divides, then
        they add. ``gathered`` may be overwritten. Returns a handle to wait on, or None if there is
        nothing to do.
        """
        if not self.joined:
            return None
        return _REDUCE_SCATTER(
            shard, gathered, op=_average_of(gathered, group), group=group, async_op=True
        )

    def average(
        self, values: Tensor, group: distributed.ProcessGroup | None = None
    ) -> distributed.Work | None:
        """Starts averaging a tensor over a group, None: all, in place; returns a handle to wait on,
        or None.
        """
        if not self.joined:
            return None
        return distributed.all_reduce(
            values, op=_average_of(values, group), group=group, async_op=True
        )

    def all_gather(
        self,
        gathered: Tensor,
        shard: Tensor,
        group: distributed.ProcessGroup | None = None,
    ) -> distributed.Work | None:
        """Starts gathering the shards of a group, None: all, in rank order; returns a handle to
        wait on, or None.
        """
        return (
            _ALL_GATHER(gathered, shard, group=group, async_op=True)
            if self.joined
            else None
        )

    def broadcast_int(self, value: int) -> int:
        """The value of rank 0 (any 63-bit integer) on every process."""
        if not self.joined:
            return value
        # An integer, as fp32 holds seeds and steps exactly only up to 2**24.
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        distributed.broadcast(tensor, 0)
        # The host waits for the device here, as in gather and any below.
        return int(tensor)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, equally many, by rank; on every process."""
        # fp64 holds counts of samples exactly up to 2**53.
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyones = mine.repeat(self.size)
        if work := self.all_gather(everyones, mine):
            work.wait()
        by_rank: list[list[float]] = everyones.view(self.size, -1).tolist()
        return by_rank

    def agree(self, facts: Mapping[str, Any], cure: str) -> None:
        """Raises ConfigError, on every rank, if facts differ between ranks; it names the ranks that
        deviate from most.

        A collective: of one digest, and of the facts themselves only if it differs. cure: ends the
        message.
        """
        shown = {name: repr(value) for name, value in facts.items()}
        if len(self.peers(sorted(shown.items()))) == self.size:
            return
        gathered = self.objects((platform.node(), shown))
        deviating = []
        for name in dict.fromkeys(
            name for _, facts_of in gathered for name in facts_of
        ):
            values = [facts_of.get(name, "nothing") for _, facts_of in gathered]
            (usual, _), *others = Counter(values).most_common()
            for rank, value in enumerate(values if others else ()):
                if value != usual:
                    odd, common = _where_they_differ(value, usual)
                    deviating.append(
                        f"rank {rank} on {gathered[rank][0]} has {name}={odd}, and rank {values.index(usual)} {common}"
                    )
        raise ConfigError(f"ranks differ: {first_few(deviating)}: {cure}")

    def peers(self, value: object) -> list[int]:
        """The ranks whose value is this rank's, by its representation; this rank is one. A
        collective.
        """
        # 6 bytes, which fp64 holds exactly.
        digest = hashlib.blake2b(repr(value).encode(), digest_size=6).digest()
        mine = [float(int.from_bytes(digest, "little"))]
        everyones = enumerate(self.gather(mine))
        return [rank for rank, theirs in everyones if theirs == mine]

    def first_text(self, text: str) -> str:
        """The text of the first rank that has one, on every rank; empty if none has. A
        collective.
        """
        return next(filter(None, self.objects(text)), "")

    def objects(self, mine: Any) -> list[Any]:
        """Every rank's object, by rank; on every process. A collective."""
        gathered = [mine] * self.size
        if self.joined:
            distributed.all_gather_object(gathered, mine)
        return gathered

    def any(self, flag: bool) -> bool:
        """True on every process if it is true on any."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)) > 0)


def _average_of(
    values: Tensor, group: distributed.ProcessGroup | None
) -> distributed.ReduceOp.RedOpType:
    """Reduction for an average over a group; backends other than NCCL have none, so the values are
    divided first.
    """
    if distributed.get_backend(group) == "nccl":
        return distributed.ReduceOp.AVG
    values.div_(distributed.get_world_size(group))
    return distributed.ReduceOp.SUM


def _where_they_differ(*texts: str) -> list[str]:
    """Up to 80 characters of each, from shortly before the first that differs."""
    pairs = zip(*texts, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    begin = common - 30 if max(map(len, texts)) > 80 and common > 30 else 0
    return [f"{'...' if begin else ''}{text[begin : begin + 80]}" for text in texts]


def _collective(on_gpu: bool) -> str:
    """Name of the first collective not recorded as complete; for gloo only the last one started is
    recorded.
    """
    # NCCL has a flight recorder of its own. One that has recorded nothing leaves out "entries".
    name = f"_dump_{'nccl' if on_gpu else 'fr'}_trace_json"
    recorded = getattr(torch._C._distributed_c10d, name, None)
    entries = json.loads(recorded()).get("entries", []) if recorded is not None else []
    running = [entry for entry in entries if entry["state"] != "completed"]
    if not running:
        return "a collective"
    gloo = running[-1]["profiling_name"].startswith("gloo:")
    entry = running[-1 if gloo else 0]
    return f"{entry['profiling_name']}, collective {entry['collective_seq_id']}{' at the latest' if gloo else ''}"
