"""Charts of a result: accuracy, samples, time, throughput, power and loss of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from review.logs.mllog import number, text
from review.report.chart import Axis, Chart, Mark, Point, Series, Span, count, plausible
from review.results.energy import Energy, EnergyError, PowerFile
from review.results.run import Run
from review.results.score import REQUIRED_RUNS, Result

TRAINING, EVALUATION, INITIALISATION = "training", "evaluation", "initialisation"
UNCONVERGED = (
    1e8  # samples; a larger mean includes a run that did not converge, which counts as 1e9
)
MOST_POINTS = 60  # of a power curve; more readings are averaged, or ten runs would hide each other
_CLOSE_TO_TARGET = 0.02  # accuracy below the target at which the second accuracy chart starts
_LEAST_SPREAD = 0.05  # least range of the throughput chart relative to the median, so that noise looks like noise
_MINUTES, _SAMPLES, _ACCURACY = "minutes since run_start", "samples trained", "masked-LM accuracy"


def charts(result: Result) -> list[Chart]:
    """All charts that the logs have data for."""
    draw = (
        accuracy_chart,
        close_to_target_chart,
        samples_chart,
        time_chart,
        throughput_chart,
        power_chart,
        loss_chart,
    )
    return [chart for chart in (one(result) for one in draw) if chart is not None]


def _minutes(run: Run, time_ms: float) -> float | None:
    if run.run_start is None:
        return None
    minutes = (time_ms - run.run_start.time_ms) / 60_000
    return minutes if plausible(minutes) else None


def _curve(result: Result, index: int, points: Sequence[Point]) -> Series:
    run = result.runs[index]
    why = result.dropped.get(run.path, "")
    note = {"best": " fastest", "worst": " slowest"}.get(why, why and f" {why}")
    label = text(run.path.stem.removeprefix("result_"))[:20] + note
    return Series(run=index, name=run.name, label=label, points=tuple(points), counted=not why)


def _curves(result: Result, points_of: Callable[[Run], Iterable[Point]]) -> tuple[Series, ...]:
    """A curve of each run with points."""
    found = [(index, tuple(points_of(run))) for index, run in enumerate(result.runs)]
    return tuple(_curve(result, index, points) for index, points in found if points)


def _ys(curves: Sequence[Series]) -> list[float]:
    return [point.y for curve in curves for point in curve.points]


def _lines(
    key: str, title: str, alt: str, over: str, curves: Sequence[Series], y: Axis, **more: Any
) -> Chart:
    """Curves over samples or minutes. ``more``: ``low``, start of the x axis (default 0); ``marks``."""
    xs, low = [point.x for curve in curves for point in curve.points], more.pop("low", 0.0)
    x = Axis(label=over, low=low, high=max(xs) + 0.02 * max(max(xs) - low, 1e-9))
    return Chart(key=key, title=title, alt=alt, x=x, y=y, series=tuple(curves), **more)


def _accuracies(result: Result) -> tuple[str, tuple[Series, ...]]:
    """Label of the x axis, and the curves: over samples if any log counts them, else over minutes."""
    counts = any(
        evaluation.samples is not None for run in result.runs for evaluation in run.evaluations
    )

    def points(run: Run) -> Iterable[Point]:
        for one in run.evaluations:
            minutes = _minutes(run, one.time_ms)
            # Runs that do not count samples are left out then, rather than drawn on another axis.
            x = one.samples if counts else minutes
            if x is not None and plausible(x) and 0 <= one.accuracy <= 1:
                tip = f"{run.name}: accuracy {one.accuracy:.4f}"
                tip += "" if one.samples is None else f", {one.samples:,.0f} samples"
                yield Point(
                    x, one.accuracy, tip + ("" if minutes is None else f", {minutes:.2f} min")
                )

    return _SAMPLES if counts else _MINUTES, _curves(result, points)


def _target(result: Result) -> tuple[Mark, ...]:
    return (Mark(result.target, f"target {result.target:.3f}", "target"),)


def accuracy_chart(result: Result) -> Chart | None:
    """Accuracy of every run over samples, with the target."""
    (over, curves), target = _accuracies(result), result.target
    if not curves:
        return None
    first, last = ([curve.points[at].y for curve in curves] for at in (0, -1))
    reached = sum(max(point.y for point in curve.points) >= target for curve in curves)
    alt = f"Masked-LM accuracy of {count(curves)} over training: first evaluations between {min(first):.4f} and "
    alt += f"{max(first):.4f}, last ones between {min(last):.4f} and {max(last):.4f}; {reached} of {len(curves)} reach "
    y = Axis.around(_ACCURACY, [*_ys(curves), target], 0.06, 1e-3, floor=0)
    title = "Accuracy over samples" if over == _SAMPLES else "Accuracy over time"
    return _lines("accuracy", title, f"{alt}{target:.3f}.", over, curves, y, marks=_target(result))


def close_to_target_chart(result: Result) -> Chart | None:
    """Accuracy close to the target, where runs differ; None if fewer than two points are there."""
    (over, curves), target = _accuracies(result), result.target
    low = target - _CLOSE_TO_TARGET
    shown = []
    for curve in curves:
        first = next((i for i, point in enumerate(curve.points) if point.y >= low), None)
        if first is not None:  # include the point before, so that the curve enters from the edge
            shown.append(_curve(result, curve.run, curve.points[max(first - 1, 0) :]))
    close = [point for curve in shown for point in curve.points if point.y >= low]
    xs, high = [point.x for point in close], max([target, *(point.y for point in close)])
    # If no curve enters from below, the first chart shows the same.
    if len(set(xs)) < 2 or not any(curve.points[0].y < low for curve in shown):
        return None
    alt = f"The same curves from {low:.3f} on, where {count(shown)} cross {target:.3f} one after another."
    y = Axis(label=_ACCURACY, low=low, high=high + 0.1 * (high - low))
    start = min(xs) - 0.05 * (max(xs) - min(xs))
    return _lines(
        "target",
        "The last stretch to the target",
        alt,
        over,
        shown,
        y,
        low=start,
        marks=_target(result),
    )


def _bar(result: Result, index: int, spans: Sequence[Span], note: str, tip: str) -> Series:
    run = result.runs[index]
    counted = run.path not in result.dropped
    return Series(
        run=index,
        name=run.name,
        spans=tuple(spans),
        counted=counted,
        note=note,
        tip=f"{run.name}: {tip}",
    )


def samples_chart(result: Result) -> Chart | None:
    """Samples to the target of every run, compared with the reference runs."""
    bars, values = [], []
    for index, run in enumerate(result.runs):
        if run.samples is not None and plausible(run.samples):
            note = f"{run.samples:,.0f}{'' if run.converged else ', not reached'}"
            tip = f"{run.samples:,.0f} samples{'' if run.converged else ' (did not converge)'}"
            bars.append(_bar(result, index, [Span(run.samples, run.samples, "dot")], note, tip))
            values.append(run.samples)
    if not bars:
        return None
    alt = f"Samples to the target of {count(bars)}: between {min(values):,.0f} and {max(values):,.0f}."
    marks, point, mean = [], result.rcp_point, result.mean_samples
    if point is not None:
        marks.append(Mark(point.minimum, f"RCP minimum {point.minimum:,.0f}", "minimum"))
        marks.append(Mark(point.mean, f"RCP mean {point.mean:,.0f}", "reference"))
    if mean is not None and mean < UNCONVERGED:
        marks.append(Mark(mean, f"olympic mean {mean:,.0f}", "own"))
    if point is not None and mean is not None:
        side = "above" if mean >= point.minimum else "below"
        alt += (
            f" Their olympic mean of {mean:,.0f} is {side} the RCP minimum of {point.minimum:,.0f}."
        )
    values += [mark.value for mark in marks]
    return Chart(
        key="samples",
        title="Samples to the target",
        alt=alt,
        x=Axis.around(_SAMPLES, values, 0.08, max(max(values) / 8, 12.5), floor=0),
        series=tuple(bars),
        marks=tuple(marks),
        band=(point.minimum, point.mean) if point else None,
    )


def time_chart(result: Result) -> Chart | None:
    """Timeline of each run: initialisation (left of run_start), training and evaluations."""
    bars = []
    for index, run in enumerate(result.runs):
        spans = _spans_of_time(run)
        if spans and run.minutes is not None:
            tip = f"{run.minutes:,.4f} min"
            tip += (
                ""
                if run.evaluation_share is None
                else f", {run.evaluation_share:.1%} of it evaluations"
            )
            tip += "" if run.init_seconds is None else f", initialisation {run.init_seconds:,.1f} s"
            bars.append(_bar(result, index, spans, f"{run.minutes:,.2f} min", tip))
    if not bars:
        return None
    spans = [span for bar in bars for span in bar.spans]
    minutes = [run.minutes for run in result.runs if run.minutes is not None]
    shares = [run.evaluation_share for run in result.runs if run.evaluation_share is not None]
    alt = f"Timeline of {count(bars)}: between {min(minutes):,.2f} and {max(minutes):,.2f} minutes from run_start."
    alt += f" Evaluations take {min(shares):.1%} to {max(shares):.1%} of it." if shares else ""
    # The mean of fewer runs is no score.
    mean = result.olympic_minutes if len(result.runs) == REQUIRED_RUNS else None
    return Chart(
        key="time",
        title="Where the time goes",
        alt=alt,
        x=Axis(
            label=_MINUTES,
            low=min(span.start for span in spans),
            high=max(span.stop for span in spans),
        ),
        series=tuple(bars),
        parts=tuple(
            part
            for part in (INITIALISATION, TRAINING, EVALUATION)
            if part in {span.part for span in spans}
        ),
        marks=() if mean is None else (Mark(mean, f"olympic mean {mean:.4f} min", "own"),),
    )


def _spans_of_time(run: Run) -> list[Span]:
    end = None if run.run_stop is None else _minutes(run, run.run_stop.time_ms)
    if end is None or end <= 0:
        return []
    spans = []
    if run.init_seconds and plausible(run.init_seconds):
        spans.append(Span(-run.init_seconds / 60, 0, INITIALISATION))
    now = 0.0
    for one in run.evaluations:
        if one.start_ms is not None and one.stop_ms is not None:
            start, stop = _minutes(run, one.start_ms), _minutes(run, one.stop_ms)
            # Times of a damaged log that overlap or run backwards are drawn as training.
            if start is not None and stop is not None and now <= start <= stop <= end:
                spans += [Span(now, start, TRAINING), Span(start, stop, EVALUATION)]
                now = stop
    return [span for span in [*spans, Span(now, end, TRAINING)] if span.stop > span.start]


def throughput_chart(result: Result) -> Chart | None:
    """Sequences per second of each span over time."""

    def points(run: Run) -> Iterable[Point]:
        # Rates are logged at samples; evaluations, which have both, translate them into minutes.
        known, minutes = [0.0], [0.0]
        for one in run.evaluations:
            at = _minutes(run, one.time_ms if one.start_ms is None else one.start_ms)
            if at is not None and one.samples is not None:
                known.append(one.samples)
                minutes.append(at)
        for samples, rate in run.throughput:
            # After the last evaluation nothing says when a count was reached.
            if samples <= known[-1] and rate > 0 and plausible(rate):
                at = float(np.interp(samples, known, minutes))
                yield Point(at, rate, f"{run.name}: {rate:,.0f} sequences/s at {at:.2f} min")

    curves = _curves(result, points)
    if not curves:
        return None
    rates = sorted(_ys(curves))
    median = rates[len(rates) // 2]
    alt = f"Training throughput of {count(curves)}: median {median:,.0f} sequences/s over all spans between "
    alt += f"evaluations, lowest {rates[0]:,.0f}, highest {rates[-1]:,.0f}."
    spread = [*rates, median * (1 - _LEAST_SPREAD), median * (1 + _LEAST_SPREAD)]
    y = Axis.around("sequences/s", spread, 0.05, floor=0)
    return _lines("throughput", "Throughput over time", alt, _MINUTES, curves, y)


def loss_chart(result: Result) -> Chart | None:
    """Training loss over samples, if the runs log it in tracked_stats."""

    def points(run: Run) -> Iterable[Point]:
        for event in run.log.all("tracked_stats"):
            loss = number(event.value.get("loss")) if isinstance(event.value, dict) else None
            samples = event.meta("epoch_num", "samples_count")
            if loss is not None and samples is not None and plausible(loss, samples):
                yield Point(samples, loss, f"{run.name}: loss {loss:.4f} at {samples:,.0f} samples")

    curves = _curves(result, points)
    if not curves:
        return None
    losses = _ys(curves)
    alt = f"Training loss of {count(curves)}, masked-LM and next-sentence together: from {max(losses):.3f} down to "
    y = Axis.around("loss", losses, 0.06, 1e-3)
    return _lines("loss", "Training loss", f"{alt}{min(losses):.3f}.", _SAMPLES, curves, y)


def power_chart(result: Result) -> Chart | None:
    """Power of all nodes and switches of each run over time; None if no run has readings."""
    energy = result.energy
    curves = (
        ()
        if energy is None
        else _curves(result, lambda run: _power(run, energy.runs.get(run.path)))
    )
    if not curves:
        return None
    watts = _ys(curves)
    mean = math.fsum(math.fsum(p.y for p in one.points) / len(one.points) for one in curves) / len(
        curves
    )
    alt = f"Power of all nodes and switches of {count(curves)} together: between {min(watts):,.0f} and "
    alt += f"{max(watts):,.0f} W, {mean:,.0f} W on average."
    y = Axis.around("watts", watts, 0.06, max(watts) / 6, floor=0)
    # The measurement may begin before run_start.
    low = min(0.0, *(point.x for curve in curves for point in curve.points))
    return _lines("power", "Power over time", alt, _MINUTES, curves, y, low=low)


def _power(run: Run, energy: Energy | None) -> Iterable[Point]:
    """Power in equal intervals of the time that all nodes measured; empty if a file cannot be read."""
    if energy is None or run.run_start is None:
        return
    try:
        nodes = [_spent(file, run.run_start.time_ms) for file in energy.files if file.is_node]
        constant = sum(
            file.joules(1000.0) for file in energy.files if not file.is_node
        )  # W: joules in a second
    except EnergyError:
        return
    if not all(len(times) > 1 for times, _ in nodes):
        return
    low, high = max(times[0] for times, _ in nodes), min(times[-1] for times, _ in nodes)
    if low < high:
        # No more intervals than readings: the curve shows no detail that was not measured.
        edges = np.linspace(
            low, high, 1 + min(MOST_POINTS, max(len(times) - 1 for times, _ in nodes))
        )
        # Differences of energy, not samples of power: the area
        # under the curve is what was measured.
        spent = sum(np.interp(edges, times, spent) for times, spent in nodes)
        for at, watts in zip(
            (edges[1:] + edges[:-1]) / 2, constant + np.diff(spent) / np.diff(edges), strict=True
        ):
            yield Point(float(at), float(watts), f"{run.name}: {watts:,.0f} W at {at:.2f} min")


def _spent(file: PowerFile, start_ms: float) -> tuple[list[float], list[float]]:
    """Minutes since run_start, and watt-minutes by then; a reading holds from the previous one on."""
    if file.start is None:
        return [], []
    times, spent = [(file.start.time_ms - start_ms) / 60_000], [0.0]
    for event in file.readings:
        watts, now = file.efficiency * file.value_of(event), (event.time_ms - start_ms) / 60_000
        if not plausible(watts, now, times[0]):
            return [], []
        if now > times[-1]:
            spent.append(spent[-1] + watts * (now - times[-1]))
            times.append(now)
    return times, spent
