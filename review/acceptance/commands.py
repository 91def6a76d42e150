"""The commands `certify` and `baseline` of `python -m review`. Imports happen when a command runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from review.acceptance.journal import EXIT, worst
from review.logs.output import ReviewError, emit

if TYPE_CHECKING:
    from review.acceptance.verdict import Certificate


def _certify(arguments: argparse.Namespace) -> int:
    from review.acceptance.figures import write_expectations
    from review.acceptance.verdict import certify, line, print_certificate

    found = certify(arguments.target)
    if arguments.output:
        from review.acceptance.page import write_page

        write_page(found, arguments.output)
    if arguments.expect:
        _refuse_failed(found, "a config would expect its figures")
        write_expectations(found.records, arguments.expect)
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


COMMANDS = {
    "certify": _certify,
    "baseline save": _save,
    "baseline check": _check,
}
