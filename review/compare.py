"""`compare`: results side by side, and whether each differs significantly from the first.

Each measure has its ratio, a 95% confidence interval and a test of trimmed means, such as the
olympic mean of the score; a failed run counts as infinitely slow and needs no special case:
- time to the target, the basis of the score: minutes of each run times the scaling factor, the
  fastest and the slowest dropped;
- time at the same convergence: minutes of each run x RCP mean of its batch size / its samples, so
  that a run that happened to converge early does not look fast. The official scaling factor does
  the same in one direction and for the mean only (rcp_checker: RCP mean / mean samples, if above 1);
- throughput: samples per second of each run, over the whole timed span, evaluations included.
If both have power files, the joules of each run are compared as well.
"""

import math
from collections.abc import Sequence
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
    pick,
    rate_text,
)
from review.logs.tree import read_json
from review.results.run import HYPERPARAMETERS, Run
from review.results.score import Result
from review.rulebook.rules import table
from review.verdict.checking import Verdict
from review.verdict.shown import result_as_dict

MEASURES: dict[str, str] = table("measures")
_MORE_IS_BETTER = ("throughput", "throughput_per_accelerator")
_ENERGY = "energy, kJ"
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
    number: int


def trimmed_mean(values: Sequence[float], trim: int = 1) -> Mean:
    """Mean without the ``trim`` smallest and largest values; the trimmed ones may be infinite.

    The squared error is that of K. K. Yuen, "The two-sample trimmed t for unequal population
    variances", Biometrika 61 (1974): SSD_w / (h (h - 1)), with h values averaged and SSD_w the
    squared deviations of the winsorised values; None if h < 2. Raises ValueError if no finite value
    is left.
    """
    ordered = sorted(values)
    # Infinite times sort last, so trimming takes a failed run first.
    remaining = ordered[trim : len(ordered) - trim]
    if not remaining or not all(map(math.isfinite, remaining)):
        raise ValueError("nothing to average")
    h = len(remaining)
    mean = math.fsum(remaining) / h
    winsorised = [remaining[0]] * trim + remaining + [remaining[-1]] * trim
    center = math.fsum(winsorised) / len(winsorised)
    squares = math.fsum((value - center) ** 2 for value in winsorised)
    error2 = squares / (h * (h - 1)) if h > 1 else None
    return Mean(value=mean, error2=error2, number=h)


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
    spread = a * a / (above.number - 1) + b * b / (below.number - 1)
    dof = (a + b) ** 2 / spread
    error = math.sqrt(a + b)
    p = 2 * float(stdtr(dof, -abs(math.log(value)) / error))
    reach = float(stdtrit(dof, (1 + LEVEL) / 2)) * error
    if reach > _LARGEST_REACH:
        return Ratio(value=value, p=p)
    low, high = (value * math.exp(side * reach) for side in (-1, 1))
    return Ratio(value=value, low=low, high=high, p=p)


def _measured(result: Result, run: Run) -> dict[str, float | None]:
    rate, point = run.sequences_per_second, result.rcp_point
    joules, factor = result.joules(run), result.scaling_factor
    return {
        "time": run.minutes and run.minutes * factor,
        "normalized_time": point.minutes(rate) if point and rate else None,
        "throughput": rate,
        "throughput_per_accelerator": result.rate_per_accelerator(run),
        "samples": run.samples,
        "energy": joules and joules * factor,
    }


def means(result: Result) -> dict[str, Mean | None]:
    """Mean of each measure over the valid runs; None if a log lacks it.

    From four runs on, the fastest and the slowest are dropped; a failed run is the slowest.
    """
    every = [_measured(result, run) for run in result.olympic.valid]
    averages: dict[str, Mean | None] = {}
    for measure in MEASURES:
        values = (one[measure] or 0.0 for one in every)
        sane = [value for value in values if 1 / _LARGEST < value < _LARGEST]
        # A mean over some of the runs would be of another set than the others.
        complete = bool(sane) and len(sane) == len(every)
        # The failed run is the slowest, where it is trimmed off again: nothing can be averaged with
        # infinity. Its samples and its rate say nothing.
        failed = measure in ("time", "energy") and result.olympic.failed == 1
        if failed and len(sane) >= _LEAST_TRIMMED - 1:
            sane.append(math.inf)
        trim = int(len(sane) >= _LEAST_TRIMMED)
        averages[measure] = trimmed_mean(sane, trim) if complete else None
    return averages


@dataclass(frozen=True)
class Comparison:
    """A result against the baseline. ``ratios``: by measure, above 1 if it is better (faster, or
    with fewer samples). ``unlike``: properties of the task in which they differ, so that their
    times are not comparable.
    """

    ratios: dict[str, Ratio]
    unlike: list[str]

    def verdict(self) -> str:
        time = self.ratios.get("time")
        if time is None:
            return "no times to compare"
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


def _compared(baseline: Result, other: Result) -> Comparison:
    ratios, others, bases = {}, means(other), means(baseline)
    least = min(len(result.olympic.valid) for result in (baseline, other))
    for measure in MEASURES:
        better, worse = others[measure], bases[measure]
        # Above 1 is better in every measure, so times and samples are inverted.
        if measure not in _MORE_IS_BETTER:
            better, worse = worse, better
        if better and worse:
            found = ratio(better, worse)
            few = least < _LEAST_TRIMMED
            ratios[measure] = Ratio(value=found.value) if few else found
    first, second = _task(baseline), _task(other)
    # What one of them has not recorded is not called different.
    both = [name for name in first if name in second]
    return Comparison(ratios, [name for name in both if first[name] != second[name]])


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
        how = "give two folders of logs, or a folder above them"
        raise ReviewError(f"compare needs at least two results: {how}")
    return [_compared(results[0], result) for result in results[1:]]


def differing_hyperparameters(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Logged hyper-parameters that differ between the results' first logs."""
    # One log stands for its result: `check` reports runs that differ among themselves.
    logged = [one.runs[0].hyperparameters if one.runs else {} for one in results]
    rows = {key: [known.get(key) for known in logged] for key in HYPERPARAMETERS}
    return {key: row for key, row in rows.items() if any(v != row[0] for v in row)}


def _results(verdicts: Sequence[Verdict]) -> list[Result]:
    return [verdict.result for verdict in verdicts if verdict.result]


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    results = _results(verdicts)
    names, described, comparisons = _names(results), [], []
    for name, verdict, result in zip(names, verdicts, results, strict=True):
        about = {"name": name, "means": _values(result)}
        described.append(result_as_dict(verdict) | about)
    for name, comparison in zip(names[1:], compare(results), strict=True):
        about = {"name": name, "baseline": names[0], "verdict": comparison.verdict()}
        comparisons.append({**about, **pick(comparison, "unlike ratios")})
    return {
        "results": described,
        "comparisons": comparisons,
        "differing_hyperparameters": differing_hyperparameters(results),
    }


def _values(result: Result) -> dict[str, float | None]:
    return {name: mean.value if mean else None for name, mean in means(result).items()}


def _names(results: Sequence[Result]) -> list[str]:
    """Names of the results, with the folder if two share a name."""
    names = [text(result.name) for result in results]
    return [
        f"{name} ({result.folder})" if names.count(name) > 1 else name
        for name, result in zip(names, results, strict=True)
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
            message = f"unofficial: {verdict.obstacles[0]}"
            message += f" (+{more} more)" if more else ""
            made.append(Line(head, message, "yellow"))
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
    """A row for each figure."""
    found = [_cells(result) for result in results]
    rows = [[label, *(cells[label] for cells in found)] for label in found[0]]
    measured = any(result.energy for result in results)
    return [row for row in rows if measured or row[0] != _ENERGY]


def _cells(result: Result) -> dict[str, str]:
    values, test, energy = _values(result), result.rcp_test, result.energy
    kilojoules = energy.joules / 1000 if energy and energy.joules else None
    normalized, samples = "normalized_time", "samples"
    return {
        "runs that count": f"{len(result.olympic.valid)} of {len(result.runs)}",
        "score, minutes, unverified": number_text(result.score, ",.4f"),
        "median minutes": number_text(result.olympic.median, ",.4f"),
        "scaling factor": f"{result.scaling_factor:.6f}",
        "RCP test": "-" if test is None else "passed" if test.passed else "failed",
        MEASURES[normalized]: number_text(values[normalized], ",.4f"),
        MEASURES[samples]: number_text(values[samples], ",.0f"),
        _ENERGY: number_text(kilojoules, ",.1f"),
        **{MEASURES[name]: rate_text(values[name]) for name in _MORE_IS_BETTER},
    }


def _ratios(comparison: Comparison) -> Table:
    from rich.text import Text

    names = ("speed-up", "95% interval", "p")
    rows = []
    for measure, found in comparison.ratios.items():
        colour = "green" if found.value > 1 else "red"
        style = colour if found.significant else ""
        known = found.low is not None
        interval = f"{found.low:.4f} to {found.high:.4f}" if known else "-"
        cells = (f"{found.value:.4f}", interval, number_text(found.p, ".2g"))
        rows.append([MEASURES[measure], *(Text(cell, style) for cell in cells)])
    columns = [Column("", wraps=True), *(Column(name, right=True) for name in names)]
    return Table(columns, rows)
