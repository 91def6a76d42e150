"""What all ranks of a test agree on through a store, and process groups of some: a node, a pair of nodes, all."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence

import torch.distributed as distributed

from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.core.env import ConfigError
from certify.schema import Place


class Meeting:
    """Every rank makes one, and calls its methods in the same order with matching arguments."""

    def __init__(self, config: DistConfig, store: distributed.Store, node: str) -> None:
        """store: one for all ranks; node: the name of this rank's."""
        self.config, self.store = config, store
        self.rank, self.size = config.rank, config.world_size
        store.set_timeout(datetime.timedelta(seconds=config.timeout_seconds))
        self._number = 0
        told = [one.rsplit(" ", 1) for one in self.exchange(f"{node} {config.local_rank}")]
        self.places = [Place(rank, int(local), name) for rank, (name, local) in enumerate(told)]
        self.nodes = list(dict.fromkeys(place.node for place in self.places))
        self.node = self.nodes.index(node)

    def exchange(self, value: str) -> list[str]:
        """The values of all ranks, by rank."""
        self._number += 1
        self.store.set(f"{self._number}/{self.rank}", value)
        return self._meet([f"{self._number}/{rank}" for rank in range(self.size)])

    def barrier(self) -> None:
        """Waits for every rank, whatever process group it is in."""
        self._number += 1
        self._meet([])

    def _meet(self, keys: list[str]) -> list[str]:
        """Waits for every rank; the values of the keys, which the last to come reads for all: N reads, not N x N."""
        now, before = f"{self._number}", f"{self._number - 1}"
        if self.store.add(f"{now}/came", 1) == self.size:
            found = [one.decode() for one in self.store.multi_get(keys)] if keys else []
            self.store.set(f"{now}/all", json.dumps(found))
            for name in ("came", "all"):  # whoever is here has read what was said before
                self.store.delete_key(f"{before}/{name}")
        answers: list[str] = json.loads(self.store.get(f"{now}/all"))
        self.store.delete_key(f"{now}/{self.rank}")
        return answers

    def say(self, line: str) -> None:
        """Rank 0 prints it to stderr."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Every rank calls it last: the store is rank 0's, which waits for the others."""
        if self.rank:
            self.store.set(f"left/{self.rank}", "")
        elif self.size > 1:
            self.store.wait([f"left/{rank}" for rank in range(1, self.size)])

    def refuse(self, reason: str) -> None:
        """If rank 0 has a reason, all ranks raise it as a ConfigError, and none waits for another."""
        said: str = json.loads(self.exchange(json.dumps(reason))[0])
        if said:
            self.leave()
            raise ConfigError(said)

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(float(one) for one in self.exchange(repr(value)))

    def members(self, *nodes: int) -> list[int]:
        """The ranks of these nodes."""
        names = {self.nodes[node] for node in nodes}
        return [place.rank for place in self.places if place.node in names]

    def world(self, ranks: Sequence[int]) -> World:
        """A process group of these ranks, of which this one is one. Several groups may be made at the same time."""
        config = dataclasses.replace(self.config, rank=list(ranks).index(self.rank), world_size=len(ranks))
        return World(config, distributed.PrefixStore(f"{self._number}/world/{ranks[0]}", self.store))


def pairings(count: int, most: int) -> list[list[tuple[int, int]]]:
    """At most ``most`` rounds in which each of ``count`` nodes meets a new partner; with an odd count one rests.

    The circle method: the first stays, the others move on by one place; after count - 1 rounds all have met.
    """
    seats: list[int | None] = [*range(count)]
    if count % 2:
        seats.append(None)
    rounds = []
    for _ in range(min(len(seats) - 1, most)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
