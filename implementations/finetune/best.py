"""Evaluations during training: when they are due, and what is kept of the best one."""

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Best:
    """The best evaluation so far; step 0: there was none. It is in every checkpoint of the run.

    Rank 0 alone has figure, weights and scores. worse: evaluations since; evaluations and seconds:
    of all.
    """

    figure: float = -math.inf  # the main metric
    step: int = 0
    worse: int = 0
    evaluations: int = 0
    seconds: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)  # in fp32, on the CPU
    # Of each test sample: the best model need not predict again.
    scores: list[Tensor] = field(default_factory=list)


def evaluation_steps(every: float, epochs: float, last: int) -> set[int]:
    """The steps nearest to multiples of ``every`` epochs, and the last step; none for 0."""
    if not every:
        return set()
    wanted = [n * every / epochs for n in range(1, math.ceil(epochs / every) + 1)]
    return {min(last, max(1, round(last * share))) for share in wanted}
