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
from typing import TYPE_CHECKING, Any

from review.logs.mllog import text
from review.logs.output import ReviewError, console, labelled, markdown_table, markdown_text, rate_text
from review.logs.tree import read_json
from review.results.run import HYPERPARAMETERS, Run
from review.results.score import Result
from review.rulebook.stats import Mean, Ratio, ratio, trimmed_mean
from review.verdict.checking import as_dict as as_dict_of

if TYPE_CHECKING:
    from rich.console import Console

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

    @functools.cached_property
    def runs(self) -> list[Run]:
        """Runs with a time that comply; a failed one is only counted."""
        return self.result.counted

    @functools.cached_property
    def rcp_mean(self) -> float | None:
        """Samples of the reference at this batch size."""
        return self.result.rcp_point.mean if self.result.rcp_point else None

    def values(self, measure: str) -> list[float] | None:
        """One value a run that counts."""
        values = [self._value(run, measure) for run in self.runs]
        sane = [value for value in values if value is not None and 0 < value < _LARGEST]
        return sane if sane and len(sane) == len(values) else None

    def _value(self, run: Run, measure: str) -> float | None:
        if measure == "time":
            return None if run.minutes is None else run.minutes * self.result.scaling_factor
        if measure == "samples":
            return run.samples
        if measure == "energy":
            joules = self.result.joules(run)
            return None if joules is None else joules * self.result.scaling_factor
        rate = run.sequences_per_second
        if measure == "throughput_per_accelerator":
            return rate / self.result.accelerators if rate and self.result.accelerators else None
        if measure == "normalized_time":
            return self.rcp_mean / rate / 60 if rate and self.rcp_mean else None
        return rate

    def mean(self, measure: str) -> Mean | None:
        """The mean of a measure; without best and worst where there are enough runs. A failed run is the worst."""
        values = self.values(measure)
        if values is None:
            return None
        worst = 0.0 if measure in _MORE_IS_BETTER else math.inf
        if measure in ("time", "energy") and self.result.failed_runs == 1 and len(values) >= _LEAST_TRIMMED - 1:
            values = [*values, worst]
        return trimmed_mean(values, 1 if len(values) >= _LEAST_TRIMMED else 0)


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
            first, second = self.baseline.mean(measure), self.other.mean(measure)
            if first is None or second is None or not first.value > 0 or not second.value > 0:
                continue
            one = ratio(second, first) if measure in _MORE_IS_BETTER else ratio(first, second)
            found[measure] = one if self.enough else Ratio(value=one.value)
        return found

    @property
    def enough(self) -> bool:
        """Whether both sides have the runs that a test of them takes."""
        return min(len(self.baseline.runs), len(self.other.runs)) >= _LEAST_TRIMMED

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


def as_dict(results: Sequence[Result]) -> dict[str, Any]:
    """For JSON."""
    comparisons = compare(results)
    names = _names(results)
    return {
        "results": [
            {**as_dict_of(result), "name": name, "means": _means(Sample(result))}
            for name, result in zip(names, results, strict=True)
        ],
        "comparisons": [
            {
                "name": name,
                "baseline": names[0],
                "verdict": comparison.verdict(),
                "unlike": comparison.unlike,
                "ratios": dict(comparison.ratios.items()),
            }
            for name, comparison in zip(names[1:], comparisons, strict=True)
        ],
        "differing_hyperparameters": differing_hyperparameters(results),
    }


def _means(sample: Sample) -> dict[str, float | None]:
    means = {measure: sample.mean(measure) for measure in MEASURES}
    return {measure: None if mean is None else mean.value for measure, mean in means.items()}


def _names(results: Sequence[Result]) -> list[str]:
    """Names of the results, with their folder where two share one."""
    names = [text(result.name) for result in results]
    return [
        f"{name} ({result.folder})" if names.count(name) > 1 else name
        for name, result in zip(names, results, strict=True)
    ]


def csv_rows(results: Sequence[Result]) -> list[list[Any]]:
    """Headings and a row for each measure of each result, against the first: for a spreadsheet."""
    names, comparisons = _names(results), compare(results)
    headings = ["result", "baseline", "measure", "mean", "baseline_mean", "ratio", "low", "high", "p", "significant"]
    rows: list[list[Any]] = [headings]
    for name, comparison in zip(names[1:], comparisons, strict=True):
        means, first = _means(comparison.other), _means(comparison.baseline)
        for measure, found in comparison.ratios.items():
            known = [means[measure], first[measure], found.value, found.low, found.high, found.p, found.significant]
            rows.append([name, names[0], measure, *known])
    return rows


def markdown(results: Sequence[Result]) -> str:
    """The tables and verdicts, for the text of an issue."""
    names, comparisons = _names(results), compare(results)
    letters = _letters(len(names))
    about = [
        f"- **{letter}** {markdown_text(f'{name}: {result.subtitle}')}"
        for letter, name, result in zip(letters, names, results, strict=True)
    ]
    rows = [["", *letters], *([label, *cells] for label, cells in _result_rows(results).items())]
    parts = ["\n".join(about), markdown_table(rows, [False, *[True] * len(names)])]
    for letter, comparison in zip(letters[1:], comparisons, strict=True):
        ratios = [[MEASURES[measure], *_ratio_cells(found)] for measure, found in comparison.ratios.items()]
        parts.append(f"**{letter} against A**: {markdown_text(comparison.verdict())}")
        parts.append(markdown_table([["", *_RATIO_HEADINGS], *ratios], [False, True, True, True]))
    differing = differing_hyperparameters(results)
    if differing:
        parts.append(markdown_table([["hyper-parameter", *letters], *_hyperparameter_rows(differing)]))
    return "\n\n".join(parts)


def print_comparison(results: Sequence[Result]) -> None:
    """Prints the tables on stdout."""
    comparisons = compare(results)
    out, names = console(), _names(results)
    _print_results(results, names, out)
    for name, comparison in zip(names[1:], comparisons, strict=True):
        _print_one(name, names[0], comparison, out)
    differing = differing_hyperparameters(results)
    if differing:
        _print_hyperparameters(differing, out)


def _print_results(results: Sequence[Result], names: Sequence[str], out: Console) -> None:
    from rich.text import Text

    for letter, name, result in zip(_letters(len(names)), names, results, strict=True):
        out.print(Text.assemble((f"{letter}  {name}", "bold")), soft_wrap=True)
        out.print(Text(f"   {result.subtitle}"), soft_wrap=True)
    _print_table(_result_rows(results), out)


def _result_rows(results: Sequence[Result]) -> dict[str, list[str]]:
    rows = {
        "runs that count": [f"{len(result.counted)} of {len(result.runs)}" for result in results],
        "score, minutes": [_number(result.score, ",.4f") for result in results],
        "median minutes": [_number(result.median_minutes, ",.4f") for result in results],
        "scaling factor": [f"{result.scaling_factor:.6f}" for result in results],
        "RCP test": [_rcp(result) for result in results],
    }
    for measure, form in (("normalized_time", ",.4f"), ("samples", ",.0f")):
        rows[MEASURES[measure]] = [_number(_means(Sample(result))[measure], form) for result in results]
    if any(result.energy for result in results):
        joules = [result.energy.joules if result.energy else None for result in results]
        rows["energy, kJ"] = [_number(None if value is None else value / 1000, ",.1f") for value in joules]
    for measure in _MORE_IS_BETTER:
        rates = [_means(Sample(result))[measure] for result in results]
        rows[MEASURES[measure]] = [rate_text(rate) for rate in rates]
    return rows


def _rcp(result: Result) -> str:
    return "-" if result.rcp_test is None else "passed" if result.rcp_test.passed else "failed"


def _letters(count: int) -> list[str]:
    return [chr(ord("A") + i) if count <= 26 else str(i + 1) for i in range(count)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_table(rows: dict[str, list[str]], out: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for letter in _letters(len(next(iter(rows.values())))):
        table.add_column(letter, justify="right", overflow="fold")
    for label, cells in rows.items():
        table.add_row(Text(label), *map(Text, cells))
    out.print(table)


def _print_one(name: str, baseline: str, comparison: Comparison, out: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out.print(Text.assemble((name, "bold"), " against ", (baseline, "bold")), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for heading in _RATIO_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for measure, found in comparison.ratios.items():
        style = "" if not found.significant else "green" if found.value > 1 else "red"
        table.add_row(Text(MEASURES[measure]), *(Text(cell, style) for cell in _ratio_cells(found)))
    out.print(table)
    out.print(labelled("verdict", comparison.verdict()), soft_wrap=True)
    out.print()


def _ratio_cells(found: Ratio) -> list[str]:
    interval = "-" if found.low is None or found.high is None else f"{found.low:.4f} to {found.high:.4f}"
    return [f"{found.value:.4f}", interval, "-" if found.p is None else f"{found.p:.2g}"]


def _hyperparameter_rows(differing: dict[str, list[Any]]) -> list[list[str]]:
    return [[key, *("-" if value is None else text(value) for value in values)] for key, values in differing.items()]


def _print_hyperparameters(differing: dict[str, list[Any]], out: Console) -> None:
    from rich.text import Text

    out.print(Text("hyper-parameters that differ", "bold"))
    _print_table({key: cells for key, *cells in _hyperparameter_rows(differing)}, out)
