"""Charts of a result: accuracy and loss of its runs."""

from collections.abc import Callable, Iterable

from review.logs.mllog import number
from review.logs.output import counted
from review.report.chart import Axis, Chart, Point, Series
from review.results.run import Run
from review.results.score import Result

_MARGIN = 0.06  # of an axis, relative to the range of its values


def charts(result: Result) -> list[Chart]:
    """The charts that the logs have data for."""
    return [*filter(None, (accuracy_chart(result), loss_chart(result)))]


def _plausible(*values: float) -> bool:
    """Whether numbers can be drawn: not NaN, nor so large (above 1e12) that they hide everything
    else.
    """
    return all(abs(value) <= 1e12 for value in values)


def _curves(
    result: Result, points_of: Callable[[Run], Iterable[Point]]
) -> tuple[Series, ...]:
    """A curve of each run with points."""
    curves = []
    for index, run in enumerate(result.runs):
        if points := tuple(points_of(run)):
            # A run that the olympic mean drops is drawn paler.
            dropped = run.path in result.olympic.dropped
            curves.append(
                Series(run=index, name=run.name, points=points, dropped=dropped)
            )
    return tuple(curves)


def _chart(
    key: str,
    title: str,
    alt: str,
    x: str,
    y: str,
    curves: tuple[Series, ...],
    target: float | None = None,
) -> Chart:
    xs = [point.x for curve in curves for point in curve.points]
    ys = [point.y for curve in curves for point in curve.points]
    ys += [] if target is None else [target]
    # At least a thousandth, or equal values would leave an axis without height.
    room = _MARGIN * max(max(ys) - min(ys), 1e-3)
    return Chart(
        key=key,
        title=title,
        alt=alt,
        x=Axis(label=x, low=0.0, high=max(xs)),
        y=Axis(
            label=y,
            # Neither a loss nor an accuracy is negative.
            low=max(min(ys) - room, 0.0),
            high=max(ys) + room,
        ),
        series=curves,
        target=target,
    )


def accuracy_chart(result: Result) -> Chart | None:
    """Accuracy of every run, with the target: over samples if any log counts them, else over
    minutes.
    """
    counts = any(
        evaluation.samples is not None
        for run in result.runs
        for evaluation in run.evaluations
    )

    def points(run: Run) -> Iterable[Point]:
        start = run.run_start.time_ms if run.run_start else None
        for evaluation in run.evaluations:
            minutes = None if start is None else (evaluation.time_ms - start) / 60_000
            # Runs that do not count samples are left out then, rather than drawn on another axis.
            x = evaluation.samples if counts else minutes
            if x is not None and _plausible(x) and 0 <= evaluation.accuracy <= 1:
                at = f"{x:,.0f} samples" if counts else f"{x:.2f} min"
                tip = f"{run.name}: accuracy {evaluation.accuracy:.4f}, {at}"
                yield Point(x, evaluation.accuracy, tip)

    curves, target = _curves(result, points), result.target
    if not curves:
        return None
    reached = sum(max(point.y for point in curve.points) >= target for curve in curves)
    whose = f"{reached} of {counted(len(curves), 'run')}"
    alt = f"Masked-LM accuracy over training: {whose} reach {target:.3f}."
    over = "samples trained" if counts else "minutes since run_start"
    return _chart(
        "accuracy", "Accuracy", alt, over, "masked-LM accuracy", curves, target
    )


def loss_chart(result: Result) -> Chart | None:
    """Training loss over samples, if the runs log it in tracked_stats."""

    def points(run: Run) -> Iterable[Point]:
        for event in run.log.all("tracked_stats"):
            stats = event.value if isinstance(event.value, dict) else {}
            loss = number(stats.get("loss"))
            samples = event.meta("epoch_num", "samples_count")
            if loss is not None and samples is not None and _plausible(loss, samples):
                tip = f"{run.name}: loss {loss:.4f} at {samples:,.0f} samples"
                yield Point(samples, loss, tip)

    curves = _curves(result, points)
    if not curves:
        return None
    whose = counted(len(curves), "run")
    alt = f"Training loss of {whose}, masked-LM and next-sentence together."
    return _chart("loss", "Training loss", alt, "samples trained", "loss", curves)
