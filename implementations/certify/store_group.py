"""Exchange between all ranks of a test through a store, and process groups: a node, a pair of
nodes, all ranks.
"""

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as distributed

from bert.core.dist import DistConfig, World
from common.env import ConfigError
from review.acceptance.schema import RankInfo


class StoreGroup:
    """A rank's view of all ranks. Every rank creates one and calls its methods in the same
    order.
    """

    def __init__(self, config: DistConfig, store: distributed.Store, node: str) -> None:
        """store: shared by all ranks; node: name of this rank's node."""
        self.config, self.store = config, store
        self.rank, self.size = config.rank, config.world_size
        # A rank that died must end the wait of the others.
        store.set_timeout(datetime.timedelta(seconds=config.timeout_seconds))
        self._number = 0
        self.ranks = [
            RankInfo(rank, local, name)
            for rank, (name, local) in enumerate(
                self.exchange([node, config.local_rank])
            )
        ]
        self.nodes = list(dict.fromkeys(info.node for info in self.ranks))
        self.node = self.nodes.index(node)
        self.node_ranks = self.members(self.node)
        self.leads_node = self.rank == self.node_ranks[0]

    def exchange(self, value: Any) -> list[Any]:
        """Values of all ranks, by rank; what JSON can hold."""
        self._number += 1
        self.store.set(f"{self._number}/{self.rank}", json.dumps(value))
        return self._gather([f"{self._number}/{rank}" for rank in range(self.size)])

    def barrier(self) -> None:
        """Waits for every rank, in whatever process group."""
        self._number += 1
        self._gather([])

    def _gather(self, keys: list[str]) -> list[Any]:
        """Waits for every rank; returns the values of the keys, read only by the last to arrive: N
        reads, not N x N.
        """
        now, before = f"{self._number}", f"{self._number - 1}"
        # An atomic counter: exactly one rank is the last.
        if self.store.add(f"{now}/came", 1) == self.size:
            gathered = [*map(json.loads, self.store.multi_get(keys))] if keys else []
            self.store.set(f"{now}/all", json.dumps(gathered))
            for name in ("came", "all"):  # every rank has read the previous answers
                self.store.delete_key(f"{before}/{name}")
        answers: list[Any] = json.loads(self.store.get(f"{now}/all"))
        # A burn-in exchanges for hours; what was read must not stay in rank 0's memory.
        self.store.delete_key(f"{now}/{self.rank}")
        return answers

    def print_rank0(self, line: str) -> None:
        """Prints to stderr on rank 0."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """To be called last: rank 0 hosts the store, so it waits for the others."""
        if self.rank:
            self.store.set(f"left/{self.rank}", "")
        elif self.size > 1:
            self.store.wait([f"left/{rank}" for rank in range(1, self.size)])

    def refuse(self, reason: str) -> None:
        """Raises rank 0's reason, if any, as a ConfigError on all ranks, so that none waits for
        another.
        """
        if message := self.exchange(reason)[0]:
            # Rank 0 must not take the store away while others still read the reason.
            self.leave()
            raise ConfigError(message)

    def max(self, value: float) -> float:
        """Maximum over all ranks."""
        return max(self.exchange(value))

    def members(self, *nodes: int) -> list[int]:
        """Ranks of these nodes."""
        return [
            info.rank for info in self.ranks if self.nodes.index(info.node) in nodes
        ]

    def world(self, ranks: Sequence[int]) -> World:
        """Process group of these ranks, this one included. Several groups may be created at the
        same time.
        """
        config = dataclasses.replace(
            self.config, rank=list(ranks).index(self.rank), world_size=len(ranks)
        )
        # Groups of the same moment differ in their first rank,
        # and those of later ones in the number.
        return World(
            config,
            distributed.PrefixStore(f"{self._number}/world/{ranks[0]}", self.store),
        )


def pairings(count: int, most: int) -> list[list[tuple[int, int]]]:
    """At most ``most`` rounds that pair each of ``count`` nodes with a new partner; one rests if
    the count is odd.

    Circle method: the first node stays, the others rotate; after count - 1 rounds every pair has
    met.
    """
    # Of an odd count, who meets the seat beyond the last rests.
    seats = [*range(count + count % 2)]
    half, rounds = len(seats) // 2, []
    for _ in range(min(len(seats) - 1, most)):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
