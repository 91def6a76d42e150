"""`python -m review rehearsal`: is the start of a run as that of published ones? Go, or what is wrong.

Few runs span less than all that are as good: of two sound runs in eleven, one lies outside of the other ten. So an
accuracy counts as wrong only where it lies outside by more than the band's room (at least 0.002).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs.mllog import read_log
from review.logs.output import ReviewError, pick
from review.results.gate import Band, Point, band_of, likely_causes, published, read
from review.results.run import Run
from review.rulebook.compliance import DEFAULT_RULESET
from review.verdict.training_rules import INITIAL_ACCURACY, INITIAL_TOLERANCE

LEAST_ROOM = 0.002


@dataclass(frozen=True)
class Rehearsal:
    """The evaluations of the start of a run that a band covers."""

    run: Run
    band: Band
    points: tuple[Point, ...]

    def causes(self) -> Iterator[str]:
        """What is most likely wrong, the first cause first; nothing where all is as published."""
        start = next((point for point in self.points if point.samples == 0), None)
        later = [point for point in self.points if point.samples]
        wrong = [point for point in later if not point.sound]
        if start is None:
            yield "there is no evaluation before the first step: it was no rehearsal (REHEARSAL=1 evaluates there)"
        elif not start.sound:
            yield (
                f"before the first step the accuracy is {start.accuracy:.4f}, and the checkpoint has {start.low:.3f} "
                f"to {start.high:.3f}: other weights (md5 of model.ckpt-28252), another evaluation set or vocabulary "
                "(./verify_dataset.sh), or GELU's form"
            )
        elif wrong and abs(later[-1].accuracy - start.accuracy) < LEAST_ROOM:
            yield "the accuracy stays at the checkpoint's: no step is taken (learning rate, loss scale), or noisy data"
        elif wrong:
            high = wrong[0].verdict == "high"
            yield from likely_causes(wrong[0].samples, high, self.band, self.run, sound_start=True)
            if not high:
                settings = "FUSED=none, ATTENTION=sdpa_loop, PRECISION=fp32"
                yield f"a fused kernel, attention or number format: {settings} in turn"
        if not later and not self.points[-1].samples:
            yield "there is no evaluation after the first step: the run ended too early"

    @property
    def go(self) -> bool:
        """Whether the ten runs may start."""
        return not any(self.causes())

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        points = [pick(point, "samples accuracy low high verdict") for point in self.points]
        return {"go": self.go, "file": self.run.path, "points": points, "causes": list(self.causes())}


def rehearsal(target: Path, band: Path | None = None, ruleset: str = DEFAULT_RULESET) -> Rehearsal:
    """Holds the newest log of a run's folder, or a log, to the published runs of its batch size, or to ``band``.

    A band of one's own begins with the point of sample 0, where the checkpoint of the benchmark has 0.340. Raises
    ReviewError where there is no log, no band of its batch size, or no evaluation that the band covers.
    """
    logs = [target] if target.is_file() else sorted(target.glob("result_*.txt"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise ReviewError(f"{target}: no result_*.txt: did the rehearsal run to its end?")
    run = Run(read_log(logs[-1]), ruleset)
    found = read(band) if band else band_of(run)
    if found is None:
        known = ", ".join(dict.fromkeys(f"{one.batch_size:,}" for one in published()))
        raise ReviewError(
            f"{run.path}: no ten runs of batch size {run.batch_size or 'unknown'} were published to compare with, only "
            f"of {known}: rehearse a config of one of these, or give a band of your own with --band"
        )
    points = []
    for one in (one for one in run.evaluations if one.samples is not None):
        if one.samples == 0 and band is None:
            low, high = INITIAL_ACCURACY - INITIAL_TOLERANCE, INITIAL_ACCURACY + INITIAL_TOLERANCE
            points.append(Point(0, one.accuracy, low, high, 0.0))
        elif held := found.hold(one.samples or 0, one.accuracy, LEAST_ROOM):
            points.append(held if held.samples else replace(held, room=0.0))
    if not points:
        raise ReviewError(f"{run.path}: no evaluation of it lies where published runs have one")
    return Rehearsal(run, found, tuple(points))


def print_rehearsal(found: Rehearsal) -> None:
    """The points, and go or the likely causes."""
    band = found.band
    print(f"{found.run.path}\nheld to {band.runs} runs of batch size {band.batch_size:,}: {band.source}")
    print(f"{'samples':>12} {'accuracy':>10} {'published':>18}")
    for point in found.points:
        span = f"{point.low:.4f} to {point.high:.4f}"
        print(f"{point.samples:>12,.0f} {point.accuracy:>10.4f} {span:>18}  {point.verdict}")
    for number, cause in enumerate(found.causes(), 1):
        print(f"{number}. {cause}")
    print("GO: the run starts as the published ones" if found.go else "NO GO: outside the published runs; see above")
