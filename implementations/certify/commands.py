"""The commands `certify` and `baseline` of `python -m review`. What they need is imported when one runs."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certify.reasons import EXIT
from review.logs.output import ReviewError, emit, write_whole


def add(commands: Any, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds both. common: adds the options of all commands."""
    one = commands.add_parser("certify", help="an acceptance test of certify.sh: what is slow, pass or fail")
    one.add_argument("target", type=Path, help="the folder that certify.sh or certify.sub named")
    one.add_argument("other", type=Path, nargs="?", help="that of a second test: shows both beside each other")
    one.add_argument("-o", "--output", type=Path, metavar="PAGE", help="write the page as well: certify.html")
    one.add_argument("--csv", type=Path, metavar="FILE", help="write ranks and nodes, the slowest first, as well")
    one.add_argument("--line", action="store_true", help="print the verdict in one line, with what drains a bad node")
    one.add_argument("--expected", action="store_true", help="print the figures for a config, without a verdict")
    one.add_argument("--expect", type=Path, metavar="FILE", help="write a node's parts for EXPECTED_INVENTORY as well")
    common(one)
    one.set_defaults(run=_certify)

    baseline = commands.add_parser("baseline", help="figures of an acceptance test by name, to hold later ones to")
    actions = baseline.add_subparsers(dest="action", required=True, metavar="save|check|drift")
    save = actions.add_parser("save", help="keep the figures of a test as FOLDER/NAME.json")
    save.add_argument("target", type=Path, help="the folder of the test")
    save.add_argument("--name", required=True, help="such as P8000-2026-11")
    save.add_argument("--force", action="store_true", help="keep those of a test that failed, too")
    check = actions.add_parser("check", help="is a test as fast as a baseline? exit status 0 pass, 3 warn, 1 fail")
    check.add_argument("target", type=Path, help="the folder of the test")
    check.add_argument("--name", help="the baseline; unset: the newest of the same devices, model and batch")
    drift = actions.add_parser("drift", help="a chart of the figures over all baselines, as a page")
    drift.add_argument("-o", "--output", type=Path, default=Path("drift.html"), help="default %(default)s")
    for action, run in ((save, _save), (check, _check), (drift, _drift)):
        action.add_argument("--folder", type=Path, default=Path("baselines"), help="of baselines, default %(default)s")
        common(action)
        action.set_defaults(run=run)


def _certify(arguments: argparse.Namespace) -> int:
    from certify.faults import usual_parts
    from certify.figures import exports
    from certify.records import read
    from certify.verdict import certify, line, print_certificate, write_csv

    if arguments.other:
        options = (arguments.output, arguments.csv, arguments.line, arguments.expected, arguments.expect)
        if any(options):
            raise ReviewError("of two tests there is a comparison alone: leave out all options but --json")
        from certify.compare import compare

        both = compare(certify(arguments.target), certify(arguments.other))
        emit(arguments, parts=both.parts, json=lambda: both)
        return 0
    if arguments.expected:
        if arguments.csv or arguments.output or arguments.expect:
            raise ReviewError("--expected prints figures for a config alone: leave out --csv, --output and --expect")
        figures = exports(read(arguments.target))
        lines = [
            f"export {name}={shlex.quote(f'{value:.10g}' if isinstance(value, float) else value)}"
            for name, value in figures.items()
        ]
        emit(arguments, text=lambda: print("\n".join(lines)), json=lambda: figures)
        return 0
    found = certify(arguments.target)
    if arguments.output:
        from certify.page import write_page

        write_page(found, arguments.output)
    if arguments.csv:
        write_csv(found, arguments.csv)
    if arguments.expect:
        write_whole(arguments.expect, json.dumps(usual_parts(found.records.hardware), indent=2) + "\n")
    emit(arguments, text=lambda: print(line(found)) if arguments.line else print_certificate(found), json=lambda: found)
    return EXIT[found.state]


def _save(arguments: argparse.Namespace) -> int:
    from certify.baseline import save
    from certify.verdict import certify

    found = certify(arguments.target)
    if found.state == "fail" and not arguments.force:
        raise ReviewError(
            f"{arguments.target}: the test failed ({found.reasons()[0]}), and later ones would be held to it: "
            "--force keeps it all the same"
        )
    path = save(found.records, arguments.name, arguments.folder)
    emit(arguments, text=lambda: print(path), json=lambda: {"file": path})
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from certify.baseline import check, choose, measure, print_changes, verdict
    from certify.verdict import certify

    found = certify(arguments.target)
    now = measure(found.records, arguments.target.name)
    before = choose(now, arguments.folder, arguments.name)
    changes, failed = check(now, before), [one.text() for one in found.why() if one.state == "fail"]
    state = "fail" if failed else verdict(changes)
    emit(
        arguments,
        text=lambda: print_changes(before, changes, failed),
        json=lambda: {"state": state, "baseline": before.name, "changes": changes, "failed": failed},
    )
    return EXIT[state]


def _drift(arguments: argparse.Namespace) -> int:
    from certify.baseline import load_all
    from certify.page import write_drift

    found, output = load_all(arguments.folder), arguments.output
    write_drift(found, output)
    emit(arguments, text=lambda: print(output), json=lambda: {"file": output, "baselines": found})
    return 0
