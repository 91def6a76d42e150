"""The command line: each command with its options; ``__main__`` runs them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from certify import commands as certify_commands
from review.league.ranking import BY

_Commands = Any  # argparse has no public name for what add_subparsers returns


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m review", description="Review MLPerf BERT results.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="one row per run, the RCP test and the score")
    show.add_argument("target", type=Path, nargs="+", help="a log, a folder of logs, or a folder above such folders")
    _train_samples(show)
    _rcp_file(show)
    _common(show, tables=True)

    check = commands.add_parser("check", help="is it valid? official verdict, reasons, and what it overlooks")
    check.add_argument("target", type=Path, nargs="+", help="a log, a result folder, a submission, or a folder above")
    check.add_argument("--strict", action="store_true", help="warnings fail as well")
    _train_samples(check)
    _common(check)

    compare = commands.add_parser("compare", help="results side by side: speed-up, confidence interval, significance")
    compare.add_argument("target", type=Path, nargs="+", help="results; the first is what the others are compared with")
    _common(compare, tables=True)

    watch = commands.add_parser("watch", help="a live run: progress to the target, time to go, projected RCP margin")
    watch.add_argument(
        "target", type=Path, nargs="+", help="the log of the run, or a folder: the newest log below it; of several: all"
    )
    watch.add_argument("--all", action="store_true", help="every run below the folder at once: a sweep, ten trials")
    watch.add_argument("--accuracy", type=float, help="target accuracy; unset: 0.720, or what config.json says if open")
    watch.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default %(default)s")
    watch.add_argument("--once", action="store_true", help="print where the run stands, and end")
    _common(watch)
    reference = commands.add_parser("rcp", help="the reference convergence point that a batch size is held to")
    what = reference.add_mutually_exclusive_group(required=True)
    what.add_argument("batch_size", type=int, nargs="?", help="global batch size, in sequences")
    what.add_argument("--runs", type=Path, metavar="FOLDER", help="the RCP test of these runs, and why it fails")
    _train_samples(reference)
    _rcp_file(reference)
    _common(reference)
    rehearsal = commands.add_parser("rehearsal", help="does a run start as published ones? go, or what is wrong")
    rehearsal.add_argument("target", type=Path, help="the folder of a run with REHEARSAL=1, or a log")
    rehearsal.add_argument("--band", type=Path, metavar="FILE", help="accuracies of your own to hold it to, as JSON")
    _common(rehearsal)
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


def _add_league(commands: _Commands) -> None:
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


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser("report", help="one self-contained HTML page: verdict, runs, charts, system, logs")
    report.add_argument("target", type=Path, nargs="+", help="a log, a folder of logs, or a folder above such folders")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page, default %(default)s")
    report.add_argument("--png", type=Path, metavar="FOLDER", help="write each chart as a PNG file as well")
    _train_samples(report)
    _common(report)


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
    package.add_argument("--repository", type=Path, metavar="FOLDER", help="git repository of the code; unset: this")
    _train_samples(package)
    package.add_argument(
        "--encrypt-for", action="append", default=[], metavar="KEY", help="encrypt the archive for a key of age or gpg"
    )
    package.add_argument(
        "--passphrase-file", type=Path, metavar="FILE", help="encrypt the archive with the passphrase in it, by gpg"
    )
    _common(package)


def _train_samples(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rcp-bert-train-samples",
        action="store_true",
        help="the RCP test takes train_samples, not the epoch_num of the last evaluation, as the rules grant to BERT",
    )


def _rcp_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--rcp-file", type=Path, metavar="FILE", help="reference points of your own, in the form of rcps_bert.json"
    )


def _common(command: argparse.ArgumentParser, tables: bool = False) -> None:
    """Options of every command; with ``tables`` also CSV and Markdown."""
    forms = command.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON instead of text")
    if tables:
        forms.add_argument("--csv", action="store_true", help="print CSV, for a spreadsheet")
        forms.add_argument("--markdown", action="store_true", help="print Markdown, for the text of an issue")
    command.add_argument("--ruleset", default="5.0.0", help="MLPerf Training ruleset, default %(default)s")
