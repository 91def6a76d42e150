"""`compare`: results side by side, and how sure it is that one is faster than the first.

Three questions, each with its ratio, a 95% confidence interval and a test (review.stats):
- time to the target, what the score is made of: minutes of each run times the scaling factor, best and worst left out;
- time at the same convergence: minutes of each run x RCP mean of its batch size / its samples, so that a run that
  happened to converge early does not look fast. The official scaling factor does the same in one direction and for the
  mean only (rcp_checker: RCP mean / mean samples, where that is above 1);
- throughput: samples a second of each run, over the whole clock, evaluations included.
Where both have power files, the joules of each run are compared as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from review.logs.mllog import text
from review.logs.output import (
    Column,
    ReviewError,
    console,
    labelled,
    markdown_table,
    markdown_text,
    number_text,
    rate_text,
    say,
    table,
)
from review.logs.tree import read_json
from review.results.run import HYPERPARAMETERS, Run
from review.results.score import Result
from review.rulebook.stats import Mean, Ratio, ratio, trimmed_mean
from review.verdict import checking

MEASURES = {
    "time": "time to target",
    "normalized_time": "time at the RCP's samples",
    "throughput": "samples a second",
    "throughput_per_accelerator": "samples a second and accelerator",
    "samples": "samples to target",
    "energy": "joules to target",
}
_RATIO_HEADINGS = ("speed-up", "95% interval", "p")
_MORE_IS_BETTER = ("throughput", "throughput_per_accelerator")
_LARGEST = 1e100  # of any measure; squares of it can be computed with
_LEAST_TRIMMED = 4  # runs; of fewer, none is left out, and nothing is claimed
_SETTINGS = {  # of config.json: what trains and what is evaluated
    "data": ("synthetic", "datadir", "datadir_packed"),
    "evaluate": ("evaldir", "num_examples"),
    "model": ("vocab_size", "hidden_size", "num_hidden_layers"),
}


@dataclass(frozen=True)
class Sample:
    """A result as the statistics see it: one value a run for each measure, None where the logs do not have it."""

    result: Result

    def values(self, measure: str) -> list[float] | None:
        """One value a run that counts; a failed one is only counted."""
        values = [self._value(run, measure) for run in self.result.counted]
        sane = [value for value in values if value is not None and 0 < value < _LARGEST]
        return sane if sane and len(sane) == len(values) else None

    def _value(self, run: Run, measure: str) -> float | None:
        result, rate = self.result, run.sequences_per_second
        if measure in ("time", "energy"):
            value = run.minutes if measure == "time" else result.joules(run)
            return None if value is None else value * result.scaling_factor
        if measure == "samples":
            return run.samples
        if measure == "throughput_per_accelerator":
            return rate / result.accelerators if rate and result.accelerators else None
        if measure == "normalized_time":
            return result.rcp_point.mean / rate / 60 if rate and result.rcp_point else None
        return rate

    @functools.cached_property
    def means(self) -> dict[str, Mean | None]:
        """The mean of each measure; without best and worst where there are enough runs. A failed run is the worst."""
        found: dict[str, Mean | None] = {}
        for measure in MEASURES:
            values = self.values(measure)
            if values and measure in ("time", "energy") and self.result.failed_runs == 1:
                values += [math.inf] if len(values) >= _LEAST_TRIMMED - 1 else []
            trim = 1 if values and len(values) >= _LEAST_TRIMMED else 0
            found[measure] = None if values is None else trimmed_mean(values, trim)
        return found

    def mean(self, measure: str) -> float | None:
        """The value of a mean."""
        found = self.means[measure]
        return None if found is None else found.value


@dataclass(frozen=True)
class Comparison:
    """A result against the baseline; ratios above 1 say that it is faster (of samples: that it needs fewer)."""

    baseline: Sample
    other: Sample

    @functools.cached_property
    def ratios(self) -> dict[str, Ratio]:
        """Of each measure that both have."""
        found = {}
        for measure in MEASURES:
            first, second = self.baseline.means[measure], self.other.means[measure]
            if first is None or second is None or not first.value > 0 or not second.value > 0:
                continue
            one = ratio(second, first) if measure in _MORE_IS_BETTER else ratio(first, second)
            found[measure] = one if self.enough else Ratio(value=one.value)
        return found

    @property
    def enough(self) -> bool:
        """Whether both sides have the runs that a test of them takes."""
        return min(len(self.baseline.result.counted), len(self.other.result.counted)) >= _LEAST_TRIMMED

    @functools.cached_property
    def unlike(self) -> list[str]:
        """What the two results do not share, though a comparison of their times takes it for granted."""
        first, second = _task(self.baseline.result), _task(self.other.result)
        return [name for name in first if name in second and first[name] != second[name]]

    def verdict(self) -> str:
        """One sentence."""
        found = self.ratios.get("time")
        if found is None:
            return "no times to compare"
        if self.unlike:
            return f"not comparable, since they differ in {', '.join(self.unlike)}: {_faster(found.value)} as it stands"
        if found.p is None:
            return f"{_faster(found.value)}; too few runs to say more, {_LEAST_TRIMMED} a side are the least"
        if found.significant:
            return f"{_faster(found.value)}, significant at 5% (p = {found.p:.2g})"
        return f"no significant difference in time: {_faster(found.value)}, p = {found.p:.2g}"


def _task(result: Result) -> dict[str, Any]:
    """What was trained to what: facts of the logs and, of this repository's runs, of config.json."""
    known: dict[str, Any] = {"division": result.division, "target": result.target}
    if result.division == "closed":  # one data set for all, wherever a site keeps it
        return known
    run = next((run for run in result.runs if run.log.events), None)
    for key in ("submission_benchmark", "eval_samples", "max_sequence_length"):
        value = run.log.value(key) if run else None
        known |= {} if value is None else {key: text(value)}
    settings = read_json(result.folder / "config.json") or {}
    for section, names in _SETTINGS.items():
        values = settings.get(section) or {}
        if isinstance(values, dict):
            known |= {f"{section}.{name}": text(values[name]) for name in names if name in values}
    if settings.get("phase1"):
        known["vocabulary"] = text(settings["phase1"])
    return known


def _faster(value: float) -> str:
    word, factor = ("faster", value) if value >= 1 else ("slower", 1 / value)
    return f"{factor:.1f} times {word}" if factor >= 2 else f"{100 * (factor - 1):.1f}% {word}"


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Every result after the first against the first. Raises ReviewError for fewer than two."""
    if len(results) < 2:
        raise ReviewError("compare needs two results or more: name two folders of logs, or a folder above them")
    baseline = Sample(results[0])
    return [Comparison(baseline, Sample(result)) for result in results[1:]]


def differing_hyperparameters(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Logged hyper-parameters that differ between the results, by the first log of each."""
    logged = [result.runs[0].hyperparameters if result.runs else {} for result in results]
    found = {}
    for key in HYPERPARAMETERS:
        values = [hyperparameters.get(key) for hyperparameters in logged]
        if any(value != values[0] for value in values):
            found[key] = values
    return found


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """For JSON."""
    names, comparisons = _names(results), compare(results)
    described = []
    for name, result in zip(names, results, strict=True):
        sample = Sample(result)
        means = {measure: sample.mean(measure) for measure in MEASURES}
        described.append({**checking.as_dict(result), "name": name, "means": means})
    return {
        "results": described,
        "comparisons": [
            {
                "name": name,
                "baseline": names[0],
                "verdict": comparison.verdict(),
                "unlike": comparison.unlike,
                "ratios": comparison.ratios,
            }
            for name, comparison in zip(names[1:], comparisons, strict=True)
        ],
        "differing_hyperparameters": differing_hyperparameters(results),
    }


def _names(results: Sequence[Result]) -> list[str]:
    """Names of the results, with their folder where two share one."""
    names = [text(result.name) for result in results]
    return [
        f"{name} ({result.folder})" if names.count(name) > 1 else name
        for name, result in zip(names, results, strict=True)
    ]


def csv_rows(results: Sequence[Result]) -> list[list[Any]]:
    """Headings and a row for each measure of each result, against the first: for a spreadsheet."""
    names = _names(results)
    headings = ["result", "baseline", "measure", "mean", "baseline_mean", "ratio", "low", "high", "p", "significant"]
    rows: list[list[Any]] = [headings]
    for name, comparison in zip(names[1:], compare(results), strict=True):
        for measure, found in comparison.ratios.items():
            means = [comparison.other.mean(measure), comparison.baseline.mean(measure)]
            rows.append(
                [name, names[0], measure, *means, found.value, found.low, found.high, found.p, found.significant]
            )
    return rows


def markdown(results: Sequence[Result]) -> str:
    """The tables and verdicts, for the text of an issue."""
    letters = _letters(results)
    about = [
        f"- **{letter}** {markdown_text(f'{name}: {result.subtitle}')}"
        for letter, name, result in zip(letters, _names(results), results, strict=True)
    ]
    right = [False, *[True] * len(letters)]
    parts = ["\n".join(about), markdown_table([["", *letters], *_result_rows(results)], right)]
    for letter, comparison in zip(letters[1:], compare(results), strict=True):
        parts.append(f"**{letter} against A**: {markdown_text(comparison.verdict())}")
        rows = [_ratio_cells(*one) for one in comparison.ratios.items()]
        parts.append(markdown_table([["", *_RATIO_HEADINGS], *rows], [False, True, True, True]))
    if differing := _hyperparameter_rows(results):
        parts.append(markdown_table([["hyper-parameter", *letters], *differing]))
    return "\n\n".join(parts)


def print_text(results: Sequence[Result]) -> None:
    """Prints the tables on stdout."""
    from rich.text import Text

    out, names, letters, comparisons = console(), _names(results), _letters(results), compare(results)
    columns = [Column("", wraps=True), *(Column(letter, right=True, wraps=True) for letter in letters)]
    for letter, name, result in zip(letters, names, results, strict=True):
        say(out, (f"{letter}  {name}", "bold"))
        say(out, f"   {result.subtitle}")
    out.print(table(columns, _result_rows(results)))
    headings = [Column("", wraps=True), *(Column(heading, right=True) for heading in _RATIO_HEADINGS)]
    for name, comparison in zip(names[1:], comparisons, strict=True):
        say(out, (name, "bold"), " against ", (names[0], "bold"))
        rows = []
        for measure, found in comparison.ratios.items():
            style = "" if not found.significant else "green" if found.value > 1 else "red"
            label, *cells = _ratio_cells(measure, found)
            rows.append([label, *(Text(cell, style) for cell in cells)])
        out.print(table(headings, rows))
        say(out, labelled("verdict", comparison.verdict()))
        out.print()
    if differing := _hyperparameter_rows(results):
        say(out, ("hyper-parameters that differ", "bold"))
        out.print(table(columns, differing))


def _result_rows(results: Sequence[Result]) -> list[list[str]]:
    """The table of the results, a row for each figure."""
    samples = [Sample(result) for result in results]

    def means(measure: str, spec: str) -> list[str]:
        return [number_text(sample.mean(measure), spec) for sample in samples]

    tests = [result.rcp_test for result in results]
    rows = [
        ["runs that count", *(f"{len(result.counted)} of {len(result.runs)}" for result in results)],
        ["score, minutes", *(number_text(result.score, ",.4f") for result in results)],
        ["median minutes", *(number_text(result.median_minutes, ",.4f") for result in results)],
        ["scaling factor", *(f"{result.scaling_factor:.6f}" for result in results)],
        ["RCP test", *("-" if test is None else "passed" if test.passed else "failed" for test in tests)],
        [MEASURES["normalized_time"], *means("normalized_time", ",.4f")],
        [MEASURES["samples"], *means("samples", ",.0f")],
    ]
    if any(result.energy for result in results):
        joules = [result.energy.joules if result.energy else None for result in results]
        rows.append(["energy, kJ", *(number_text(None if one is None else one / 1000, ",.1f") for one in joules)])
    for measure in _MORE_IS_BETTER:
        rows.append([MEASURES[measure], *(rate_text(sample.mean(measure)) for sample in samples)])
    return rows


def _ratio_cells(measure: str, found: Ratio) -> list[str]:
    interval = "-" if found.low is None or found.high is None else f"{found.low:.4f} to {found.high:.4f}"
    return [MEASURES[measure], f"{found.value:.4f}", interval, number_text(found.p, ".2g")]


def _hyperparameter_rows(results: Sequence[Result]) -> list[list[str]]:
    return [
        [key, *("-" if value is None else text(value) for value in values)]
        for key, values in differing_hyperparameters(results).items()
    ]


def _letters(results: Sequence[Result]) -> list[str]:
    return [chr(ord("A") + i) if len(results) <= 26 else str(i + 1) for i in range(len(results))]
