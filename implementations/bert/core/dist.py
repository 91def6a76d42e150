"""Processes and devices: one process a GPU (or a CPU rank), joined by torch.distributed."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from bert.core.env import ConfigError, announce, env

# PyTorch 2.13 gave them new names.
_REDUCE_SCATTER = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
_ALL_GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


POLL_SECONDS = 1e-4
PATIENCE = 10.0  # seconds that a rank whose collective failed waits for the others to say the same


class HangError(RuntimeError):
    """A collective timed out, or lost a peer. The message is for the user.

    absent: the ranks that did not arrive, as far as they are known.
    """

    exit_status = 1

    def __init__(self, message: str, absent: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent = absent


@dataclass(frozen=True, kw_only=True)
class Config:
    """This process's rank and device. torchrun or run_and_time.sh exports the rank variables."""

    rank: int = env("RANK", 0, at_least=0, doc="number of this process; set by the launcher")
    local_rank: int = env("LOCAL_RANK", 0, at_least=0, doc="number of this process on its node; set by the launcher")
    world_size: int = env("WORLD_SIZE", 1, at_least=1, doc="number of processes; set by the launcher")
    ranks_per_node: int = env(
        "LOCAL_WORLD_SIZE", 0, at_least=0, doc="number of processes of each node; set by the launcher; 0: all"
    )
    device: str = env("DEVICE", "auto", choices=("auto", "cpu", "cuda"), doc="auto takes a GPU where there is one")
    backend: str = env("BACKEND", "auto", choices=("auto", "nccl", "gloo"), doc="auto is nccl on GPUs, gloo on CPUs")
    timeout_seconds: int = env("DIST_TIMEOUT", 600, at_least=1, doc="seconds before a hung collective is an error")
    num_threads: int = env("OMP_NUM_THREADS", 0, at_least=0, doc="CPU threads per process; 0 leaves PyTorch's choice")

    def check(self) -> None:
        """Raises ConfigError for ranks or devices that cannot be."""
        if self.rank >= self.world_size:
            raise ConfigError(f"RANK={self.rank} with WORLD_SIZE={self.world_size}: a rank is below the world size")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("DEVICE=cuda, and PyTorch finds no GPU here: set DEVICE=cpu, or check nvidia-smi")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the ranks of a job find each other."""

    master_addr: str = env("MASTER_ADDR", doc="where rank 0 listens; set by the launcher")
    master_port: int = env("MASTER_PORT", at_least=1, at_most=65535, doc="its port; set by the launcher")
    agent_store: bool = env("TORCHELASTIC_USE_AGENT_STORE", False, doc="torchrun listens there itself; set by it")

    def store(self, name: str, rank: int, size: int, seconds: int) -> distributed.Store:
        """The store of all ranks, under a name. Raises RuntimeError where rank 0 is not reached in so many seconds."""
        here, timeout = rank == 0 and not self.agent_store, datetime.timedelta(seconds=seconds)
        store = distributed.TCPStore(
            self.master_addr, self.master_port, size, here, timeout=timeout, wait_for_workers=False
        )
        return distributed.PrefixStore(name, store)


def pick_device(config: Config) -> torch.device:
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", config.local_rank) if use_cuda else torch.device("cpu")


def why_no_gpu() -> str:
    """Why PyTorch sees no GPU here, in the driver's own words where it has some; empty where it sees one."""
    if torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():
        return "PyTorch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver or PyTorch raises
        return " ".join(str(error).split())
    return "torch.cuda.is_available() is False"


# Groups that were left are kept. The last to let go of one may else be an optimizer, with Python's lock in its hand,
# and gloo's destructor waits for its threads, of which one may wait for that lock to free a tensor.
_left: list[distributed.ProcessGroup] = []


class World:
    """The joined processes of one run and this process's device.

    Used as a context manager it leaves the process group on the way out. With one process no group is made and every
    collective is the identity.
    """

    def __init__(self, config: Config, store: distributed.Store | None = None) -> None:
        """store: where the processes find each other; None: MASTER_ADDR and MASTER_PORT."""
        self.rank, self.local_rank, self.size = config.rank, config.local_rank, config.world_size
        self.ranks_per_node = config.ranks_per_node or config.world_size
        self.device = pick_device(config)
        self.timeout_seconds, self.joined = config.timeout_seconds, config.world_size > 1
        use_cuda = self.device.type == "cuda"
        if use_cuda:
            if config.local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"LOCAL_RANK={config.local_rank}, and this node shows {torch.cuda.device_count()} GPUs: "
                    "lower DGXNGPU or check CUDA_VISIBLE_DEVICES"
                )
            torch.cuda.set_device(config.local_rank)
        elif config.num_threads:
            torch.set_num_threads(config.num_threads)
        if self.joined:
            backend = config.backend if config.backend != "auto" else ("nccl" if use_cuda else "gloo")
            timeout = datetime.timedelta(seconds=config.timeout_seconds)
            announce("TORCH_FR_BUFFER_SIZE", "2000")  # PyTorch's flight recorder notes the collectives
            distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
            self.store = distributed.distributed_c10d._get_default_store()
            self.store.set(f"node/{self.rank}", platform.node())
            self.first_node = "its node"
            with suppress(distributed.DistError):  # rank 0 may be done already
                self.first_node = self.store.get("node/0").decode()  # now: when ranks hang it may not answer

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Raises HangError, which names who did not come, for an error of a collective."""
        if self.joined and error is None:
            if distributed.group.WORLD is not None:
                _left.append(distributed.group.WORLD)
            distributed.destroy_process_group()
        elif self.joined and (isinstance(error, (HangError, distributed.DistError)) or "/gloo/" in str(error)):
            # The peers may be gone: a clean shutdown would wait for them. And where the store's node hangs, its answer
            # never comes: a thread asks.
            known = [([0], f"rank 0 on {self.first_node}, where the store of the ranks is,")]
            asking = threading.Thread(target=lambda: known.insert(0, self._absent()), daemon=True)
            asking.start()
            asking.join(2 * PATIENCE)
            (absent, names), reason = known[0], str(error).splitlines()[0].rpartition("] ")[2]
            raise HangError(
                f"{names} did not come to {_collective()}, DIST_TIMEOUT={self.timeout_seconds} s ({reason}): ended, "
                "stopped, hung or cut off from the network; raise DIST_TIMEOUT if it is only slow",
                absent,
            ) from error

    def _absent(self) -> tuple[list[int], str]:
        """Tells the others that this rank waits in vain, and waits for them to say so: who does not, and in words."""
        self.store.set(f"waits/{self.rank}", "")
        # Rank 0, which may hold the store, is the last to give up.
        deadline, everyone = time.monotonic() + PATIENCE / (2 if self.rank else 1), [*range(self.size)]
        while not self._wait(everyone) and time.monotonic() < deadline:
            time.sleep(0.2)
        absent = [rank for rank in everyone if not self._wait([rank])]
        named = [f"rank {rank} on {self.store.get(f'node/{rank}').decode()}" for rank in absent[:8]]
        named += [f"{len(absent) - 8} more"] if absent[8:] else []
        return absent, ", ".join(named) or "each rank waits: the others"

    def _wait(self, ranks: list[int]) -> bool:
        """Whether all of these have told that they wait in vain."""
        return bool(self.store.check([f"waits/{rank}" for rank in ranks]))

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only one that logs."""
        return self.rank == 0

    def warm_up(self) -> None:
        """Each kind of collective of a step, once and small: none of them connects ranks later. A collective."""
        numbers = torch.ones(self.size, device=self.device)
        self.sum(numbers.clone())
        self.max(numbers.clone())
        for work in (self.reduce_scatter(numbers[:1], numbers.clone()), self.all_gather(numbers.clone(), numbers[:1])):
            if work is not None:
                work.wait()
        self.broadcast_int(0)
        self.barrier()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Waits for the device to reach the event. Raises HangError after DIST_TIMEOUT.

        NCCL's watchdog does not watch collectives inside CUDA graphs, so a peer that is gone would never be noticed.
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
        """A process group of some ranks, this one among them. A collective of these; None where none was joined."""
        if not self.joined:
            return None
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        _left.append(group := distributed.new_group([*ranks], timeout=timeout, use_local_synchronization=True))
        return group

    def reduce_scatter(
        self, shard: Tensor, gathered: Tensor, group: distributed.ProcessGroup | None = None
    ) -> distributed.Work | None:
        """Starts to average ``gathered`` [ranks x n] over a group, None: all; each rank gets its n in ``shard``.

        The order of operations is NCCL's own for an average, on every backend: each process divides, then they add.
        ``gathered`` may be overwritten. Returns what to wait for, or None where there is nothing to do.
        """
        if not self.joined:
            return None
        return _REDUCE_SCATTER(shard, gathered, op=_average_of(gathered, group), group=group, async_op=True)

    def average(self, values: Tensor, group: distributed.ProcessGroup | None = None) -> distributed.Work | None:
        """Starts to average a tensor over a group, None: all, in place; what to wait for, or None."""
        if not self.joined:
            return None
        return distributed.all_reduce(values, op=_average_of(values, group), group=group, async_op=True)

    def all_gather(
        self, gathered: Tensor, shard: Tensor, group: distributed.ProcessGroup | None = None
    ) -> distributed.Work | None:
        """Starts to collect every ``shard`` of a group, None: all, in rank order; what to wait for, or None."""
        return _ALL_GATHER(gathered, shard, group=group, async_op=True) if self.joined else None

    def broadcast_int(self, value: int) -> int:
        """The value of rank 0 (any 63-bit integer) on every process."""
        if not self.joined:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        distributed.broadcast(tensor, 0)
        return int(tensor.item())

    def agree(self, facts: Mapping[str, Any], cure: str) -> None:
        """Raises ConfigError, on every rank, that names ranks and nodes with another fact than most, and which.

        A collective: of one digest, and of the facts only where it differs. cure: ends the message.
        """
        said = {name: repr(value) for name, value in facts.items()}
        digest = hashlib.blake2b(repr(sorted(said.items())).encode(), digest_size=7).digest()
        mine = torch.tensor([int.from_bytes(digest, "little")], dtype=torch.int64, device=self.device)
        everyones = mine.repeat(self.size)
        if work := self.all_gather(everyones, mine):
            work.wait()
        if bool((everyones == mine).all()):
            return
        told: list[Any] = [None] * self.size
        distributed.all_gather_object(told, (platform.node(), said))
        odd = []
        for name in dict.fromkeys(name for _, facts_of in told for name in facts_of):
            values = [facts_of.get(name, "nothing") for _, facts_of in told]
            (usual, _), *others = Counter(values).most_common()
            for rank, value in enumerate(values if others else ()):
                if value != usual:
                    rest = f"{value:.80}, and rank {values.index(usual)} {usual:.80}"
                    odd.append(f"rank {rank} on {told[rank][0]} has {name}={rest}")
        more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise ConfigError(f"ranks differ: {'; '.join(odd[:3])}{more}: {cure}")

    def any(self, flag: bool) -> bool:
        """True on every process when it is true on one."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item() > 0)


def _average_of(values: Tensor, group: distributed.ProcessGroup | None) -> distributed.ReduceOp.RedOpType:
    """The operation that makes the values' average over a group; only NCCL has one, else they are divided first."""
    if distributed.get_backend(group) == "nccl":
        return distributed.ReduceOp.AVG
    values.div_(distributed.get_world_size(group))
    return distributed.ReduceOp.SUM


def collectives() -> bytes:
    """What PyTorch's flight recorder knows of this process's last collectives, as JSON; empty where it has none."""
    recorded = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return bytes(recorded()) if recorded is not None else b""


def _collective() -> str:
    """The first collective that the recorder does not know to be complete; of gloo's it only knows the last begun."""
    entries = json.loads(collectives() or "{}").get("entries", [])
    running = [entry for entry in entries if entry["state"] != "completed"]
    if not running:
        return "a collective"
    gloo = running[-1]["profiling_name"].startswith("gloo:")
    entry = running[-1 if gloo else 0]
    return f"{entry['profiling_name']}, collective {entry['collective_seq_id']}{' at the latest' if gloo else ''}"
