"""Student's t, trimmed means and the ratio of two of them: what it takes to say that one result is faster.

The olympic mean of the score is a trimmed mean: the fastest and the slowest of ten runs are left out. So its error and
its test are those of trimmed means, and a run that failed, which counts as infinitely slow, needs no special case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95  # of confidence intervals
_LARGEST_REACH = 50.0  # of a logarithm; an interval beyond it says nothing


def t_cdf(t: float, dof: float) -> float:
    """P(T <= t) of Student's t with ``dof`` > 0 degrees of freedom, whole or not."""
    from scipy.special import stdtr  # takes a fifth of a second, which not every command needs

    return float(stdtr(dof, t))


@functools.cache
def t_quantile(p: float, dof: float) -> float:
    """The t with t_cdf(t, dof) = p, 0 < p < 1."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, p))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A trimmed mean: ``value``, the squared standard error of it and the values that it is the mean of."""

    value: float
    error2: float | None
    counted: int


def trimmed_mean(values: Sequence[float], trim: int = 1) -> Mean:
    """Mean without the ``trim`` smallest and largest values, of which the largest may be infinite.

    The squared error is that of K. K. Yuen, "The two-sample trimmed t for unequal population variances", Biometrika
    61 (1974): SSD_w / (h (h - 1)), with h values counted and SSD_w the squared deviations of the winsorised values.
    None for fewer than two counted values. Raises ValueError where nothing is left.
    """
    ordered = sorted(values)
    kept = ordered[trim : len(ordered) - trim]
    if not kept or not all(map(math.isfinite, kept)):
        raise ValueError("nothing to average")
    h = len(kept)
    mean = math.fsum(kept) / h
    if h < 2:
        return Mean(value=mean, error2=None, counted=h)
    winsorised = [kept[0]] * trim + kept + [kept[-1]] * trim
    center = math.fsum(winsorised) / len(winsorised)
    squares = math.fsum((value - center) ** 2 for value in winsorised)
    return Mean(value=mean, error2=squares / (h * (h - 1)), counted=h)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A ratio of two means, its confidence interval, and the probability of such a difference by chance alone.

    Without an interval (too few values, or a mean that may be 0) ``low`` and ``high`` are None.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def significant(self) -> bool:
        """Whether chance is unlikely at the level of the interval."""
        return self.p is not None and self.p < 1 - LEVEL


def ratio(above: Mean, below: Mean) -> Ratio:
    """``above`` / ``below``, two independent trimmed means of positive quantities. Raises ValueError for 0 below.

    The interval is that of the ratio's logarithm, by the delta method (the relative errors add), so that it holds no
    ratio below 0 and that of a / b is that of b / a turned over; its degrees of freedom are Welch's, with the counts of
    the trimmed means (Yuen 1974). p: the two-sided test of a logarithm of 0, so that p < 0.05 exactly where the
    interval leaves out 1.
    """
    if below.value == 0:
        raise ValueError("a ratio to zero")
    value = above.value / below.value
    if above.error2 is None or below.error2 is None or value <= 0:
        return Ratio(value=value)
    a, b = above.error2 / above.value**2, below.error2 / below.value**2
    if a + b == 0:
        return Ratio(value=value, low=value, high=value, p=1.0 if value == 1 else 0.0)
    dof = (a + b) ** 2 / (a * a / (above.counted - 1) + b * b / (below.counted - 1))
    error = math.sqrt(a + b)
    p = 2 * t_cdf(-abs(math.log(value)) / error, dof)
    reach = t_quantile((1 + LEVEL) / 2, dof) * error
    if reach > _LARGEST_REACH:
        return Ratio(value=value, p=p)
    return Ratio(value=value, low=value * math.exp(-reach), high=value * math.exp(reach), p=p)
