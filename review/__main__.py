"""`python -m review COMMAND`: exit code 0 is a pass, 1 a failed check, 2 wrong usage."""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from common.process import status_of
from common.tables import read_table
from review import compare, show, watch
from review.acceptance.commands import certify
from review.league import entries, page, ranking
from review.logs.output import Heading, ReviewError, csv_text, emit, pick, write_whole
from review.logs.tree import read_object
from review.report.page import write_report
from review.results import published_curves
from review.results.score import UNVERIFIED, Result, load_results
from review.rulebook import rcp
from review.rulebook.compliance import DEFAULT_RULESET, rulesets
from review.rulebook.rules import finding_ids
from review.submission import system
from review.submission.package import package
from review.verdict import shown
from review.verdict.checking import Verdict, check, judge


def _judged(target: Path, arguments: argparse.Namespace) -> list[Verdict]:
    """Verdicts on the BERT results."""
    # Not every command has the option.
    option = getattr(arguments, "train_samples", False)
    results = load_results(target, arguments.ruleset, option)
    return [judge(result) for result in _of_bert(target, results)]


def _of_bert(target: Path, results: Sequence[Result]) -> list[Result]:
    """BERT results; others are skipped with a message. Raises ReviewError if there are only
    others.
    """
    # A submission holds a folder for each of its benchmarks.
    others = [result.other_benchmark for result in results if result.other_benchmark]
    named = ", ".join(sorted(set(others)))
    if results and len(others) == len(results):
        raise ReviewError(f"{target}: no BERT results, only {named}")
    if others:
        print(
            f"review: skipped in {target}: {len(others)} results of other benchmarks ({named})",
            file=sys.stderr,
        )
    return [result for result in results if not result.other_benchmark]


def _checked(arguments: argparse.Namespace) -> list[Verdict]:
    """What `check` and `report` show, without what the user ignores."""
    known, ids = finding_ids(), arguments.ignore
    for name in ids:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known)) or "docs/review.md"
            raise ReviewError(f"--ignore {name}: no finding has this id; see {near}")
    given = (arguments.ruleset, arguments.train_samples)
    targets: list[Path] = arguments.target
    return [one.ignoring(ids) for target in targets for one in check(target, *given)]


def _tables(module: ModuleType, arguments: argparse.Namespace) -> int:
    """`show` and `compare`, which differ in the module that formats the results."""
    verdicts = [
        verdict for target in arguments.target for verdict in _judged(target, arguments)
    ]
    if getattr(arguments, "csv", False):
        print(csv_text(show.csv_rows(verdicts)), end="")
        return 0
    emit(
        arguments,
        json=lambda: module.as_json(verdicts),
        parts=lambda: module.parts(verdicts),
    )
    return 0


def _check(arguments: argparse.Namespace) -> int:
    checked = _checked(arguments)
    passed = all(result.passed(arguments.strict) for result in checked)
    emit(
        arguments,
        json=lambda: {"passed": passed, "checked": checked},
        parts=lambda: shown.parts(checked, arguments.strict),
    )
    return 0 if passed else 1


def _report(arguments: argparse.Namespace) -> int:
    every = _checked(arguments)
    _of_bert(arguments.target[0], [one.result for one in every if one.result])
    checked = [one for one in every if not (one.result and one.result.other_benchmark)]
    write_report(checked, arguments.output)
    passed = all(verdict.passed() for verdict in checked)
    emit(
        arguments,
        json=lambda: {"passed": passed, "files": [arguments.output]},
        text=lambda: print(arguments.output),
    )
    return 0


def _league(arguments: argparse.Namespace) -> int:
    if not arguments.target and not arguments.published:
        raise ReviewError("league needs a folder of results, --published, or both")
    if arguments.top < 0:
        raise ReviewError(f"--top must be 0 or more, got {arguments.top}")
    own_entries = [
        entries.entry_of(verdict, "yours", target)
        for target in arguments.target
        for verdict in _judged(target, arguments)
    ]
    # Without --round every round counts: an entry is then looked for in its own.
    others = [
        entry
        for entry in (entries.published() if arguments.published else ())
        if entry.round in (arguments.round or [entry.round])
        and arguments.division in (None, entry.division)
        and arguments.accelerator.casefold() in entry.accelerator.casefold()
        and arguments.accelerators in (None, entry.accelerators)
    ]
    league = ranking.League.of(own_entries, others, arguments.by)
    if arguments.output is not None:
        write_whole(arguments.output, page.build_page(league))
    if arguments.svg is not None:
        page.write_picture(league, arguments.svg)
    # --top 0 shows all.
    top = arguments.top or None
    emit(arguments, json=lambda: league, parts=lambda: ranking.parts(league, top))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    interval = arguments.interval
    # In this form, as nan is not above 0 either.
    if not interval > 0:
        raise ReviewError(f"--interval must be above 0 s, got {interval}")
    # One target is followed by its newest log, several as they are.
    targets: list[Path] = arguments.target
    newest = not arguments.all and len(targets) == 1
    runs = watch.Runs(targets, arguments.ruleset, newest)
    return watch.watch(runs, interval, as_json=arguments.json, once=arguments.once)


def _rcp(arguments: argparse.Namespace) -> int:
    batch_size = arguments.batch_size
    if batch_size < 1:
        raise ReviewError(f"batch size must be at least 1, got {batch_size}")
    point, reason = rcp.find(batch_size, arguments.ruleset)
    known = pick(point, "mean std minimum") if point else {}
    emit(
        arguments,
        json=lambda: {"batch_size": batch_size, "reason": reason, **known},
        text=lambda: print(point.describe(batch_size) if point else reason),
    )
    return 0 if point else 1


def _rehearsal(arguments: argparse.Namespace) -> int:
    rehearsal = published_curves.rehearsal(arguments.target)
    emit(
        arguments,
        json=lambda: rehearsal,
        text=lambda: published_curves.print_rehearsal(rehearsal),
    )
    return 0 if rehearsal.go else 1


def _system(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    if output.exists() and not arguments.update:
        raise ReviewError(f"{output} exists: --update fills in its blank fields")
    # By priority: what the user says, then the file being updated, then the run.
    given: list[tuple[str, dict[str, Any]]] = [
        ("--set", system.parse_settings(arguments.set))
    ]
    if arguments.answers:
        answers = system.known(
            read_object(arguments.answers, _FIELDS), arguments.answers
        )
        given.append((str(arguments.answers), answers))
    if output.exists():
        given.append((str(output), read_object(output, _FIELDS)))
    if arguments.run_folder:
        given.append((str(arguments.run_folder), system.from_run(arguments.run_folder)))
    described = system.describe(given, system.Machine())
    system.write(described, output)
    answer = {
        "file": output,
        "blank": described.blanks,
        "fields": described.fields,
        "sources": described.sources,
    }
    emit(arguments, json=lambda: answer, text=lambda: print(output))
    if described.blanks and not arguments.json:
        blank = ", ".join(described.blanks)
        how = "fill them in with --update and --set FIELD=VALUE, or edit the file"
        print(
            f"still blank, but required by the rules: {blank}\n{how}", file=sys.stderr
        )
    return 0


def _package(arguments: argparse.Namespace) -> int:
    made = package(arguments)
    files = ["nothing written"]
    if made.files:
        files = [*map(str, made.files), f"the result is {UNVERIFIED}"]
    emit(
        arguments,
        json=lambda: made,
        parts=lambda: [*shown.parts(made.checked), *map(Heading, files)],
    )
    return 0 if made.passed else 1


_TYPES = {"path": Path, "int": int, "float": float}
_FIELDS = 'such as {"cooling": "air", ...}'
# Names as in commands.yaml.
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": partial(_tables, show),
    "check": _check,
    "compare": partial(_tables, compare),
    "watch": _watch,
    "rcp": _rcp,
    "rehearsal": _rehearsal,
    "certify": certify,
    "league": _league,
    "report": _report,
    "system": _system,
    "package": _package,
}


def parser() -> argparse.ArgumentParser:
    """The command line that commands.yaml describes."""
    top = argparse.ArgumentParser(
        prog="python -m review", description="Review MLPerf BERT results."
    )
    options_of = read_table(__file__, "commands.yaml")

    def add_options(made: Any, options: dict[str, Any]) -> None:
        for flags, how in options.items():
            # Options that several commands share stand once in commands.yaml.
            if how == "included":
                add_options(made, options_of["shared"][flags])
            elif flags == "at most one":
                add_options(made.add_mutually_exclusive_group(), how)
            else:
                types = {"type": _TYPES[how["type"]]} if "type" in how else {}
                made.add_argument(*flags.split(), **how | types)

    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in options_of["commands"].items():
        made = commands.add_parser(name, help=about["help"])
        add_options(made, about["options"])
        made.set_defaults(run=_COMMANDS[name], ruleset=DEFAULT_RULESET)
    return top


def main(argv: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal without UTF-8 gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        arguments = parser().parse_args(argv)
        # The default is not looked up, so that commands without rules work without mlperf_logging.
        if arguments.ruleset != DEFAULT_RULESET and arguments.ruleset not in rulesets():
            known = ", ".join(rulesets())
            why = f"unknown or without BERT; choose {known}"
            raise ReviewError(f"--ruleset {arguments.ruleset}: {why}")
        return int(arguments.run(arguments))
    except ReviewError as error:
        print(f"review: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # As a shell reports a process that an interrupt has ended.
        return 130


if __name__ == "__main__":
    sys.exit(status_of(main))
