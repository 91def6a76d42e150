"""Clocks that no machine keeps: runs faster than an accelerator computes, or than any published.

A sequence of BERT-large takes at least 6 operations for each weight of the encoder and token.
"""

import re
from collections.abc import Iterator

from review.logs.output import WARNING, Finding
from review.results.score import Result
from review.rulebook.rules import table

_WEIGHTS = 24 * 12 * 1024**2  # of the encoder's matrices
_TOKENS = 254.5  # a sequence, on average
OPERATIONS = 6 * _WEIGHTS * _TOKENS
# 24 layers come one after the other, forward and backward, each of several kernels that take some
# microseconds; the fastest published step takes 15 ms.
_MOST_STEPS = 1000  # a second
_FACTOR = 1.5  # over the fastest published
_OTHER = ""  # of the table: accelerators that it does not name


def limits(accelerator: str) -> tuple[float, float]:
    """Sequences per second and accelerator: that it can compute, and that a published one reached."""
    known = table("accelerators")
    patterns = (name for name in known if name and re.search(name, accelerator))
    teraflops, published = known[next(patterns, _OTHER)]
    return teraflops * 1e12 / OPERATIONS, published


def check_speed(result: Result) -> Iterator[Finding]:
    # Another model may be faster: the open division has others.
    closed = result.division == "closed"
    most, published = limits(result.accelerator)
    for run in result.runs:
        rate, each = run.sequences_per_second, result.rate_per_accelerator(run)
        if rate and run.batch_size and rate / run.batch_size > _MOST_STEPS:
            rule, message = "step_time", f"{rate / run.batch_size:,.0f} steps/s"
        elif each and each > most:
            rule, message = "impossible_rate", f"{each:,.0f} sequences/s of each"
        elif each and each > _FACTOR * published:
            rule, message = "unseen_rate", f"{each:,.0f} sequences/s of each"
        else:
            continue
        yield run.broken(
            rule,
            f"gives {message}",
            run.run_stop,
            severity=None if closed else WARNING,
            accelerator=result.accelerator or "an accelerator",
            most=most,
            published=published,
            steps=_MOST_STEPS,
        )
