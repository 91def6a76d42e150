"""Why the RCP test fails, in figures: the smallest mean that passes, what is short of it, and the nearest points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from review.results.score import Result
from review.rulebook import rcp


@dataclass(frozen=True)
class Dossier:
    """The RCP test of a result, and what a submitter whose result fails it has to know."""

    result: Result

    @property
    def passed(self) -> bool:
        """The verdict; a result that is not tested has none against it."""
        return self.result.rcp_test is None or self.result.rcp_test.passed

    @property
    def minimum(self) -> float | None:
        """The smallest mean that passes, samples."""
        return self.result.rcp_point.minimum if self.result.rcp_point else None

    @property
    def short(self) -> float | None:
        """How far the mean is below it, samples; 0 where it passes."""
        mean, minimum = self.result.mean_samples, self.minimum
        return None if mean is None or minimum is None else max(0.0, minimum - mean)

    @property
    def nearest(self) -> list[rcp.Rcp]:
        """The reference points on both sides of the batch size."""
        if self.result.batch_size is None or self.result.rcp_test is None:
            return []
        return rcp.nearest(self.result.batch_size, self.result.ruleset, self.result.terms.rcp_file)

    def lines(self) -> list[str]:
        """In words; none where the test passes."""
        if self.passed:
            return []
        lines = []
        counted = rcp.RUNS - 2
        if self.short and self.minimum is not None:
            more = f"{self.short:,.0f} short on average, {counted * self.short:,.0f} over the {counted} runs that count"
            mean = f"the mean is {self.result.mean_samples:,.0f} samples"
            lines.append(f"{mean}, the smallest that passes {self.minimum:,.0f}: {more}")
        for point in self.nearest:
            runs = f", {len(point.runs)} runs from {point.runs[0]:,} to {point.runs[-1]:,}" if point.runs else ""
            lines.append(f"reference of batch {point.batch_size:,}: {point.describe()}{runs}")
        if self.result.rcp_point is None and self.result.batch_size is not None:
            largest = max(point.batch_size for point in self.nearest) if self.nearest else None
            above = f"; the largest there is, is {largest:,}" if largest else ""
            size = f"{self.result.batch_size:g}"
            lines.append(f"no reference covers batch {size}{above}: run the reference {2 * rcp.RUNS} times at {size}")
        elif self.short:
            lines.append("have hyper-parameters, data order and evaluation reviewed, or ask for the rules' rcp-bypass")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        test, result, point = self.result.rcp_test, self.result, ("batch_size", "mean", "std", "minimum")
        return {
            "folder": result.folder,
            "passed": test and test.passed,
            "reason": test and test.reason,
            "batch_size": result.batch_size,
            "samples": {run.name: run.samples for run in result.runs},
            "mean_samples": result.mean_samples,
            "minimum": self.minimum,
            "short": self.short,
            "short_over_counted_runs": None if self.short is None else (rcp.RUNS - 2) * self.short,
            "nearest": [{name: getattr(one, name) for name in point} for one in self.nearest],
        }
