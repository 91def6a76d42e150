"""Verifies a prepared data set: counts, digests, every sequence exactly once, labels, evaluation set, repeats.

FOLDER is what prepare_data.sh was given as --outputdir; every data set that it finished there (prepared-*.json) is
verified. FOLDER may also be any folder of record files, such as NVIDIA's packed shards: then what made them is not
known, and whether they are complete cannot be known. Prints a table and one line with the verdict; exit code 0 only if
every check holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bert.data.format import open_records
from bert.data.records import DataError
from input_preprocessing.stage import manifest
from input_preprocessing.stage.benchmark import NUM_PARTS, TEXT_MD5
from input_preprocessing.stage.cli import add_jobs, run, stage_parser
from input_preprocessing.stage.manifest import Manifest
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.text import vocabulary
from input_preprocessing.verify.audit import Audit, Hashes, Rules, audit, original_hashes, rules_of
from input_preprocessing.verify.checks import (
    Check,
    check_counts,
    check_evaluation,
    check_held_out,
    check_labels,
    check_masks,
    check_next_sentences,
    check_once,
    check_options,
    check_reading,
    check_repeats,
    check_rows,
)

NOT_RECORDS = (".lst", ".json", ".txt", ".md5", ".chk")


def verify(folder: Path, *, jobs: int, vocab_file: Path | None = None) -> dict[str, list[Check]]:
    """Checks of every data set in the folder, by its name.

    Raises:
        DataError: there is none, or nothing to verify it with.
    """
    prepared = sorted(folder.glob("prepared-*.json"))
    if prepared:
        names = [path.stem.removeprefix("prepared-") for path in prepared]
        return {name: _verify_prepared(folder, path, jobs) for name, path in zip(names, prepared, strict=True)}
    files = sorted(
        path
        for path in folder.glob("*")
        if path.is_file() and path.suffix not in NOT_RECORDS and not path.name.startswith(".")
    )
    if not files:
        raise DataError(f"{folder} holds neither prepared-*.json nor record files; give the folder of a data set")
    if vocab_file is None:
        raise DataError(f"{folder} has no prepared-*.json; say with --vocab-file what its records were made with")
    rules = rules_of(vocabulary.load(vocab_file), None)
    audits, errors = _audit_all(files, rules, None, "read records", jobs)
    unknown = Check("complete", None, "not known: no prepared-*.json tells what should be here")
    return {folder.name: [unknown, check_reading(audits, errors), *_content_checks(audits)]}


def _audit_task(task: tuple[Path, Rules, Hashes | None]) -> Audit | str:
    try:
        return audit(*task)
    except DataError as error:
        return str(error)


def _audit_all(
    files: Sequence[Path], rules: Rules, known: Hashes | None, label: str, jobs: int
) -> tuple[list[Audit], list[str]]:
    """What the readable files hold, and why the others are not."""
    tasks = [(path, rules, known) for path in files]
    weights = [path.stat().st_size for path in files]
    results = run_tasks(label, _audit_task, tasks, jobs=jobs, weights=weights)
    found = [result for result in results if isinstance(result, Audit)]
    return found, [result for result in results if isinstance(result, str)]


def _content_checks(audits: list[Audit]) -> list[Check]:
    return [check_labels(audits), check_masks(audits), check_next_sentences(audits), check_repeats(audits)]


def _verify_prepared(folder: Path, path: Path, jobs: int) -> list[Check]:
    made = manifest.read(path)
    checks = [_check_files(folder, made), _check_others(folder, made), _check_text(made)]
    words = vocabulary.load(folder / "phase1" / "vocab.txt")
    rules = rules_of(words, made.recipe)
    eval_files = [folder / name for name in made.files if name.startswith("eval/") and (folder / name).is_file()]
    eval_audits, eval_errors = _audit_all(eval_files, rules, None, "read evaluation set", 1)
    known = original_hashes(open_records(eval_audits[0].path)[0]) if eval_audits else None
    files = [folder / name for name in made.records if (folder / name).is_file()]
    audits, errors = _audit_all(files, rules, known, "read training records", jobs)
    return [
        *checks,
        check_reading([*eval_audits, *audits], [*eval_errors, *errors], {folder / n: d for n, d in made.files.items()}),
        check_options([*eval_audits, *audits], made, words.md5),
        check_counts(audits, made),
        check_once(audits, made),
        check_rows(audits, made),
        *_content_checks(audits),
        check_evaluation(eval_audits, made),
        check_held_out(audits, known),
    ]


def _check_files(folder: Path, made: Manifest) -> Check:
    """Are all files there, and no others that a trainer would read?"""
    missing = [name for name in made.files if not (folder / name).is_file()]
    if missing:
        return Check("files", False, f"{len(missing)} of {len(made.files)} are missing: {missing[0]}")
    parents = {(folder / name).parent for name in made.files if name.endswith(".hdf5")}
    wanted = {folder / name for name in made.files}
    strays = sorted(path for parent in parents for path in parent.glob("*.hdf5") if path not in wanted)
    if strays:
        return Check("files", False, f"{len(strays)} more than were prepared: {strays[0].relative_to(folder)}")
    return Check("files", True, f"all {len(made.files):,} that were prepared, no others")


def _check_others(folder: Path, made: Manifest) -> Check:
    """Vocabulary, model sizes and checkpoint, by their md5."""
    names = [name for name in made.files if not name.endswith(".hdf5") and (folder / name).is_file()]
    changed = [name for name in names if manifest.md5_of(folder / name) != made.files[name]]
    if changed:
        return Check("model files", False, f"{', '.join(changed)} changed since it was prepared")
    return Check("model files", True, f"{', '.join(names)} as prepared")


def _check_text(made: Manifest) -> Check:
    """Is the text the benchmark's?"""
    if wanted := made.recipe.get("sequences"):
        return Check(
            "text", None, f"{len(made.texts) - 1} training files, of which at most {wanted} sequences were made"
        )
    right = [name for name, md5 in TEXT_MD5.items() if made.texts.get(name) == md5]
    if len(right) == len(TEXT_MD5) and len(made.texts) == NUM_PARTS + 1:
        return Check("text", True, f"the benchmark's: {NUM_PARTS} parts, {len(right)} of {len(right)} known md5")
    if right:
        wrong = next(name for name in TEXT_MD5 if name not in right)
        return Check("text", False, f"partly the benchmark's: {wrong} is missing or has another md5")
    return Check("text", None, f"not the benchmark's: {len(made.texts) - 1} training files of another corpus")


def failures(found: dict[str, list[Check]]) -> list[str]:
    """Checks that do not hold, as text."""
    return [f"{name}: {check.name}: {check.detail}" for name, checks in found.items() for check in checks
            if check.holds is False]  # fmt: skip


def verdict(folder: Path, found: dict[str, list[Check]]) -> str:
    """One line for people."""
    failed = failures(found)
    total = sum(len(checks) for checks in found.values())
    if failed:
        return f"{folder}: NOT VALID: {len(failed)} of {total} checks failed; {failed[0]}"
    unknown = sum(check.name == "complete" for checks in found.values() for check in checks)
    return f"{folder}: {'sound' if unknown else 'valid'}: {', '.join(found)}, all {total} checks hold"


def _print_table(found: dict[str, list[Check]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for name, checks in found.items():
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for heading in ("check", "", "found"):
            table.add_column(heading, overflow="fold")
        for check in checks:
            mark, style = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("note", "yellow")}[check.holds]
            table.add_row(check.name, Text(mark, style), Text(check.detail))
        console.print(table)


def _main(options: argparse.Namespace) -> None:
    found = verify(options.folder, jobs=options.jobs, vocab_file=options.vocab_file)
    if options.json:
        checks = {name: [dataclasses.asdict(check) for check in checks] for name, checks in found.items()}
        print(json.dumps({"valid": not failures(found), "checks": checks}))
    else:
        _print_table(found)
    line = verdict(options.folder, found)
    if failures(found):
        raise DataError(line)
    print(line, file=sys.stderr if options.json else sys.stdout)


def main() -> None:
    """Command line."""
    parser = stage_parser("verify", __doc__)
    parser.add_argument("folder", type=Path, help="folder of a data set")
    parser.add_argument("--vocab-file", type=Path, help="vocab.txt of a folder without prepared-*.json")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    add_jobs(parser)
    run(parser, _main)
