"""Why the RCP test fails, in figures: the smallest mean that passes, what is short of it, and the nearest points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from review.logs.output import pick
from review.results.score import Result
from review.rulebook import rcp

_COUNTED = rcp.RUNS - 2


@dataclass(frozen=True)
class Dossier:
    """The RCP test of a result, and what a submitter needs to know if it fails."""

    result: Result

    @property
    def passed(self) -> bool:
        """Whether it passes; true for a result that is not tested."""
        return self.result.rcp_test is None or self.result.rcp_test.passed

    @property
    def short(self) -> float | None:
        """How far the mean is below the smallest that passes, samples; 0 where it passes."""
        mean, point = self.result.mean_samples, self.result.rcp_point
        return None if mean is None or point is None else max(0.0, point.minimum - mean)

    @property
    def nearest(self) -> list[rcp.Rcp]:
        """The reference points on both sides of the batch size."""
        result = self.result
        if result.batch_size is None or result.rcp_test is None:
            return []
        return rcp.nearest(result.batch_size, result.ruleset, result.terms.rcp_file)

    def lines(self) -> list[str]:
        """In words; none where the test passes."""
        if self.passed:
            return []
        lines, result, point, short = [], self.result, self.result.rcp_point, self.short
        if short and point:
            mean = f"the mean is {result.mean_samples:,.0f} samples, the smallest that passes {point.minimum:,.0f}"
            over = f"{_COUNTED * short:,.0f} over the {_COUNTED} runs that count"
            lines.append(f"{mean}: {short:,.0f} short on average, {over}")
        for one in self.nearest:
            runs = f", {len(one.runs)} runs from {one.runs[0]:,} to {one.runs[-1]:,}" if one.runs else ""
            lines.append(f"reference of batch {one.batch_size:,}: {one.describe()}{runs}")
        if point is None and result.batch_size is not None:
            above = f"; the largest is {max(one.batch_size for one in self.nearest):,}" if self.nearest else ""
            size = f"{result.batch_size:g}"
            lines.append(f"no reference covers batch {size}{above}: run the reference {2 * rcp.RUNS} times at {size}")
        elif short:
            lines.append("have hyper-parameters, data order and evaluation reviewed, or ask for the rules' rcp-bypass")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **pick(self.result, "folder passed=rcp_test.passed reason=rcp_test.reason batch_size"),
            "samples": {run.name: run.samples for run in self.result.runs},
            **pick(self.result, "mean_samples minimum=rcp_point.minimum"),
            "short": self.short,
            "short_over_counted_runs": None if self.short is None else _COUNTED * self.short,
            "nearest": [pick(one, "batch_size mean std minimum") for one in self.nearest],
        }
