"""`python -m review COMMAND`: exit code 0 is a pass, 1 a failed check, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from review.certify import commands as certify_commands
from review.logs.findings import ReviewError
from review.logs.output import markdown_table, print_csv, print_json

_Commands = Any  # argparse has no public name for what add_subparsers returns


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m review", description="Review MLPerf BERT results.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="one row per run, the RCP test and the score")
    show.add_argument("target", type=Path, nargs="+", help="a log, a folder of logs, or a folder above such folders")
    _common(show, tables=True)
    show.set_defaults(run=_show)

    check = commands.add_parser("check", help="is it valid? official verdict, reasons, and what it overlooks")
    check.add_argument("target", type=Path, nargs="+", help="a log, a result folder, a submission, or a folder above")
    check.add_argument("--strict", action="store_true", help="warnings fail as well")
    _common(check)
    check.set_defaults(run=_check)

    compare = commands.add_parser("compare", help="results side by side: speed-up, confidence interval, significance")
    compare.add_argument("target", type=Path, nargs="+", help="results; the first is what the others are compared with")
    _common(compare, tables=True)
    compare.set_defaults(run=_compare)

    watch = commands.add_parser("watch", help="a live run: progress to the target, time to go, projected RCP margin")
    watch.add_argument("target", type=Path, help="the log of the run, or a folder: the newest log below it")
    watch.add_argument("--accuracy", type=float, help="target accuracy; unset: 0.720, or what config.json says if open")
    watch.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default %(default)s")
    watch.add_argument("--once", action="store_true", help="print where the run stands, and end")
    _common(watch)
    watch.set_defaults(run=_watch)
    reference = commands.add_parser("rcp", help="the reference convergence point that a batch size is held to")
    reference.add_argument("batch_size", type=int, help="global batch size, in sequences")
    _common(reference)
    reference.set_defaults(run=_rcp)
    rehearsal = commands.add_parser("rehearsal", help="does a run start as published ones? go, or what is wrong")
    rehearsal.add_argument("target", type=Path, help="the folder of a run with REHEARSAL=1, or a log")
    rehearsal.add_argument("--band", type=Path, metavar="FILE", help="accuracies of your own to hold it to, as JSON")
    _common(rehearsal)
    rehearsal.set_defaults(run=_rehearsal)
    certify_commands.add(commands, _common)
    _add_select(commands)
    _add_league(commands)
    _add_report(commands)
    _add_system(commands)
    _add_package(commands)
    return top


def _add_select(commands: _Commands) -> None:
    select = commands.add_parser("select", help="of more than ten runs, the ten consecutive ones to submit, and why")
    select.add_argument("target", type=Path, help="the folder of the runs")
    select.add_argument("-o", "--output", type=Path, help="the folder to write them to, to submit; unset: none")
    _common(select)
    select.set_defaults(run=_select)


def _add_league(commands: _Commands) -> None:
    from review.league.ranking import BY

    league = commands.add_parser("league", help="results ranked, their scaling and the trend over the rounds")
    league.add_argument("target", type=Path, nargs="*", help="folders of results of your own")
    league.add_argument(
        "--published", action="store_true", help="among every published BERT result of rounds 0.7 to 5.0"
    )
    league.add_argument("--by", default="minutes", choices=list(BY), help="default %(default)s")
    league.add_argument("--round", action="append", default=[], metavar="ROUND", help="published rounds, such as 5.0")
    league.add_argument("--division", choices=["closed", "open"], help="of published results; unset: both")
    league.add_argument("--accelerator", default="", metavar="TEXT", help="published results whose accelerator has it")
    league.add_argument("--accelerators", type=int, metavar="COUNT", help="published results of this size")
    league.add_argument(
        "--top", type=int, default=20, metavar="COUNT", help="rows beside your own; default 20, 0 is all"
    )
    league.add_argument("--label", default="yours", help="the round to call your own results, default %(default)s")
    league.add_argument("-o", "--output", type=Path, metavar="PAGE", help="write an HTML page with charts")
    _common(league, tables=True)
    league.set_defaults(run=_league)


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser("report", help="one self-contained HTML page: verdict, runs, charts, system, logs")
    report.add_argument("target", type=Path, nargs="+", help="a log, a folder of logs, or a folder above such folders")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page, default %(default)s")
    report.add_argument("--png", type=Path, metavar="FOLDER", help="write each chart as a PNG file as well")
    _common(report)
    report.set_defaults(run=_report)


def _add_system(commands: _Commands) -> None:
    system = commands.add_parser("system", help="write systems/NAME.json, the description of this system")
    system.add_argument("-o", "--output", type=Path, required=True, help="the file, such as systems/DGXH100.json")
    system.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field's value; repeatable")
    system.add_argument("--answers", type=Path, metavar="FILE", help="JSON file of what no probe can know")
    system.add_argument(
        "--run", dest="run_folder", type=Path, metavar="FOLDER", help="take versions and GPUs from this run's folder"
    )
    system.add_argument("--update", action="store_true", help="keep what the file says, fill in its blanks")
    system.add_argument("--no-input", action="store_true", help="ask nothing, even on a terminal")
    _common(system)
    system.set_defaults(run=_system)


def _add_package(commands: _Commands) -> None:
    package = commands.add_parser("package", help="build, check and pack the tree that MLCommons takes")
    package.add_argument("runs", type=Path, help="the folder of the ten result_*.txt")
    package.add_argument("--org", required=True, help="submitter, as in the system description")
    package.add_argument("--system", required=True, help="system's name, as in systems/SYSTEM.json")
    package.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    package.add_argument("--add", action="store_true", help="add this system to the package in the folder")
    package.add_argument("--description", type=Path, metavar="FILE", help="default systems/SYSTEM.json")
    package.add_argument("--implementation", default="pytorch", metavar="NAME", help="folder, default %(default)s")
    package.add_argument("--commit", help="the code that ran; unset: as environment.json says")
    package.add_argument("--config", metavar="FILE", help="the config that ran; unset: as config.json says")
    _common(package)
    package.set_defaults(run=_package)


def _common(command: argparse.ArgumentParser, tables: bool = False) -> None:
    """Options of every command; with ``tables`` also CSV and Markdown."""
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON instead of text")
    if tables:
        forms.add_argument("--csv", action="store_true", help="print CSV, for a spreadsheet")
        forms.add_argument("--markdown", action="store_true", help="print Markdown, for the text of an issue")
    command.add_argument("--ruleset", default="5.0.0", help="MLPerf Training ruleset, default %(default)s")


def _show(arguments: argparse.Namespace) -> int:
    from review.results.score import load_results

    results = [result for target in arguments.target for result in load_results(target, arguments.ruleset)]
    if arguments.json:
        from review.league.borrowed import as_list as borrowed
        from review.verdict.checking import as_dict

        print_json([{**as_dict(result), "same_hyperparameters": borrowed(result)} for result in results])
        return 0
    from review.results.display import console
    from review.show import csv_rows, markdown, show

    if arguments.csv:
        print_csv(csv_rows(results))
    elif arguments.markdown:
        print(markdown(results))
    else:
        show(results, console())
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from review.verdict.checking import check
    from review.verdict.text import print_checked, status

    with status() as progress:
        checked = [one for target in arguments.target for one in check(target, arguments.ruleset, progress)]
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

    results = [result for target in arguments.target for result in load_results(target, arguments.ruleset)]
    with status() as progress:
        checked = [one for target in arguments.target for one in check(target, arguments.ruleset, progress)]
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
        print_csv(csv_rows(results))
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
        print_csv(to_rows(league.ranked))
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
    log = find_log(arguments.target) if arguments.once else wait_for_log(arguments.target, arguments.interval)
    follower = Follower(log, arguments.ruleset, arguments.accuracy)
    return watch(follower, arguments.interval, arguments.json, arguments.once)


def _rcp(arguments: argparse.Namespace) -> int:
    from review.rulebook import rcp

    if arguments.batch_size < 1:
        raise ReviewError(f"batch size {arguments.batch_size}: a positive integer expected")
    point, reason = rcp.find(arguments.batch_size, arguments.ruleset)
    if arguments.json:
        known = {} if point is None else {"mean": point.mean, "std": point.std, "minimum": point.minimum}
        print_json({"batch_size": arguments.batch_size, "reason": reason, **known})
    else:
        print(reason if point is None else point.describe(arguments.batch_size))
    return 0 if point else 1


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
    from review.submission.package import Request, package
    from review.verdict.text import print_checked, status

    request = Request(
        runs=arguments.runs,
        organization=arguments.org,
        system=arguments.system,
        output=arguments.output,
        description=arguments.description or Path("systems", f"{arguments.system}.json"),
        repository=Path(__file__).resolve().parent.parent,
        implementation=arguments.implementation,
        commit=arguments.commit,
        config=arguments.config,
        add=arguments.add,
        ruleset=arguments.ruleset,
    )
    with status() as progress:
        made = package(request, progress)
    if arguments.json:
        print_json(made.as_dict())
    else:
        print_checked(made.checked)
        print("\n".join(str(path) for path in made.files) or "nothing written")
    return 0 if made.passed else 1


def main(argv: list[str] | None = None) -> int:
    """Runs a command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets a question mark, not a traceback
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
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
