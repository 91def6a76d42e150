"""`python -m review COMMAND`: exit code 0 is a pass, 1 a failed check, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from review.logs.output import ReviewError, csv_text, markdown_table, print_json
from review.options import parser

if TYPE_CHECKING:
    from review.results.score import Terms


def _terms(arguments: argparse.Namespace) -> Terms:
    """What results are held to, by the options that the command has."""
    from review.results.score import Terms

    return Terms(train_samples=arguments.rcp_bert_train_samples, rcp_file=getattr(arguments, "rcp_file", None))


def _show(arguments: argparse.Namespace) -> int:
    from review.results.score import load_results

    terms = _terms(arguments)
    results = [result for target in arguments.target for result in load_results(target, arguments.ruleset, terms)]
    if arguments.json:
        from review.league.borrowed import as_list as borrowed
        from review.verdict.checking import as_dict

        print_json([{**as_dict(result), "same_hyperparameters": borrowed(result)} for result in results])
        return 0
    from review.logs.output import console
    from review.show import csv_rows, markdown, show

    if arguments.csv:
        print(csv_text(csv_rows(results)), end="")
    elif arguments.markdown:
        print(markdown(results))
    else:
        show(results, console())
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from review.verdict.checking import check
    from review.verdict.text import print_checked, status

    with status() as progress:
        checked = [
            one for target in arguments.target for one in check(target, arguments.ruleset, progress, _terms(arguments))
        ]
    passed = all(one.passed(arguments.strict) for one in checked)
    if arguments.json:
        print_json({"passed": passed, "checked": [one.as_dict() for one in checked]})
    else:
        print_checked(checked, arguments.strict)
    return 0 if passed else 1


def _report(arguments: argparse.Namespace) -> int:
    from review.report.page import write_report
    from review.results.score import load_results
    from review.verdict.checking import check
    from review.verdict.text import status

    terms = _terms(arguments)
    results = [result for target in arguments.target for result in load_results(target, arguments.ruleset, terms)]
    with status() as progress:
        checked = [one for target in arguments.target for one in check(target, arguments.ruleset, progress, terms)]
    files = write_report(results, checked, arguments.output, arguments.png)
    if arguments.json:
        print_json({"passed": all(one.passed() for one in checked), "files": [str(path) for path in files]})
    else:
        print("\n".join(str(path) for path in files))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from review.compare import as_dict, csv_rows, markdown, print_comparison
    from review.results.score import load_results

    results = [result for target in arguments.target for result in load_results(target, arguments.ruleset)]
    if arguments.json:
        print_json(as_dict(results))
    elif arguments.csv:
        print(csv_text(csv_rows(results)), end="")
    elif arguments.markdown:
        print(markdown(results))
    else:
        print_comparison(results)
    return 0


def _select(arguments: argparse.Namespace) -> int:
    from review.results.score import load_results
    from review.select import print_selection, select, write

    results = load_results(arguments.target, arguments.ruleset)
    if len(results) != 1 or arguments.target.is_file():
        raise ReviewError(f"{arguments.target}: name the one folder that holds the runs of a system")
    selection = select(results[0])
    if arguments.output is not None:
        write(selection, arguments.output)
    if arguments.json:
        print_json(selection.as_dict())
    else:
        print_selection(selection, arguments.output)
    return 0 if selection.chosen else 1


def _league(arguments: argparse.Namespace) -> int:
    from review.league.entries import entry_of, published, to_rows
    from review.league.ranking import Filter, League
    from review.league.table import print_league, rows
    from review.results.score import load_results

    if not arguments.target and not arguments.published:
        raise ReviewError("league needs a folder of results, --published, or both")
    if arguments.top < 0:
        raise ReviewError(f"--top {arguments.top}: 0 or more expected")
    own = [
        entry_of(result, arguments.label, target)
        for target in arguments.target
        for result in load_results(target, arguments.ruleset)
    ]
    wanted = Filter(
        rounds=tuple(arguments.round),
        division=arguments.division or "",
        accelerator=arguments.accelerator,
        count=arguments.accelerators,
    )
    others = [entry for entry in published() if wanted.takes(entry)] if arguments.published else []
    league, top = League(tuple(own), tuple(others), arguments.by), arguments.top or None
    if arguments.output is not None:
        from review.league.page import write_page

        write_page(league, None, arguments.output)
    if arguments.json:
        print_json(league.as_dict())
    elif arguments.csv:
        print(csv_text(to_rows(league.ranked)), end="")
    elif arguments.markdown:
        print(markdown_table(rows(league, top)))
    else:
        print_league(league, top)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from review.watch import Follower, find_log, wait_for_log, watch

    if not arguments.interval > 0:
        raise ReviewError(f"--interval {arguments.interval}: seconds above 0 expected")
    if arguments.accuracy is not None and not 0 < arguments.accuracy < 1:
        raise ReviewError(f"--accuracy {arguments.accuracy}: a number between 0 and 1 expected")
    if arguments.all or len(arguments.target) > 1:
        from review.watch import Runs, watch_many

        runs = Runs(arguments.target, arguments.ruleset, arguments.accuracy)
        return watch_many(runs, arguments.interval, arguments.json, arguments.once)
    (target,) = arguments.target
    log = find_log(target) if arguments.once else wait_for_log(target, arguments.interval)
    if log.is_dir():
        from certify import watch as certify_watch

        return certify_watch.watch(certify_watch.Watched(log), arguments.interval, arguments.json, arguments.once)
    follower = Follower(log, arguments.ruleset, arguments.accuracy)
    return watch(follower, arguments.interval, arguments.json, arguments.once)


def _rcp(arguments: argparse.Namespace) -> int:
    from review.rulebook import rcp

    if arguments.runs is not None:
        return _rcp_of_runs(arguments)
    if arguments.batch_size < 1:
        raise ReviewError(f"batch size {arguments.batch_size}: a positive integer expected")
    point, reason = rcp.find(arguments.batch_size, arguments.ruleset, arguments.rcp_file)
    if arguments.json:
        known = {} if point is None else {"mean": point.mean, "std": point.std, "minimum": point.minimum}
        print_json({"batch_size": arguments.batch_size, "reason": reason, **known})
    else:
        print(reason if point is None else point.describe(arguments.batch_size))
    return 0 if point else 1


def _rcp_of_runs(arguments: argparse.Namespace) -> int:
    from review.logs.output import console
    from review.results.dossier import Dossier
    from review.results.score import load_results
    from review.show import print_rcp

    results = load_results(arguments.runs, arguments.ruleset, _terms(arguments))
    dossiers = [Dossier(result) for result in results]
    if arguments.json:
        print_json([dossier.as_dict() for dossier in dossiers])
    else:
        for result in results:
            print_rcp(result, console())
    return 0 if all(dossier.passed for dossier in dossiers) else 1


def _rehearsal(arguments: argparse.Namespace) -> int:
    from review.rehearsal import print_rehearsal, rehearsal

    found = rehearsal(arguments.target, arguments.band, arguments.ruleset)
    if arguments.json:
        print_json(found.as_dict())
    else:
        print_rehearsal(found)
    return 0 if found.go else 1


def _system(arguments: argparse.Namespace) -> int:
    from review.submission import system
    from review.submission.system_probe import Machine

    output: Path = arguments.output
    if output.exists() and not arguments.update:
        raise ReviewError(f"{output} exists: --update fills in its blanks")
    given: list[tuple[str, dict[str, Any]]] = [("--set", system.parse_settings(arguments.set))]
    given += [(str(arguments.answers), system.read_answers(arguments.answers))] if arguments.answers else []
    given += [(str(output), system.read_fields(output))] if output.exists() else []
    given += [(str(arguments.run_folder), system.from_run(arguments.run_folder))] if arguments.run_folder else []
    asks = sys.stdin.isatty() and not arguments.no_input
    described = system.describe(given, Machine(), system.ask_user if asks else None)
    system.write(described, output, arguments.ruleset)
    if arguments.json:
        print_json({"file": str(output), "blank": described.blanks, **described.as_dict()})
        return 0
    print(output)
    if described.blanks:
        print(f"blank, though the rules want an answer: {', '.join(described.blanks)}", file=sys.stderr)
        print("fill them in with --update and --set FIELD=VALUE, or in the file", file=sys.stderr)
    return 0


def _package(arguments: argparse.Namespace) -> int:
    from review.submission.encryption import Encryption
    from review.submission.package import Request, package
    from review.verdict.text import print_checked, status

    request = Request(
        runs=arguments.runs,
        organization=arguments.org,
        system=arguments.system,
        output=arguments.output,
        description=arguments.description or Path("systems", f"{arguments.system}.json"),
        repository=arguments.repository or Path(__file__).resolve().parent.parent,
        implementation=arguments.implementation,
        commit=arguments.commit,
        config=arguments.config,
        add=arguments.add,
        encryption=Encryption(recipients=tuple(arguments.encrypt_for), passphrase_file=arguments.passphrase_file),
        ruleset=arguments.ruleset,
        terms=_terms(arguments),
    )
    with status() as progress:
        made = package(request, progress)
    if arguments.json:
        print_json(made.as_dict())
    else:
        print_checked(made.checked)
        print("\n".join(str(path) for path in made.files) or "nothing written")
    return 0 if made.passed else 1


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": _show,
    "check": _check,
    "compare": _compare,
    "watch": _watch,
    "rcp": _rcp,
    "rehearsal": _rehearsal,
    "select": _select,
    "league": _league,
    "report": _report,
    "system": _system,
    "package": _package,
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets a question mark, not a traceback
    arguments = parser().parse_args(argv)
    run = _COMMANDS.get(arguments.command) or arguments.run  # certify and baseline bring theirs along
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except ReviewError as error:
        print(f"review: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
