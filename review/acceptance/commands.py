"""The commands `certify` and `baseline` of `python -m review`. Imports happen when a command runs."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import TYPE_CHECKING

from review.acceptance.journal import EXIT, worst
from review.logs.output import ReviewError, emit, write_whole

if TYPE_CHECKING:
    from review.acceptance.verdict import Certificate


def _certify(arguments: argparse.Namespace) -> int:
    from review.acceptance.faults import usual_parts
    from review.acceptance.figures import exports
    from review.acceptance.records import read
    from review.acceptance.verdict import certify, line, print_certificate, write_csv

    if arguments.other:
        if any(
            (arguments.output, arguments.csv, arguments.line, arguments.expected, arguments.expect)
        ):
            raise ReviewError("two tests are compared, which takes no option but --json")
        from review.acceptance.baseline import compare

        both = compare(certify(arguments.target), certify(arguments.other))
        emit(arguments, parts=both.parts, json=lambda: both)
        return 0
    if arguments.expected:
        if arguments.csv or arguments.output or arguments.expect:
            raise ReviewError(
                "--expected only prints figures for a config: remove --csv, --output and --expect"
            )
        # Figures of a sick machine would declare the next sick one healthy.
        _refuse_failed(certify(arguments.target), "a config would expect them")
        figures = exports(read(arguments.target))
        lines = [
            f"export {name}={shlex.quote(f'{value:.10g}' if isinstance(value, float) else value)}"
            for name, value in figures.items()
        ]
        emit(arguments, text=lambda: print("\n".join(lines)), json=lambda: figures)
        return 0
    found = certify(arguments.target)
    if arguments.output:
        from review.acceptance.page import write_page

        write_page(found, arguments.output)
    if arguments.csv:
        write_csv(found, arguments.csv)
    if arguments.expect:
        write_whole(
            arguments.expect, json.dumps(usual_parts(found.records.hardware), indent=2) + "\n"
        )
    emit(
        arguments,
        text=lambda: print(line(found)) if arguments.line else print_certificate(found),
        json=lambda: found,
    )
    return EXIT[found.state]


def _refuse_failed(found: Certificate, why: str) -> None:
    """Raises ReviewError for a failed test: its figures are no example."""
    if found.state == "fail":
        first = found.reasons()[0]
        raise ReviewError(f"{found.records.folder}: the test failed ({first}), and {why}")


def _save(arguments: argparse.Namespace) -> int:
    from review.acceptance.baseline import save
    from review.acceptance.verdict import certify

    found = certify(arguments.target)
    if not arguments.force:
        _refuse_failed(found, "later ones would be compared with it: --force saves it anyway")
    path = save(found.records, arguments.name, arguments.folder)
    emit(arguments, text=lambda: print(path), json=lambda: {"file": path})
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from review.acceptance.baseline import check, choose, measure, print_changes
    from review.acceptance.verdict import certify

    found = certify(arguments.target)
    now = measure(found.records, arguments.target.name)
    before = choose(now, arguments.folder, arguments.name)
    changes, failed = check(now, before), [one.text() for one in found.why() if one.state == "fail"]
    # Of the test itself only a failure counts: warnings are not about change.
    state = "fail" if failed else worst(change.state for change in changes)
    emit(
        arguments,
        text=lambda: print_changes(before, changes, failed, state),
        json=lambda: {
            "state": state,
            "baseline": before.name,
            "changes": changes,
            "failed": failed,
        },
    )
    return EXIT[state]


def _drift(arguments: argparse.Namespace) -> int:
    from review.acceptance.baseline import load_all
    from review.acceptance.page import write_drift

    found, output = load_all(arguments.folder), arguments.output
    write_drift(found, output)
    emit(arguments, text=lambda: print(output), json=lambda: {"file": output, "baselines": found})
    return 0


COMMANDS = {
    "certify": _certify,
    "baseline save": _save,
    "baseline check": _check,
    "baseline drift": _drift,
}
