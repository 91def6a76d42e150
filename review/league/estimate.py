"""Time to train BERT-large at a measured rate, and its place among the published results.

The samples to the target are the reference's at that batch size, so a recipe that converges more
slowly takes longer. Those of published results seldom take fewer: their scores are scaled up.
"""

import math
from dataclasses import dataclass
from typing import Any

from review.league.entries import Entry, published
from review.league.ranking import League
from review.logs.output import ReviewError, counted
from review.rulebook import rcp
from review.rulebook.compliance import evaluation_interval

# Nine of ten published results took at most this times what their own rate and batch size tell:
# recipes that converge more slowly than the reference.
LONGER = 1.28
EVALUATED = (
    10_000  # sequences of an evaluation; each costs about as much as one trained on
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Minutes to train, and what nine of ten recipes take at most.

    ``ranks``: of both, among the ``results`` published in the closed division from round 1.0 on
    with the same number of accelerators. ``faster``, ``slower``: the neighbouring results.
    """

    minutes: float
    longest: float
    batch_size: float
    accelerators: int
    ranks: tuple[int, int]
    results: int
    faster: Entry | None = None
    slower: Entry | None = None

    def __str__(self) -> str:
        time = (
            f"about {_minutes(self.minutes)} min to train BERT-large to 0.720 at batch "
        )
        time += f"{self.batch_size:g} as the reference converges, up to "
        time += f"{_minutes(self.longest)} with published recipes"
        return f"{time}, {self._place()}; estimate, unverified"

    def _place(self) -> str:
        own = counted(self.accelerators, "accelerator")
        if self.results < 2:
            # A place among one is no place.
            return f"{'only one' if self.results else 'no'} published result has {own}"
        # Behind all of them is no place among them.
        first, last = self.ranks[0], min(self.ranks[1], self.results)
        to = f" to {last}" if last > first else ""
        place = f"place {first}{to} among the" if first <= last else "behind all"
        neighbours = " and ".join(
            f"{word} {one.submitter} {one.system} ({_minutes(one.minutes)} min, round {one.round})"
            for word, one in (("behind", self.faster), ("before", self.slower))
            if one
        )
        return f"{place} {self.results} published results with {own}, {neighbours}"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "text": str(self)}


def estimate(rate: float, batch_size: float, accelerators: int) -> Estimate | str:
    """Estimate from the rate without evaluations, in sequences per second, and the sequences per
    step, both over all accelerators. A str says why there is none.
    """
    # In this form, as nan is not above 0 either.
    if not 0 < rate < math.inf:
        return "nothing to compare: the training rate was not measured"
    try:
        point, _ = rcp.find(batch_size)
    except ReviewError as error:
        # A node that tests machines may lack mlperf_logging.
        return f"not estimated: {error}"
    if point is None:
        return f"not estimated: no reference point for batch {batch_size:g}"
    evaluations = EVALUATED / evaluation_interval(batch_size)
    minutes = point.minutes(rate) * (1 + evaluations)
    ends = minutes, minutes * LONGER
    # The league has resubmissions in one row, so that no result counts twice.
    peers = [
        entry
        for entry in League((), published()).ranked
        if entry.minutes
        and entry.division == "closed"
        # Round 0.7 trained to 0.712.
        and entry.round != "0.7"
        and entry.accelerators == accelerators
    ]
    first, last = (sum((entry.minutes or 0) < end for entry in peers) for end in ends)
    return Estimate(
        minutes=ends[0],
        longest=ends[1],
        batch_size=batch_size,
        accelerators=accelerators,
        ranks=(1 + first, 1 + last),
        results=len(peers),
        faster=peers[first - 1] if first else None,
        slower=peers[first] if first < len(peers) else None,
    )


def _minutes(minutes: float | None) -> str:
    return (
        f"{minutes:.3g}" if minutes is not None and minutes < 100 else f"{minutes:,.0f}"
    )
