"""`compare`: results side by side, and whether each differs significantly from the first.

Each measure has its ratio, a 95% confidence interval and a test of trimmed means, such as the
olympic mean of the score; a failed run counts as infinitely slow and needs no special case:
- time to the target, the basis of the score: minutes of each run times the scaling factor, best and
worst left out;
- time at the same convergence: minutes of each run x RCP mean of its batch size / its samples, so
that a run that
  happened to converge early does not look fast. The official scaling factor does the same in one
  direction and for the mean only (rcp_checker: RCP mean / mean samples, if above 1);
- throughput: samples per second of each run, over the whole timed span, evaluations included.
If both have power files, the joules of each run are compared as well.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from review.logs.mllog import text
from review.logs.output import (
    Column,
    Heading,
    Line,
    Part,
    ReviewError,
    Table,
    number_text,
    rate_text,
)
from review.logs.tree import read_json
from review.results.run import HYPERPARAMETERS
from review.results.score import Result
from review.rulebook.rules import table
from review.verdict.checking import Verdict
from review.verdict.shown import result_as_dict

MEASURES: dict[str, str] = table("measures")
_MORE_IS_BETTER = ("throughput", "throughput_per_accelerator")
LEVEL = 0.95  # of confidence intervals
_LARGEST_REACH = 50.0  # half width in the logarithm; a wider interval is meaningless
# Of any measure, as its inverse the least: squares are finite, and not 0.
_LARGEST = 1e100
_LEAST_TRIMMED = 4  # runs; with fewer, none is left out, and no significance is claimed
_SETTINGS = {  # sections of config.json that define the task
    "data": ("synthetic", "datadir", "datadir_packed"),
    "evaluate": ("evaldir", "num_examples"),
    "model": ("vocab_size", "hidden_size", "num_hidden_layers"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A trimmed mean, its squared standard error (None if unknown) and the number of values
    averaged.
    """

    value: float
    error2: float | None
    counted: int


def trimmed_mean(values: Sequence[float], trim: int = 1) -> Mean:
    """Mean without the ``trim`` smallest and largest values; the trimmed ones may be infinite.

    The squared error is that of K. K. Yuen, "The two-sample trimmed t for unequal population
    variances", Biometrika 61 (1974): SSD_w / (h (h - 1)), with h values counted and SSD_w the
    squared deviations of the winsorised values; None if h < 2. Raises ValueError if no finite value
    is left.
    """
    ordered = sorted(values)
    # Infinite times sort last, so trimming takes a failed run first.
    kept = ordered[trim : len(ordered) - trim]
    if not kept or not all(map(math.isfinite, kept)):
        raise ValueError("nothing to average")
    h = len(kept)
    mean = math.fsum(kept) / h
    winsorised = [kept[0]] * trim + kept + [kept[-1]] * trim
    center = math.fsum(winsorised) / len(winsorised)
    squares = math.fsum((value - center) ** 2 for value in winsorised)
    error2 = squares / (h * (h - 1)) if h > 1 else None
    return Mean(value=mean, error2=error2, counted=h)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A ratio of two means, its confidence interval (None if unknown) and p-value."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < 1 - LEVEL


def ratio(above: Mean, below: Mean) -> Ratio:
    """``above`` / ``below``, independent trimmed means of positive quantities. Raises ValueError if
    ``below`` is 0.

    The interval is computed for the ratio's logarithm by the delta method (relative errors add): it
    contains no negative ratio, and the interval of b / a is the inverse of that of a / b. Welch's
    degrees of freedom, with the counts of the trimmed means (Yuen 1974). p: two-sided test that the
    logarithm is 0, so p < 0.05 exactly if the interval excludes 1.
    """
    # Imported here: takes 0.2 s, which most commands do not need.
    from scipy.special import stdtr, stdtrit

    if below.value == 0:
        raise ValueError("a ratio to zero")
    value = above.value / below.value
    if above.error2 is None or below.error2 is None or value <= 0:
        return Ratio(value=value)
    a = above.error2 / above.value**2
    b = below.error2 / below.value**2
    # Runs that agree to the last digit have no deviation to test against.
    if a + b == 0:
        return Ratio(value=value, low=value, high=value, p=1.0 if value == 1 else 0.0)
    spread = a * a / (above.counted - 1) + b * b / (below.counted - 1)
    dof = (a + b) ** 2 / spread
    error = math.sqrt(a + b)
    p = 2 * float(stdtr(dof, -abs(math.log(value)) / error))
    reach = float(stdtrit(dof, (1 + LEVEL) / 2)) * error
    if reach > _LARGEST_REACH:
        return Ratio(value=value, p=p)
    low, high = (value * math.exp(side * reach) for side in (-1, 1))
    return Ratio(value=value, low=low, high=high, p=p)


def means(result: Result) -> dict[str, Mean | None]:
    """Mean of each measure over the counted runs; None if a log lacks it.

    From four runs on, the best and the worst are left out; a failed run is the worst.
    """
    factor, point = result.scaling_factor, result.rcp_point
    averages: dict[str, Mean | None] = {}
    # Of the runs that count; a failed one is added below, where it matters.
    values: dict[str, list[float | None]] = {
        "time": [run.minutes and run.minutes * factor for run in result.scored.counted],
        "normalized_time": [
            point.mean / rate / 60
            if point and (rate := run.sequences_per_second)
            else None
            for run in result.scored.counted
        ],
        "throughput": [run.sequences_per_second for run in result.scored.counted],
        "throughput_per_accelerator": [
            result.rate_per_accelerator(run) for run in result.scored.counted
        ],
        "samples": [run.samples for run in result.scored.counted],
        "energy": [
            (joules := result.joules(run)) and joules * factor
            for run in result.scored.counted
        ],
    }
    for measure, logged in values.items():
        sane = [
            value
            for value in logged
            if value is not None and 1 / _LARGEST < value < _LARGEST
        ]
        # A mean over some of the runs would be of another set than the others.
        complete = bool(sane) and len(sane) == len(logged)
        # The failed run is the slowest; its samples and its rate say nothing.
        if (
            measure in ("time", "energy")
            and result.scored.failed == 1
            and len(sane) >= _LEAST_TRIMMED - 1
        ):
            # Only where it is trimmed off again: nothing can be averaged with infinity.
            sane.append(math.inf)
        averages[measure] = (
            trimmed_mean(sane, 1 if len(sane) >= _LEAST_TRIMMED else 0)
            if complete
            else None
        )
    return averages


@dataclass(frozen=True)
class Comparison:
    """A result against the baseline; a ratio above 1 means it is better (faster, or with fewer
    samples).
    """

    baseline: Result
    other: Result

    @functools.cached_property
    def means(self) -> dict[str, tuple[Mean, Mean]]:
        """(other, baseline) of each measure that both have."""
        pairs = {}
        others, bases = means(self.other), means(self.baseline)
        for name in MEASURES:
            other, base = others[name], bases[name]
            if other and base and other.value > 0 and base.value > 0:
                pairs[name] = (other, base)
        return pairs

    @functools.cached_property
    def ratios(self) -> dict[str, Ratio]:
        ratios = {}
        enough = (
            min(len(self.baseline.scored.counted), len(self.other.scored.counted))
            >= _LEAST_TRIMMED
        )
        for measure, (other, baseline) in self.means.items():
            # Above 1 is better in every measure, so times and samples are inverted.
            measured = (
                ratio(other, baseline)
                if measure in _MORE_IS_BETTER
                else ratio(baseline, other)
            )
            ratios[measure] = measured if enough else Ratio(value=measured.value)
        return ratios

    @functools.cached_property
    def unlike(self) -> list[str]:
        """Task properties in which the results differ, so that their times are not comparable."""
        first, second = _task(self.baseline), _task(self.other)
        # What one of them has not recorded is not called different.
        return [
            name for name in first if name in second and first[name] != second[name]
        ]

    def verdict(self) -> str:
        time = self.ratios.get("time")
        if time is None:
            return "no times to compare"
        # Ratios are turned so that above 1 is better.
        word = "faster" if time.value >= 1 else "slower"
        factor = max(time.value, 1 / time.value)
        much = f"{factor:.1f} times" if factor >= 2 else f"{100 * (factor - 1):.1f}%"
        faster = f"{much} {word}"
        if self.unlike:
            return f"not comparable, they differ in {', '.join(self.unlike)}: nominally {faster}"
        if time.p is None:
            least = f"at least {_LEAST_TRIMMED} each are needed"
            return f"{faster}; too few runs to tell whether by chance, {least}"
        if time.significant:
            return f"{faster}, significant at 5% (p = {time.p:.2g})"
        return f"no significant difference in time: {faster}, p = {time.p:.2g}"


def _task(result: Result) -> dict[str, Any]:
    """What was trained and to which target, from the logs and, for runs of this repository,
    config.json.
    """
    known: dict[str, Any] = {"division": result.division, "target": result.target}
    known["departures from the benchmark"] = result.departures
    # The same data set for everybody, whatever its path.
    if result.division == "closed" and not result.departures:
        return known
    run = next((run for run in result.runs if run.log.events), None)
    for key in ("submission_benchmark", "eval_samples", "max_sequence_length"):
        value = run.log.value(key) if run else None
        known |= {} if value is None else {key: text(value)}
    for section, names in _SETTINGS.items():
        values = read_json(result.folder / "config.json", section)
        known |= {
            f"{section}.{name}": text(values[name]) for name in names if name in values
        }
    return known


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Every later result against the first. Raises ReviewError if there are fewer than two."""
    if len(results) < 2:
        raise ReviewError(
            "compare needs at least two results: give two folders of logs, or a folder above them"
        )
    return [Comparison(results[0], result) for result in results[1:]]


def differing_hyperparameters(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Logged hyper-parameters that differ between the results' first logs."""
    # One log stands for its result: `check` reports runs that differ among themselves.
    logged = [
        result.runs[0].hyperparameters if result.runs else {} for result in results
    ]
    differing = {}
    for key in HYPERPARAMETERS:
        values = [hyperparameters.get(key) for hyperparameters in logged]
        if any(value != values[0] for value in values):
            differing[key] = values
    return differing


def _results(verdicts: Sequence[Verdict]) -> list[Result]:
    return [verdict.result for verdict in verdicts if verdict.result]


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    results = _results(verdicts)
    names, described, comparisons = _names(results), [], []
    for name, verdict, result in zip(names, verdicts, results, strict=True):
        values = {
            measure: mean and mean.value for measure, mean in means(result).items()
        }
        described.append({**result_as_dict(verdict), "name": name, "means": values})
    for name, comparison in zip(names[1:], compare(results), strict=True):
        outcome = {
            "verdict": comparison.verdict(),
            "unlike": comparison.unlike,
            "ratios": comparison.ratios,
        }
        comparisons.append({"name": name, "baseline": names[0], **outcome})
    differing = differing_hyperparameters(results)
    return {
        "results": described,
        "comparisons": comparisons,
        "differing_hyperparameters": differing,
    }


def _names(results: Sequence[Result]) -> list[str]:
    """Names of the results, with the folder if two share a name."""
    names = [text(result.name) for result in results]
    pairs = zip(names, results, strict=True)
    return [
        f"{name} ({result.folder})" if names.count(name) > 1 else name
        for name, result in pairs
    ]


def parts(verdicts: Sequence[Verdict]) -> list[Part]:
    """The results, a table of their figures, and the comparison of each with the first."""
    results = _results(verdicts)
    names, comparisons = _names(results), compare(results)
    # Numbers head the columns; names of systems are too long for that.
    heads = [f"[{number}]" for number in range(1, len(results) + 1)]
    columns = [Column("", wraps=True)]
    columns += [Column(head, right=True, wraps=True) for head in heads]
    made: list[Part] = [
        Heading(f"{head} {name}", result.subtitle)
        for head, name, result in zip(heads, names, results, strict=True)
    ]
    for head, verdict in zip(heads, verdicts, strict=True):
        if verdict.obstacles:
            more = len(verdict.obstacles) - 1
            words = f"unofficial: {verdict.obstacles[0]}"
            words += f" (+{more} more)" if more else ""
            made.append(Line(head, words, "yellow"))
    made.append(Table(columns, _figures(results)))
    for name, comparison in zip(names[1:], comparisons, strict=True):
        made += [
            Heading(f"{name} against {names[0]}"),
            _ratios(comparison),
            Line("verdict", comparison.verdict()),
        ]
    if differing := differing_hyperparameters(results):
        logged = [
            [key, *("-" if value is None else text(value) for value in values)]
            for key, values in differing.items()
        ]
        made += [Heading("hyper-parameters that differ"), Table(columns, logged)]
    return made


def _figures(results: Sequence[Result]) -> list[list[str]]:
    measured = [means(result) for result in results]

    def row(label: str, cell: Callable[[Result], str]) -> list[str]:
        return [label, *map(cell, results)]

    def measure_row(measure: str, shown: Callable[[float | None], str]) -> list[str]:
        values = (averages[measure] for averages in measured)
        return [
            MEASURES[measure],
            *(shown(mean.value if mean else None) for mean in values),
        ]

    def rcp_test(result: Result) -> str:
        return (
            "-"
            if result.rcp_test is None
            else "passed"
            if result.rcp_test.passed
            else "failed"
        )

    rows = [
        row(
            "runs that count",
            lambda result: f"{len(result.scored.counted)} of {len(result.runs)}",
        ),
        row(
            "score, minutes, unverified",
            lambda result: number_text(result.score, ",.4f"),
        ),
        row("median minutes", lambda result: number_text(result.scored.median, ",.4f")),
        row("scaling factor", lambda result: f"{result.scaling_factor:.6f}"),
        row("RCP test", rcp_test),
        measure_row("normalized_time", lambda value: number_text(value, ",.4f")),
        measure_row("samples", lambda value: number_text(value, ",.0f")),
    ]
    if any(result.energy for result in results):
        joules = [result.energy.joules if result.energy else None for result in results]
        rows.append(
            [
                "energy, kJ",
                *(number_text(value and value / 1000, ",.1f") for value in joules),
            ]
        )
    return rows + [measure_row(measure, rate_text) for measure in _MORE_IS_BETTER]


def _ratios(comparison: Comparison) -> Table:
    from rich.text import Text

    headings = [Column("", wraps=True)]
    headings += [
        Column(heading, right=True) for heading in ("speed-up", "95% interval", "p")
    ]
    rows = []
    for measure, against in comparison.ratios.items():
        style = (
            "" if not against.significant else "green" if against.value > 1 else "red"
        )
        interval = (
            "-" if against.low is None else f"{against.low:.4f} to {against.high:.4f}"
        )
        cells = [f"{against.value:.4f}", interval, number_text(against.p, ".2g")]
        rows.append([MEASURES[measure], *(Text(cell, style) for cell in cells)])
    return Table(headings, rows)
