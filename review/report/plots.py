"""The charts of a result, one function each, in terms of its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from review.logs.mllog import number
from review.report.chart import Axis, Bar, BarChart, Chart, Line, LineChart, Mark, Point, Segment
from review.report.power_plot import power_chart
from review.results.run import Evaluation, Run
from review.results.score import REQUIRED_RUNS, Result

TRAINING, EVALUATION, INITIALISATION = "training", "evaluation", "initialisation"
UNCONVERGED = 1e8  # samples from which a mean has a run in it that did not converge, which counts as 1e9
_CLOSE_TO_TARGET = 0.02  # accuracy below the target from which the second accuracy chart starts
_LARGEST = 1e12  # samples, minutes, sequences/s, loss: beyond it a log is broken, and a chart would show nothing else
_LEAST_SPREAD = 0.05  # of the median that the throughput chart spans at least, so that noise looks like noise


def charts(result: Result) -> list[Chart]:
    """Every chart that the logs have data for."""
    made = (
        accuracy_chart(result),
        close_to_target_chart(result),
        samples_chart(result),
        time_chart(result),
        throughput_chart(result),
        power_chart(result),
        loss_chart(result),
    )
    return [chart for chart in made if chart is not None]


def _plausible(*values: float) -> bool:
    return all(abs(value) <= _LARGEST for value in values)  # nan is not


def _minutes(run: Run, time_ms: float) -> float | None:
    if run.run_start is None:
        return None
    minutes = (time_ms - run.run_start.time_ms) / 60_000
    return minutes if _plausible(minutes) else None


def _tip(run: Run, evaluation: Evaluation) -> str:
    parts = [f"{run.name}: accuracy {evaluation.accuracy:.4f}"]
    if evaluation.samples is not None:
        parts.append(f"{evaluation.samples:,.0f} samples")
    minutes = _minutes(run, evaluation.time_ms)
    if minutes is not None:
        parts.append(f"{minutes:.2f} min")
    return ", ".join(parts)


def _accuracy_lines(result: Result, by_samples: bool) -> tuple[Line, ...]:
    lines = []
    for index, run in enumerate(result.runs):
        points = []
        for evaluation in run.evaluations:
            x = evaluation.samples if by_samples else _minutes(run, evaluation.time_ms)
            if x is not None and _plausible(x) and 0 <= evaluation.accuracy <= 1:
                points.append(Point(x=x, y=evaluation.accuracy, tip=_tip(run, evaluation)))
        if points:
            lines.append(_line(result, index, points))
    return tuple(lines)


def _line(result: Result, index: int, points: Iterable[Point]) -> Line:
    run = result.runs[index]
    why = result.dropped.get(run.path, "")
    note = {"best": "fastest", "worst": "slowest"}.get(why, why)
    return Line(run=index, name=run.name, points=tuple(points), counted=not why, note=note)


def _samples_axis(result: Result) -> bool:
    return any(evaluation.samples is not None for run in result.runs for evaluation in run.evaluations)


def _x_axis(by_samples: bool, values: Sequence[float], low: float = 0.0) -> Axis:
    high = max(values) + 0.02 * max(max(values) - low, 1e-9)
    if by_samples:
        return Axis(label="samples trained", unit="samples", low=low, high=high)
    return Axis(label="minutes since run_start", unit="minutes", low=low, high=high)


def accuracy_chart(result: Result) -> LineChart | None:
    """Accuracy over samples of every run, with the target."""
    by_samples = _samples_axis(result)
    lines = _accuracy_lines(result, by_samples)
    if not lines:
        return None
    target = result.target
    points = [point for line in lines for point in line.points]
    values = [point.y for point in points] + [target]
    room = 0.06 * max(max(values) - min(values), 1e-3)
    last = [line.points[-1].y for line in lines]
    reached = sum(max(point.y for point in line.points) >= target for line in lines)
    alt = (
        f"Masked-LM accuracy of {_count(lines)} over training: first evaluations between "
        f"{min(line.points[0].y for line in lines):.4f} and {max(line.points[0].y for line in lines):.4f}, last ones "
        f"between {min(last):.4f} and {max(last):.4f}; {reached} of {len(lines)} reach {target:.3f}."
    )
    return LineChart(
        key="accuracy",
        title="Accuracy over samples" if by_samples else "Accuracy over time",
        alt=alt,
        x=_x_axis(by_samples, [point.x for point in points]),
        y=Axis(label="masked-LM accuracy", unit="accuracy", low=max(min(values) - room, 0), high=max(values) + room),
        lines=lines,
        marks=(Mark(value=target, label=f"target {target:.3f}", role="target"),),
    )


def close_to_target_chart(result: Result) -> LineChart | None:
    """The last stretch of the accuracy, where runs differ; None where fewer than two points lie there."""
    by_samples = _samples_axis(result)
    target = result.target
    low = target - _CLOSE_TO_TARGET
    lines = tuple(
        _line(result, line.run, line.points[max(first - 1, 0) :])
        for line in _accuracy_lines(result, by_samples)
        if (first := next((i for i, point in enumerate(line.points) if point.y >= low), -1)) >= 0
    )
    close = [point for line in lines for point in line.points if point.y >= low]
    if len(close) < 2 or len({point.x for point in close}) < 2 or not any(line.points[0].y < low for line in lines):
        return None
    left = min(_entry(line.points, low) for line in lines)
    width = max(point.x for point in close) - left
    high = max(max(point.y for point in close), target)
    return LineChart(
        key="target",
        title="The last stretch to the target",
        alt=f"The same curves from {low:.3f} on, where {_count(lines)} cross {target:.3f} one after another.",
        x=_x_axis(by_samples, [point.x for point in close], left - 0.05 * width),
        y=Axis(label="masked-LM accuracy", unit="accuracy", low=low, high=high + 0.1 * (high - low)),
        lines=lines,
        marks=(Mark(value=target, label=f"target {target:.3f}", role="target"),),
    )


def _entry(points: Sequence[Point], low: float) -> float:
    """Where a curve that goes on above ``low`` rises above it, by interpolation."""
    first, second = points[0], points[min(1, len(points) - 1)]
    if first.y >= low or second.y <= first.y:
        return first.x
    return first.x + (low - first.y) / (second.y - first.y) * (second.x - first.x)


def _count(things: Sequence[object]) -> str:
    return f"{len(things)} run{'' if len(things) == 1 else 's'}"


def samples_chart(result: Result) -> BarChart | None:
    """Samples to the target of every run against what the reference runs took."""
    bars = []
    for index, run in enumerate(result.runs):
        if run.samples is None or not _plausible(run.samples):
            continue
        reached = "" if run.converged else " (did not converge)"
        tip = f"{run.name}: {run.samples:,.0f} samples{reached}"
        note = f"{run.samples:,.0f}{'' if run.converged else ', not reached'}"
        counted = run.path not in result.dropped
        bars.append(Bar(run=index, name=run.name, note=note, tip=tip, counted=counted, dot=run.samples))
    if not bars:
        return None
    marks, band = _reference_marks(result)
    values = [bar.dot for bar in bars if bar.dot is not None] + [mark.value for mark in marks]
    low, high = min(values), max(values)
    room = max(0.08 * (high - low), 0.01 * high, 1)
    return BarChart(
        key="samples",
        title="Samples to the target",
        alt=_samples_alt(result, [bar.dot for bar in bars if bar.dot is not None]),
        x=Axis(label="samples trained", unit="samples", low=max(low - room, 0), high=high + room),
        bars=tuple(bars),
        marks=marks,
        band=band,
    )


def _reference_marks(result: Result) -> tuple[tuple[Mark, ...], tuple[float, float] | None]:
    marks, band = [], None
    point, mean = result.rcp_point, result.mean_samples
    if point is not None:
        marks.append(Mark(value=point.minimum, label=f"RCP minimum {point.minimum:,.0f}", role="minimum"))
        marks.append(Mark(value=point.mean, label=f"RCP mean {point.mean:,.0f}", role="reference"))
        band = (point.minimum, point.mean)
    if mean is not None and mean < UNCONVERGED:
        marks.append(Mark(value=mean, label=f"olympic mean {mean:,.0f}", role="own"))
    return tuple(marks), band


def _samples_alt(result: Result, values: Sequence[float]) -> str:
    alt = f"Samples to the target of {_count(values)}: between {min(values):,.0f} and {max(values):,.0f}."
    point, mean = result.rcp_point, result.mean_samples
    if point is not None and mean is not None:
        side = "above" if mean >= point.minimum else "below"
        alt += f" Their olympic mean of {mean:,.0f} is {side} the RCP minimum of {point.minimum:,.0f}."
    return alt


def time_chart(result: Result) -> BarChart | None:
    """What each run spent its time on: initialisation left of run_start, then training and evaluations as they came."""
    bars = tuple(bar for index in range(len(result.runs)) if (bar := _time_bar(result, index)) is not None)
    if not bars:
        return None
    segments = [segment for bar in bars for segment in bar.segments]
    used = {segment.part for segment in segments}
    return BarChart(
        key="time",
        title="Where the time goes",
        alt=_time_alt(result, bars),
        x=Axis(
            label="minutes since run_start",
            unit="minutes",
            low=min(segment.start for segment in segments),
            high=max(segment.stop for segment in segments),
        ),
        bars=bars,
        parts=tuple(part for part in (INITIALISATION, TRAINING, EVALUATION) if part in used),
        marks=_time_mark(result),
    )


def _time_bar(result: Result, index: int) -> Bar | None:
    run = result.runs[index]
    segments = _segments(run)
    if not segments or run.minutes is None:
        return None
    tip = f"{run.name}: {run.minutes:,.4f} min"
    if run.evaluation_share is not None:
        tip += f", {run.evaluation_share:.1%} of it evaluations"
    if run.init_seconds is not None:
        tip += f", initialisation {run.init_seconds:,.1f} s"
    counted = run.path not in result.dropped
    note = f"{run.minutes:,.2f} min"
    return Bar(run=index, name=run.name, note=note, tip=tip, counted=counted, segments=tuple(segments))


def _time_mark(result: Result) -> tuple[Mark, ...]:
    """The mean that the score is made of, once there are enough runs for one."""
    if result.olympic_minutes is None or len(result.runs) != REQUIRED_RUNS:
        return ()
    return (Mark(value=result.olympic_minutes, label=f"olympic mean {result.olympic_minutes:.4f} min", role="own"),)


def _time_alt(result: Result, bars: Sequence[Bar]) -> str:
    minutes = [run.minutes for run in result.runs if run.minutes is not None]
    shares = [run.evaluation_share for run in result.runs if run.evaluation_share is not None]
    alt = f"Timeline of {_count(bars)}: between {min(minutes):,.2f} and {max(minutes):,.2f} minutes from run_start."
    return alt + (f" Evaluations take {min(shares):.1%} to {max(shares):.1%} of it." if shares else "")


def _segments(run: Run) -> list[Segment]:
    end = None if run.run_stop is None else _minutes(run, run.run_stop.time_ms)
    if end is None or end <= 0:
        return []
    segments = []
    if run.init_seconds and run.init_seconds > 0 and _plausible(run.init_seconds):
        segments.append(Segment(start=-run.init_seconds / 60, stop=0, part=INITIALISATION))
    now = 0.0
    for evaluation in run.evaluations:
        if evaluation.start_ms is None or evaluation.stop_ms is None:
            continue
        start, stop = _minutes(run, evaluation.start_ms), _minutes(run, evaluation.stop_ms)
        if start is None or stop is None or not now <= start <= stop <= end:
            continue
        segments += [
            Segment(start=now, stop=start, part=TRAINING),
            Segment(start=start, stop=stop, part=EVALUATION),
        ]
        now = stop
    segments.append(Segment(start=now, stop=end, part=TRAINING))
    return [segment for segment in segments if segment.stop > segment.start]


def _samples_to_minutes(run: Run, samples: float) -> float | None:
    """When a run had trained so many samples, by its evaluations, between which it is taken as linear."""
    before: tuple[float, float] = (0.0, 0.0)
    for evaluation in run.evaluations:
        minutes = _minutes(run, evaluation.time_ms if evaluation.start_ms is None else evaluation.start_ms)
        if minutes is None or evaluation.samples is None:
            continue
        if samples <= evaluation.samples:
            width = evaluation.samples - before[0]
            return minutes if width <= 0 else before[1] + (samples - before[0]) / width * (minutes - before[1])
        before = (evaluation.samples, minutes)
    return None


def throughput_chart(result: Result) -> LineChart | None:
    """Sequences per second of each span over time."""
    lines = []
    for index, run in enumerate(result.runs):
        points = []
        for samples, rate in run.throughput:
            minutes = _samples_to_minutes(run, samples)
            if minutes is not None and rate > 0 and _plausible(rate):
                tip = f"{run.name}: {rate:,.0f} sequences/s at {minutes:.2f} min"
                points.append(Point(x=minutes, y=rate, tip=tip))
        if points:
            lines.append(_line(result, index, points))
    if not lines:
        return None
    rates = sorted(point.y for line in lines for point in line.points)
    median = rates[len(rates) // 2]
    low, high = min(rates[0], median * (1 - _LEAST_SPREAD)), max(rates[-1], median * (1 + _LEAST_SPREAD))
    room = 0.05 * (high - low)
    return LineChart(
        key="throughput",
        title="Throughput over time",
        alt=f"Training throughput of {_count(lines)}: median {median:,.0f} sequences/s over all spans between "
        f"evaluations, lowest {rates[0]:,.0f}, highest {rates[-1]:,.0f}.",
        x=_x_axis(False, [point.x for line in lines for point in line.points]),
        y=Axis(label="sequences/s", unit="rate", low=max(low - room, 0), high=high + room),
        lines=tuple(lines),
    )


def loss_chart(result: Result) -> LineChart | None:
    """Training loss over samples, where the runs log it in tracked_stats."""
    lines = []
    for index, run in enumerate(result.runs):
        points = []
        for event in run.log.all("tracked_stats"):
            loss = number(event.value.get("loss")) if isinstance(event.value, dict) else None
            samples = event.meta("epoch_num", "samples_count")
            if loss is not None and samples is not None and _plausible(loss, samples):
                tip = f"{run.name}: loss {loss:.4f} at {samples:,.0f} samples"
                points.append(Point(x=samples, y=loss, tip=tip))
        if points:
            lines.append(_line(result, index, points))
    if not lines:
        return None
    losses = [point.y for line in lines for point in line.points]
    room = 0.06 * max(max(losses) - min(losses), 1e-3)
    return LineChart(
        key="loss",
        title="Training loss",
        alt=f"Training loss of {_count(lines)}, masked-LM and next-sentence together: from {max(losses):.3f} down to "
        f"{min(losses):.3f}.",
        x=_x_axis(True, [point.x for line in lines for point in line.points]),
        y=Axis(label="loss", unit="loss", low=min(losses) - room, high=max(losses) + room),
        lines=tuple(lines),
    )
