"""The checks of `verify`, from what was found in the files and what the manifest says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert.data.digests import add_multiset_digests
from bert.data.format import open_records
from bert.data.records import Records
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records.check_list import input_ids_digest
from input_preprocessing.records.evalset import NUM_SAMPLES
from input_preprocessing.stage.benchmark import TEXT_MD5
from input_preprocessing.stage.manifest import Manifest
from input_preprocessing.verify.audit import TELLING_MASKS, Audit, Hashes

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


def check_reading(audits: Sequence[Audit], errors: Sequence[str], made: dict[Path, str] | None = None) -> Check:
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


def check_options(audits: Sequence[Audit], made: Manifest, vocab_md5: str) -> Check:
    """Are all files made with the manifest's options and the vocabulary beside them?"""
    wanted = {name: made.recipe[name] for name in ("max_seq_length", "random_seed", "dupe_factor")}
    wanted["vocab_md5"] = vocab_md5
    for audit in audits:
        for name, value in wanted.items():
            if getattr(audit.metadata, name) != value:
                found = getattr(audit.metadata, name)
                return Check("options", False, f"{audit.path} was made with {name} {found}, not {value}")
    return Check("options", True, ", ".join(f"{name} {value}" for name, value in wanted.items()))


def check_counts(audits: Sequence[Audit], made: Manifest) -> Check:
    """Are there as many sequences, rows and tokens as were prepared?"""
    for name in ("sequences", "rows", "tokens"):
        found, wanted = sum(getattr(audit, name) for audit in audits), getattr(made, name)
        if found != wanted:
            return Check("counts", False, f"{found:,} {name}, {wanted:,} were prepared")
    return Check("counts", True, f"{made.sequences:,} sequences in {made.rows:,} rows, {made.tokens:,} tokens")


def check_once(audits: Sequence[Audit], made: Manifest) -> Check:
    """Are the shards' sequences exactly the training instances, each as often as the instance maker made it?"""
    found = add_multiset_digests([audit.metadata.multiset_digest for audit in audits])
    if found != made.multiset_digest:
        return Check("coverage", False, "the shards are not a permutation of the training instances")
    return Check("coverage", True, f"every training instance exactly once (multiset digest {found[:16]}...)")


def check_rows(audits: Sequence[Audit], made: Manifest) -> Check:
    """Does no row hold more sequences than allowed? Tokens of a row are checked on reading."""
    most = max((audit.most_per_row for audit in audits), default=0)
    allowed = int(str(made.recipe["max_sequences_per_row"]))
    if most > allowed:
        return Check("rows", False, f"a row holds {most} sequences, at most {allowed} were asked for")
    capacity = sum(audit.capacity for audit in audits)
    share = sum(audit.tokens for audit in audits) / capacity if capacity else 0
    return Check("rows", True, f"at most {most} sequence{'s' * (most > 1)} in a row, {share:.2%} of token slots filled")


def check_labels(audits: Sequence[Audit]) -> Check:
    """Does every sequence have its special tokens, masks and labels where they belong?"""
    faulty = [audit for audit in audits if audit.fault]
    if faulty:
        return Check("labels", False, f"{faulty[0].path}: {faulty[0].fault} ({len(faulty)} such files)")
    masked, tokens = (sum(getattr(audit, name) for audit in audits) for name in ("masked", "tokens"))
    share = masked / tokens if tokens else 0
    return Check("labels", True, f"[CLS], [SEP], masks and labels of every sequence in place; {share:.2%} masked")


def check_masks(audits: Sequence[Audit]) -> Check:
    """Did 80% of the masked tokens become [MASK], 10% stay, 10% become random ones, but for chance?"""
    masked = sum(audit.masked for audit in audits)
    if not masked:
        return Check("masks", None, "nothing is masked")
    shares = [sum(audit.replaced[i] for audit in audits) / masked for i in range(2)]
    text = f"{shares[0]:.2%} [MASK], {shares[1]:.2%} kept, {1 - sum(shares):.2%} random"
    # A random token is the one kept, or [MASK], once in a vocabulary: within the tolerance of 1 in 1,000.
    for share, wanted in zip(shares, (0.8, 0.1), strict=True):
        if abs(share - wanted) > 0.001 + _SIGMAS * (wanted * (1 - wanted) / masked) ** 0.5:
            return Check("masks", False, f"{text}; expected 80%, 10%, 10%")
    return Check("masks", True, text)


def check_next_sentences(audits: Sequence[Audit]) -> Check:
    """Is about every second segment B a random one?"""
    total = sum(audit.sequences for audit in audits)
    share = sum(audit.random_next for audit in audits) / total if total else 0
    usual = _USUAL_RANDOM_NEXT[0] <= share <= _USUAL_RANDOM_NEXT[1]
    note = "" if usual else "; unusual: are there documents of several sentences, with blank lines between them?"
    return Check("next sentences", True if usual else None, f"{share:.2%} random{note}")


def check_repeats(audits: Sequence[Audit]) -> Check:
    """Is there no long sequence twice? That happens where a text file, or a shard, is there twice.

    Takes 8 bytes a sequence: they are counted in 16 parts, so that sorting takes little more.
    """
    told = sum(len(audit.hashes) for audit in audits)
    repeats = 0
    for part in range(16):
        hashes = np.concatenate(
            [np.zeros(0, np.uint64), *(audit.hashes[audit.hashes >> np.uint64(60) == part] for audit in audits)]
        )
        repeats += len(hashes) - len(np.unique(hashes))
    what = f"sequences with {TELLING_MASKS} masked tokens or more"
    if repeats:
        return Check("repeats", False, f"{repeats:,} of {told:,} {what} are there twice: is a text file a copy?")
    return Check("repeats", True, f"none among {told:,} {what}")


def check_evaluation(audits: Sequence[Audit], made: Manifest) -> Check:
    """Is the evaluation set of the size prepared, sound, and the published one where the text is the benchmark's?"""
    if len(audits) != 1:
        return Check("evaluation", False, f"{len(audits)} readable files, expected one")
    audit = audits[0]
    if audit.fault:
        return Check("evaluation", False, f"{audit.path}: {audit.fault}")
    if audit.sequences != made.eval_samples:
        return Check("evaluation", False, f"{audit.sequences:,} samples, {made.eval_samples:,} were prepared")
    text = f"{audit.sequences:,} samples, {audit.masked:,} masked tokens"
    if not _is_benchmarks(made):
        return Check("evaluation", True, text)
    digest = published_digest(open_records(audit.path)[0])
    if digest != PUBLISHED_EVALUATION:
        return Check("evaluation", None, f"{text}; not the samples that NVIDIA published the digest of ({digest})")
    return Check("evaluation", True, f"{text}: exactly the published ones ({digest})")


def _is_benchmarks(made: Manifest) -> bool:
    options = dataclasses.asdict(SamplingConfig())
    return (
        made.texts.get("eval.txt") == TEXT_MD5["eval.txt"]
        and made.recipe["num_eval_samples"] == NUM_SAMPLES
        and all(made.recipe.get(name, True) == value for name, value in options.items())
    )


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
