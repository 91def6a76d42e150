"""Silent data corruption: ranks and rounds did the same steps, so their weights must be the same, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from certify.records import Records
from certify.schema import ALONE, STAGES

Key = tuple[str, int, int]  # stage, rank, round


@dataclass(frozen=True)
class Corruption:
    """A rank whose weights are others than those of most from a step on."""

    name: str
    stage: str
    round: int
    step: int

    def text(self) -> str:
        """In one line."""
        return (
            f"{self.name}: its weights differ from the same steps' elsewhere, first in step {self.step + 1} of round "
            f"{self.round + 1} ({STAGES[self.stage]})"
        )


def corrupt(records: Records) -> tuple[list[Corruption], bool]:
    """Who computed something else, once a rank, and whether anything could be compared.

    Of those that should agree more than half must, or the load does not repeat here and proves nothing.
    """
    found: dict[int, Corruption] = {}
    comparable = False
    sequences = {stage: _sequences(records, stage) for stage in records.stages}
    alone = {(stage, *key): checks for stage in ALONE for key, checks in sequences.get(stage, {}).items()}
    groups: list[dict[Key, tuple[int, ...]]] = [alone]
    for stage in (one for one in sequences if one not in ALONE):
        of_rank: dict[int, dict[Key, tuple[int, ...]]] = {}
        for key, checks in sequences[stage].items():
            of_rank.setdefault(key[0], {})[(stage, *key)] = checks
        groups += of_rank.values()
        # Where every rank has all weights, they must be the same on all of them, too.
        if stage == "together":
            groups.append({(stage, *key): checks for key, checks in sequences[stage].items()})
    for group in map(_as_long, groups):
        common = _common(group)
        comparable = comparable or common is not None
        for (stage, rank, number), checks in group.items():
            if common is not None and checks != common and rank not in found:
                step = next(i for i, (own, other) in enumerate(zip(checks, common, strict=True)) if own != other)
                found[rank] = Corruption(records.places[rank].name, stage, number, step)
    return [found[rank] for rank in sorted(found)], comparable


def _as_long(group: Mapping[Key, tuple[int, ...]]) -> dict[Key, tuple[int, ...]]:
    """The steps that all have taken: pairs of nodes take as many as their time allows."""
    shortest = min((len(checks) for checks in group.values()), default=0)
    return {key: checks[:shortest] for key, checks in group.items()}


def _common(group: Mapping[Key, tuple[int, ...]]) -> tuple[int, ...] | None:
    """What more than half have computed; None where nothing is, or there is one alone."""
    if len(group) < 2:
        return None
    checks, count = Counter(group.values()).most_common(1)[0]
    return checks if 2 * count > len(group) else None


def _sequences(records: Records, stage: str) -> dict[tuple[int, int], tuple[int, ...]]:
    """The checksums of a stage by (rank, round)."""
    steps = records.of(stage)
    order = np.lexsort((steps["step"], steps["round"], steps["rank"]))
    found: dict[tuple[int, int], list[int]] = {}
    for rank, number, checksum in zip(
        *(steps[name][order].tolist() for name in ("rank", "round", "checksum")), strict=True
    ):
        found.setdefault((rank, number), []).append(checksum)
    return {key: tuple(checks) for key, checks in found.items()}
