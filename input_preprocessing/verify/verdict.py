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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert.data.digests import add_multiset_digests
from bert.data.format import open_records
from bert.data.records import DataError, Records
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records.foreign import NOT_RECORDS, input_ids_digest
from input_preprocessing.records.shards import NUM_EVAL_SAMPLES
from input_preprocessing.stage import manifest
from input_preprocessing.stage.benchmark import NUM_PARTS, TEXT_MD5
from input_preprocessing.stage.cli import add_jobs
from input_preprocessing.stage.manifest import Manifest
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.text import vocabulary
from input_preprocessing.verify.audit import TELLING_MASKS, Audit, Hashes, Rules, audit, original_hashes, rules_of

# Digest of input_ids of the benchmark's 10,000 evaluation samples, as NVIDIA's eval_varlength.chk has it.
PUBLISHED_EVALUATION = "611d8bae26646145e1c33338a27ba124"

_SIGMAS = 6.0  # of a share of the masks; beyond it by chance once in 500 million data sets
_MOST_SEEN = 0.01  # of the evaluation samples in the training data; articles that are copies of another exist
_FEW_SEEN = (
    10  # training sequences; below, a share of few samples tells nothing: one text twice makes several sequences
)
_USUAL_RANDOM_NEXT = (0.3, 0.8)


@dataclass(frozen=True)
class Check:
    """One line of the table; a check that is neither true nor false is worth a note."""

    name: str
    holds: bool | None
    detail: str


def verify(folder: Path, *, jobs: int, vocab_file: Path | None = None) -> dict[str, list[Check]]:
    """Checks of every data set in the folder, by its name.

    Raises:
        DataError: there is none, or nothing to verify it with.
    """
    prepared = sorted(folder.glob("prepared-*.json"))
    if prepared:
        names = [path.stem.removeprefix("prepared-") for path in prepared]
        return {name: _verify_prepared(folder, path, jobs) for name, path in zip(names, prepared, strict=True)}
    files = sorted(path for path in folder.glob("[!.]*") if path.is_file() and path.suffix not in NOT_RECORDS)
    if not files:
        raise DataError(f"{folder} holds neither prepared-*.json nor record files; give the folder of a data set")
    if vocab_file is None:
        raise DataError(f"{folder} has no prepared-*.json; say with --vocab-file what its records were made with")
    rules = rules_of(vocabulary.load(vocab_file), None)
    audits, errors = _audit_all(files, rules, None, "read records", jobs)
    unknown = Check("complete", None, "not known: no prepared-*.json tells what should be here")
    return {folder.name: [unknown, _check_reading(audits, errors), *_content_checks(audits)]}


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


def _check_reading(audits: Sequence[Audit], errors: Sequence[str], made: dict[Path, str] | None = None) -> Check:
    """Is every file sound, and the one that was made?"""
    total = len(audits) + len(errors)
    if errors:
        return Check("contents", False, f"{len(errors)} of {total} record files are not sound; {errors[0]}")
    other = [audit.path for audit in audits if made and made[audit.path] != audit.metadata.content_digest]
    if other:
        return Check("contents", False, f"{len(other)} of {total} files are not the ones prepared: {other[0]}")
    how = "as prepared, by their digests" if made else "in range"
    empty = sum(audit.empty_rows for audit in audits)
    note = f"; {empty:,} rows hold no sequence, and are skipped in training" if empty else ""
    return Check("contents", True, f"every sequence of {total:,} record files is {how}{note}")


def _content_checks(audits: list[Audit]) -> list[Check]:
    """Labels, masks, next sentences and repeats, of any records."""
    masked, tokens, sequences = (sum(getattr(audit, n) for audit in audits) for n in ("masked", "tokens", "sequences"))
    # Does every sequence have its special tokens, masks and labels where they belong?
    share = masked / tokens if tokens else 0
    labels = Check("labels", True, f"[CLS], [SEP], masks and labels of every sequence in place; {share:.2%} masked")
    if faulty := [audit for audit in audits if audit.fault]:
        labels = Check("labels", False, f"{faulty[0].path}: {faulty[0].fault} ({len(faulty)} such files)")
    # Did 80% of the masked tokens become [MASK], 10% stay, 10% become random ones, but for chance?
    masks = Check("masks", None, "nothing is masked")
    if masked:
        shares = [sum(audit.replaced[i] for audit in audits) / masked for i in range(2)]
        masks = Check("masks", True, f"{shares[0]:.2%} [MASK], {shares[1]:.2%} kept, {1 - sum(shares):.2%} random")
        # A random token is the one kept, or [MASK], once in a vocabulary: within the tolerance of 1 in 1,000.
        for share, wanted in zip(shares, (0.8, 0.1), strict=True):
            if abs(share - wanted) > 0.001 + _SIGMAS * (wanted * (1 - wanted) / masked) ** 0.5:
                masks = dataclasses.replace(masks, holds=False, detail=f"{masks.detail}; expected 80%, 10%, 10%")
                break
    # Is about every second segment B a random one?
    share = sum(audit.random_next for audit in audits) / sequences if sequences else 0
    usual = _USUAL_RANDOM_NEXT[0] <= share <= _USUAL_RANDOM_NEXT[1]
    note = "" if usual else "; unusual: are there documents of several sentences, with blank lines between them?"
    next_sentences = Check("next sentences", True if usual else None, f"{share:.2%} random{note}")
    # Is there no long sequence twice? That happens where a text file, or a shard, is there twice. Takes 8 bytes a
    # sequence: they are counted in 16 parts, so that sorting takes little more.
    told, count = sum(len(audit.hashes) for audit in audits), 0
    for part in range(16):
        hashes = np.concatenate(
            [np.zeros(0, np.uint64), *(audit.hashes[audit.hashes >> np.uint64(60) == part] for audit in audits)]
        )
        count += len(hashes) - len(np.unique(hashes))
    what = f"sequences with {TELLING_MASKS} masked tokens or more"
    repeats = Check("repeats", True, f"none among {told:,} {what}")
    if count:
        twice = f"{count:,} of {told:,} {what} are there twice: is a text file a copy?"
        repeats = Check("repeats", False, twice)
    return [labels, masks, next_sentences, repeats]


def _verify_prepared(folder: Path, path: Path, jobs: int) -> list[Check]:
    made = manifest.read(path)
    words = vocabulary.load(folder / "phase1" / "vocab.txt")
    rules = rules_of(words, made.recipe)
    eval_files = [folder / name for name in made.files if name.startswith("eval/") and (folder / name).is_file()]
    eval_audits, eval_errors = _audit_all(eval_files, rules, None, "read evaluation set", 1)
    known = original_hashes(open_records(eval_audits[0].path)[0]) if eval_audits else None
    files = [folder / name for name in made.records if (folder / name).is_file()]
    audits, errors = _audit_all(files, rules, known, "read training records", jobs)
    both = [*eval_audits, *audits]
    return [
        *_file_checks(folder, made),
        _check_reading(both, [*eval_errors, *errors], {folder / name: digest for name, digest in made.files.items()}),
        *_count_checks(both, audits, made, words.md5),
        *_content_checks(audits),
        _check_evaluation(eval_audits, made),
        check_held_out(audits, known),
    ]


def _file_checks(folder: Path, made: Manifest) -> list[Check]:
    # Are all files there, and no others that a trainer would read?
    files = Check("files", True, f"all {len(made.files):,} that were prepared, no others")
    wanted = {folder / name for name in made.files}
    parents = {path.parent for path in wanted if path.suffix == ".hdf5"}
    strays = sorted(path for parent in parents for path in parent.glob("*.hdf5") if path not in wanted)
    if missing := [name for name in made.files if not (folder / name).is_file()]:
        files = Check("files", False, f"{len(missing)} of {len(made.files)} are missing: {missing[0]}")
    elif strays:
        files = Check("files", False, f"{len(strays)} more than were prepared: {strays[0].relative_to(folder)}")
    # Vocabulary, model sizes and checkpoint, by their md5.
    names = [name for name in made.files if not name.endswith(".hdf5") and (folder / name).is_file()]
    models = Check("model files", True, f"{', '.join(names)} as prepared")
    if changed := [name for name in names if manifest.md5_of(folder / name) != made.files[name]]:
        models = Check("model files", False, f"{', '.join(changed)} changed since it was prepared")
    # Is the text the benchmark's?
    count, right = len(made.texts) - 1, [name for name, md5 in TEXT_MD5.items() if made.texts.get(name) == md5]
    if limit := made.recipe.get("sequences"):
        text = Check("text", None, f"{count} training files, of which at most {limit} sequences were made")
    elif len(right) == len(TEXT_MD5) and count == NUM_PARTS:
        known = f"{len(right)} of {len(right)} known md5"
        text = Check("text", True, f"the benchmark's: {NUM_PARTS} parts, {known}")
    elif right:
        wrong = next(name for name in TEXT_MD5 if name not in right)
        text = Check("text", False, f"partly the benchmark's: {wrong} is missing or has another md5")
    else:
        text = Check("text", None, f"not the benchmark's: {count} training files of another corpus")
    return [files, models, text]


def _count_checks(both: Sequence[Audit], audits: Sequence[Audit], made: Manifest, vocab_md5: str) -> list[Check]:
    """Options of training and evaluation files; counts, coverage and rows of the training files."""
    # Are all files made with the manifest's options and the vocabulary beside them?
    wanted = {name: made.recipe[name] for name in ("max_seq_length", "random_seed", "dupe_factor")}
    wanted["vocab_md5"] = vocab_md5
    options = Check("options", True, ", ".join(f"{name} {value}" for name, value in wanted.items()))
    for each in reversed(both):  # the first that differs is told
        for name, value in reversed(wanted.items()):
            if (found := getattr(each.metadata, name)) != value:
                options = Check("options", False, f"{each.path} was made with {name} {found}, not {value}")
    # Are there as many sequences, rows and tokens as were prepared?
    counts = Check("counts", True, f"{made.sequences:,} sequences in {made.rows:,} rows, {made.tokens:,} tokens")
    for name in ("tokens", "rows", "sequences"):
        if (total := sum(getattr(audit, name) for audit in audits)) != getattr(made, name):
            counts = Check("counts", False, f"{total:,} {name}, {getattr(made, name):,} were prepared")
    # Are the shards' sequences exactly the training instances, each as often as the instance maker made it?
    digest = add_multiset_digests([audit.metadata.multiset_digest for audit in audits])
    once = Check("coverage", True, f"every training instance exactly once (multiset digest {digest[:16]}...)")
    if digest != made.multiset_digest:
        once = Check("coverage", False, "the shards are not a permutation of the training instances")
    # Does no row hold more sequences than allowed? Tokens of a row are checked on reading.
    most, allowed = max((audit.most_per_row for audit in audits), default=0), made.recipe["max_sequences_per_row"]
    capacity = sum(audit.capacity for audit in audits)
    share = sum(audit.tokens for audit in audits) / capacity if capacity else 0
    rows = Check("rows", True, f"at most {most} sequence{'s' * (most > 1)} in a row, {share:.2%} of token slots filled")
    if most > int(str(allowed)):
        rows = Check("rows", False, f"a row holds {most} sequences, at most {allowed} were asked for")
    return [options, counts, once, rows]


def _check_evaluation(audits: Sequence[Audit], made: Manifest) -> Check:
    """Is the evaluation set of the size prepared, sound, and the published one where the text is the benchmark's?"""
    if len(audits) != 1:
        return Check("evaluation", False, f"{len(audits)} readable files, expected one")
    audit = audits[0]
    if audit.fault:
        return Check("evaluation", False, f"{audit.path}: {audit.fault}")
    if audit.sequences != made.eval_samples:
        return Check("evaluation", False, f"{audit.sequences:,} samples, {made.eval_samples:,} were prepared")
    text = f"{audit.sequences:,} samples, {audit.masked:,} masked tokens"
    wanted = {"num_eval_samples": NUM_EVAL_SAMPLES, **dataclasses.asdict(SamplingConfig())}
    recipe = {"do_lower_case": True, **made.recipe}  # as before there was a choice
    same_options = all(recipe.get(name) == value for name, value in wanted.items())
    if not same_options or made.texts.get("eval.txt") != TEXT_MD5["eval.txt"]:
        return Check("evaluation", True, text)
    digest = published_digest(open_records(audit.path)[0])
    if digest != PUBLISHED_EVALUATION:
        return Check("evaluation", None, f"{text}; not the samples that NVIDIA published the digest of ({digest})")
    return Check("evaluation", True, f"{text}: exactly the published ones ({digest})")


def published_digest(records: Records) -> str:
    """Digest of input_ids as the published lists have it."""
    offsets = records.sequence_offsets
    rows = (records.input_ids[offsets[i] : offsets[i + 1]].tolist() for i in range(records.num_sequences))
    return input_ids_digest(rows)


def check_held_out(audits: Sequence[Audit], known: Hashes | None) -> Check:
    """Are the evaluation samples not trained on?"""
    if known is None or not len(known):
        return Check("held out", None, "no evaluation sample is long enough to tell")
    seen = sum(audit.seen for audit in audits)
    text = f"{seen:,} training sequences have the text of one of {len(known):,} evaluation samples"
    if seen <= _MOST_SEEN * len(known):
        return Check("held out", True, text)
    return Check("held out", None if seen <= _FEW_SEEN else False, text)


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


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of a data set")
    parser.add_argument("--vocab-file", type=Path, help="vocab.txt of a folder without prepared-*.json")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    add_jobs(parser)
    options = parser.parse_args()
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
