"""Verifies a prepared data set: counts, digests, every sequence exactly once, labels, evaluation
set.

FOLDER is the --outputdir of prepare_data.sh; every data set finished there (prepared-*.json) is
verified. Prints a table and a one-line verdict; exit code 0 only if no check fails.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.data import prepared
from bert.data.digests import add_multiset_digests
from bert.data.format import open_records
from bert.data.prepared import PUBLISHED_EVALUATION, published_digest
from bert.data.records import DataError
from bert.data.shards import INDEX
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records.evalset import NUM_EVAL_SAMPLES
from input_preprocessing.stage import manifest
from input_preprocessing.stage.parallel import run_tasks
from input_preprocessing.text import vocabulary
from input_preprocessing.verify.audit import Audit, Hashes, Rules, audit, rules_of

# Tolerance of the shares of masks; exceeded by chance in one of 500 million data sets.
_SIGMAS = 6.0
_MOST_SEEN = 0.01  # share of evaluation samples in the training data, since some articles are copies of others
# Training sequences; a single duplicated text makes several, a large share of few samples.
_FEW_SEEN = 10
_MARKS = {True: "ok", False: "FAILED", None: "note"}


class Check(NamedTuple):
    """One line of the table; None stands for a note."""

    name: str
    holds: bool | None
    detail: str


def _check(name: str, text: str, problem: str | None = None) -> Check:
    """A check that holds unless there is a problem."""
    return Check(name, not problem, problem or text)


def verify(folder: Path, *, jobs: int) -> dict[str, list[Check]]:
    """Checks of every data set in the folder, by its name. Raises DataError if there is none."""
    manifests = sorted(folder.glob("prepared-*.json"))
    if not manifests:
        raise DataError(
            f"{folder} has no prepared-*.json; give the folder of a data set, or import its records first"
        )
    names = [path.stem.removeprefix("prepared-") for path in manifests]
    return {
        name: _verify(folder, path, jobs)
        for name, path in zip(names, manifests, strict=True)
    }


def _audit_task(rules: Rules, known: Hashes | None, path: Path) -> Audit | str:
    try:
        return audit(path, rules, known)
    except DataError as error:
        return str(error)


def _audit_all(
    files: Sequence[Path], rules: Rules, known: Hashes | None, label: str, jobs: int
) -> tuple[list[Audit], list[str]]:
    """Audits of the readable files, and errors of the others."""
    results = run_tasks(label, partial(_audit_task, rules, known), files, jobs=jobs)
    audits = [each for each in results if isinstance(each, Audit)]
    return audits, [each for each in results if isinstance(each, str)]


def _check_contents(
    folder: Path,
    made: prepared.Manifest,
    audits: Sequence[Audit],
    errors: Sequence[str],
) -> Check:
    """Every file is valid and as prepared: records, vocabulary, model sizes and checkpoint."""
    total, problem = len(audits) + len(errors), ""
    digests = {
        str(each.path.relative_to(folder)): each.metadata.content_digest
        for each in audits
    }
    for name in made.files:
        if not name.endswith(".hdf5") and (folder / name).is_file():
            digests[name] = manifest.md5_of(folder / name)
    other = [name for name, digest in digests.items() if digest != made.files[name]]
    if errors:
        problem = f"{len(errors)} of {total} record files are damaged; {errors[0]}"
    elif other:
        problem = f"{len(other)} of {len(digests)} files are not the ones prepared: {other[0]}"
    text = f"every sequence of {total:,} record files is as prepared, by digest"
    return _check("contents", text, problem)


def _content_checks(audits: list[Audit]) -> list[Check]:
    """Checks of labels and masks."""
    masked = sum(audit.masked for audit in audits)
    tokens = sum(audit.tokens for audit in audits)
    # Special tokens, masks and labels of every sequence are in the right places.
    faulty = [f"{audit.path}: {audit.fault}" for audit in audits if audit.fault]
    share = masked / tokens if tokens else 0
    text = (
        f"[CLS], [SEP], masks and labels of every sequence in place; {share:.2%} masked"
    )
    labels = _check(
        "labels", text, f"{faulty[0]} ({len(faulty)} such files)" if faulty else None
    )
    # Within the tolerance, 80% of the masked tokens became [MASK], 10% were kept, 10% replaced by
    # random ones.
    masks = Check("masks", None, "nothing is masked")
    if masked:
        shares = [sum(audit.replaced[i] for audit in audits) / masked for i in range(2)]
        # A random token may happen to be the original one or [MASK]: covered by the 0.001.
        spread = (
            0.001 + _SIGMAS * (wanted * (1 - wanted) / masked) ** 0.5
            for wanted in (0.8, 0.1)
        )
        unusual = any(np.abs(np.subtract(shares, (0.8, 0.1))) > [*spread])
        text = f"{shares[0]:.2%} [MASK], {shares[1]:.2%} kept, {1 - sum(shares):.2%} random"
        masks = _check(
            "masks", text, f"{text}; expected 80%, 10%, 10%" if unusual else None
        )
    return [labels, masks]


def _verify(folder: Path, path: Path, jobs: int) -> list[Check]:
    made = prepared.read(path)
    words = vocabulary.load(folder / "phase1" / "vocab.txt")
    rules = rules_of(words, made.recipe)
    present = {name for name in made.files if (folder / name).is_file()}
    evaluation = [folder / name for name in made.evaluation if name in present]
    training = [folder / name for name in made.records if name in present]
    # First the evaluation set, whose texts are then looked for in the training data.
    eval_audits, eval_errors = _audit_all(
        evaluation, rules, None, "read evaluation set", 1
    )
    known = np.unique(eval_audits[0].originals) if eval_audits else None
    audits, errors = _audit_all(training, rules, known, "read training records", jobs)
    both = [*eval_audits, *audits]
    return [
        _check_files(folder, made, present, is_readable=not errors),
        Check("text", *made.benchmark_text),
        _check_contents(folder, made, both, [*eval_errors, *errors]),
        _check_options(folder, made, both),
        *_check_numbers(made, path.name, audits),
        *_content_checks(audits),
        _check_evaluation(eval_audits, made),
        check_held_out(audits, known),
    ]


def _check_files(
    folder: Path, made: prepared.Manifest, present: set[str], is_readable: bool
) -> Check:
    """All files are present with their indices, and no others that a trainer would read."""
    problem = ""
    if missing := [name for name in made.files if name not in present]:
        problem = f"{len(missing)} of {len(made.files)} are missing: {missing[0]}"
    elif strays := manifest.strays(folder):
        problem = (
            f"{len(strays)} more than were prepared: {strays[0].relative_to(folder)}"
        )
    elif is_readable and (odd := manifest.odd_indices(folder, made, ())):
        index = folder / odd[0] / INDEX
        problem = f"{index} is missing or does not match the shards; use --repair"
    return _check(
        "files", f"all {len(made.files):,} that were prepared, no others", problem
    )


def _check_options(
    folder: Path, made: prepared.Manifest, audits: Sequence[Audit]
) -> Check:
    """All files were made with the manifest's options, from its texts."""
    problem = ""
    for each in audits:
        other = made.difference(str(each.path.relative_to(folder)), each.metadata)
        if other and not problem:
            problem = f"{each.path} has {other}"
    # Shown even if all is well: a reader compares them with another data set's.
    names = ("max_seq_length", "random_seed", "dupe_factor", "vocab_md5")
    text = ", ".join(f"{name} {made.recipe[name]}" for name in names)
    return _check("options", text, problem)


def _check_numbers(
    made: prepared.Manifest, name: str, audits: Sequence[Audit]
) -> list[Check]:
    """Counts and digest are those of all training instances, and rows as wanted. name: the
    manifest's.
    """
    problem = ""
    for unit in ("sequences", "rows", "tokens"):
        # Said by the manifest, counted in the files.
        counted, stated = (
            sum(getattr(audit, unit) for audit in audits),
            getattr(made, unit),
        )
        if counted != stated and not problem:
            problem = (
                f"{counted:,} {unit}, {stated:,} were prepared according to {name}"
            )
    text = f"{made.sequences:,} sequences in {made.rows:,} rows, {made.tokens:,} tokens"
    counts = _check("counts", text, problem)
    # The shards' sequences are exactly the training instances, with repetitions.
    digest = add_multiset_digests([audit.metadata.multiset_digest for audit in audits])
    other = f"the shards are not the permutation of the training instances that {name} records"
    problem = "" if digest == made.multiset_digest else other
    text = f"every training instance exactly once (multiset digest {digest[:16]}...)"
    once = _check("coverage", text, problem)
    # No row has more sequences than allowed. Tokens per row are checked on reading.
    most = max((audit.most_per_row for audit in audits), default=0)
    allowed = made.recipe["max_sequences_per_row"]
    capacity = sum(audit.rows * audit.metadata.max_seq_length for audit in audits)
    share = sum(audit.tokens for audit in audits) / capacity if capacity else 0
    problem = (
        f"a row has {most} sequences, at most {allowed} are allowed"
        if most > allowed
        else ""
    )
    text = f"at most {most} sequence{'s' * (most > 1)} in a row, {share:.2%} of token slots filled"
    return [counts, once, _check("rows", text, problem)]


def _check_evaluation(audits: Sequence[Audit], made: prepared.Manifest) -> Check:
    """Whether the evaluation set is valid, of the prepared size and, for the benchmark's text, the
    published one.
    """
    name = f"prepared-{made.recipe['kind']}.json"
    if len(audits) != 1:
        return Check(
            "evaluation", False, f"{len(audits)} readable files of {name}, expected one"
        )
    audit, problem = audits[0], ""
    text = f"{audit.sequences:,} samples, {audit.masked:,} masked tokens"
    if audit.fault:
        problem = f"{audit.path}: {audit.fault}"
    elif audit.sequences != made.eval_samples:
        were = f"{made.eval_samples:,} were prepared according to {name}"
        problem = f"{audit.sequences:,} samples, {were}"
    elif _is_benchmarks(made):
        digest = published_digest(open_records(audit.path)[0])
        if digest != PUBLISHED_EVALUATION:
            other = (
                f"their digest is {digest}, not the published {PUBLISHED_EVALUATION}"
            )
            words = f"{audit.path}: {text}, of the benchmark's text and options"
            problem = f"{words}, but {other}: prepare it again"
        text += f": exactly the published ones ({digest})"
    return _check("evaluation", text, problem)


def _is_benchmarks(made: prepared.Manifest) -> bool:
    """Whether evaluation text, vocabulary and options are the benchmark's: the published digest is
    that of them.
    """
    wanted = {
        "num_eval_samples": NUM_EVAL_SAMPLES,
        **dataclasses.asdict(SamplingConfig()),
    }
    wanted["vocab_md5"] = prepared.VOCAB_MD5
    same_options = all(made.recipe[name] == value for name, value in wanted.items())
    return same_options and made.texts.get("eval.txt") == prepared.TEXT_MD5["eval.txt"]


def check_held_out(audits: Sequence[Audit], known: Hashes | None) -> Check:
    """Whether the evaluation samples are not in the training data."""
    if known is None or not len(known):
        return Check("held out", None, "unknown: all evaluation samples are too short")
    seen = sum(audit.seen for audit in audits)
    text = f"{seen:,} training sequences have the text of one of {len(known):,} evaluation samples"
    # Short texts repeat by chance (headings, lists): a few are no leak, and not proof of none.
    tolerable = None if seen <= _FEW_SEEN else False
    return Check("held out", seen <= _MOST_SEEN * len(known) or tolerable, text)


def failures(by_part: dict[str, list[Check]]) -> list[str]:
    """Failed checks, as text."""
    failed = (
        (name, check)
        for name, checks in by_part.items()
        for check in checks
        if check.holds is False
    )
    return [f"{name}: {check.name}: {check.detail}" for name, check in failed]


def verdict(folder: Path, by_part: dict[str, list[Check]]) -> str:
    """The verdict in one line."""
    total = sum(len(checks) for checks in by_part.values())
    if failed := failures(by_part):
        return (
            f"{folder}: NOT VALID: {len(failed)} of {total} checks failed; {failed[0]}"
        )
    return f"{folder}: valid: {', '.join(by_part)}, all {total} checks hold"


def main(options: argparse.Namespace) -> None:
    by_part = verify(options.folder, jobs=options.jobs)
    if options.json:
        checked = {
            name: [check._asdict() for check in checks]
            for name, checks in by_part.items()
        }
        print(json.dumps({"valid": not failures(by_part), "checks": checked}))
    for name, checks in by_part.items() if not options.json else ():
        print(f"{name}\n")
        for check in checks:
            print(f" {check.name:<16} {_MARKS[check.holds]:<6} {check.detail}")
        print()
    line = verdict(options.folder, by_part)
    if failures(by_part):
        raise DataError(line)
    print(line, file=sys.stderr if options.json else sys.stdout)
