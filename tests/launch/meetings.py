"""Where faults and features of a run meet: all possible pairs, by seed, and what must become of them."""

import itertools
import random
from typing import NamedTuple

# Container runtimes of run.sub; the others are platforms.
SLURM = ("none", "pyxis", "apptainer")


class Row(NamedTuple):
    """A run, and what happens to it when."""

    runtime: str
    phase: str
    event: str
    trials: str
    resume: str
    spares: str
    seed: str
    checkpoints: str

    @property
    def refused(self) -> bool:
        """The folder of checkpoints is not this run's."""
        new = self.checkpoints == "own" and self.resume == "0"
        return self.checkpoints == "foreign" or new

    @property
    def trains(self) -> bool:
        """It happens while ranks step together."""
        return self.phase in ("first step", "training", "evaluation", "checkpoint")

    @property
    def finishes(self) -> bool | None:
        """Must the run end in success? None: its result may be complete already."""
        if self.refused:
            return False
        if self.phase in ("end", "cleanup"):
            return None
        if self.event in ("cancel", "full disk"):
            return False
        if self.event in ("kill", "time limit"):
            again = self.event == "kill" or self.runtime in SLURM
            return self.resume == "1" and again
        if self.event == "stop":
            return self.runtime in SLURM and (self.resume == "1" or self.spares != "0")
        return self.runtime in SLURM  # without a scheduler nobody has another machine

    @property
    def is_possible(self) -> bool:
        """Can it happen on this platform, and does the run come so far?"""
        if self.phase == "container" and self.runtime not in ("pyxis", "apptainer"):
            return False
        if self.refused and (self.trains or self.phase in ("start test", "end")):
            return False
        of_a_rank = self.trains or self.phase == "start test"
        if self.event in ("stop", "kill") and not of_a_rank:
            return False
        if self.event == "full disk" and not self.trains and self.phase != "end":
            return False
        if self.event == "stop" and self.phase == "start test":
            return False  # which has no time limit
        if self.event in ("power off spare", "bad spare"):
            return self.runtime in SLURM and self.spares != "0"
        if self.runtime in SLURM:
            return True
        if self.event in ("power off node", "cut network"):
            return self.runtime == "ssh" and self.trains and self.spares == "0"
        here = ("stop", "kill", "cancel", "full disk")
        return self.event in here and self.spares == "0"


AXES = Row(
    runtime="none,pyxis,apptainer,ssh,local",
    phase="checks,container,staging,start test,first step,training,evaluation,checkpoint,end,cleanup",
    event="power off node,power off batch host,power off spare,stop,kill,cut network,cancel,"
    "time limit,full disk,controller down,bad spare,node returns",
    trials="1,3",
    resume="0,1",
    spares="0,1,2",
    seed="set,unset",
    checkpoints="new,own,foreign",
)


def possible_rows() -> list[Row]:
    every = itertools.product(*(values.split(",") for values in AXES))
    return [row for row in itertools.starmap(Row, every) if row.is_possible]


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(row: Row) -> list[Pair]:
    """All pairs of two axes' values in a row."""
    return list(itertools.combinations(zip(Row._fields, row, strict=True), 2))


def covering(seed: int, tries: int = 40) -> list[Row]:
    """Rows with every possible pair: for one that is missing, the best of some random rows with it."""
    chosen, drawn = list[Row](), random.Random(seed)
    rows_of = dict[Pair, list[Row]]()
    for row in possible_rows():
        for pair in pairs(row):
            rows_of.setdefault(pair, []).append(row)
    missing = dict.fromkeys(sorted(rows_of))  # a set in a fixed order
    while missing:
        pair = drawn.choice(list(missing))
        candidates = [drawn.choice(rows_of[pair]) for _ in range(tries)]
        best = max(candidates, key=lambda row: sum(p in missing for p in pairs(row)))
        chosen.append(best)
        for pair in pairs(best):
            missing.pop(pair, None)
    return chosen
