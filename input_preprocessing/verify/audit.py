"""Audit of a record file, sequence by sequence: tokens, masks and labels must be as the instance
maker writes them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bert.data import kept_digests
from bert.data.compiled import compiled
from bert.data.format import verify_records
from bert.data.records import Metadata
from input_preprocessing.text.vocabulary import Vocabulary

Hashes = npt.NDArray[np.uint64]

# With this many masked tokens (80 tokens at 15%), two sequences do not have the same text by
# chance.
TELLING_MASKS = 12

_FAULTS = (
    "",
    "does not start with [CLS]",
    "has no [SEP] before segment B",
    "does not end with [SEP]",
    "has a mask on [CLS] or [SEP]",
    "has a special token as a label",
    "has a [MASK] where nothing is masked",
    "has the wrong number of masked tokens for its length",
    "has a token id outside the vocabulary",
)


class Rules(NamedTuple):
    """Rules that every sequence must obey."""

    special: tuple[int, ...]  # ids of [CLS], [SEP], [MASK] and, if there is one, [PAD]
    vocab_size: int
    num_masked: tuple[int, ...]  # masked tokens of a sequence by length


class Audit(NamedTuple):
    """Counts and digests of a record file."""

    path: Path
    metadata: Metadata
    sequences: int
    rows: int
    tokens: int
    masked: int
    replaced: tuple[int, int]  # masked tokens that became [MASK], and those kept
    most_per_row: int
    fault: str  # of the first invalid sequence, or empty
    originals: Hashes  # of each text with TELLING_MASKS, without masks; empty if `known` were given
    seen: int  # sequences whose original text is among the known ones


def rules_of(words: Vocabulary, recipe: dict[str, Any]) -> Rules:
    """Rules for a vocabulary and the options of a preparation."""
    names = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
    special = tuple(words.ids[name] for name in names if name in words.ids)
    longest, most = recipe["max_seq_length"], recipe["max_predictions_per_seq"]
    share = recipe["masked_lm_prob"]
    # As the instance maker counts: [CLS] and [SEP] among n tokens are never masked. Without
    # next-sentence prediction there is one segment, and one [SEP].
    fixed = 3 if recipe["nsp"] else 2
    counts = tuple(
        min(most, max(1, round(n * share)), max(0, n - fixed))
        for n in range(longest + 1)
    )
    return Rules(special=special, vocab_size=len(words), num_masked=counts)


def audit(path: Path, rules: Rules, known: Hashes | None = None) -> Audit:
    """Reads a whole file and checks digests and every sequence.

    Args:
        path: a record file.
        rules: to check; the first violation is reported in `fault`.
        known: sorted hashes of original texts to look for.

    Raises:
        DataError: unreadable, out of range, or a digest does not match.
    """
    identity = kept_digests.identity_of(path)
    records, metadata = verify_records(path)
    # So that a run which follows need not read the file again.
    kept_digests.keep(path, identity, metadata.content_digest)
    originals = np.zeros(records.num_sequences, dtype=np.uint64)
    counts = np.zeros(2, dtype=np.int64)
    fault, where = _check(
        (
            records.input_ids,
            records.sequence_offsets,
            records.segment_b_start,
            records.masked_lm_positions,
            records.masked_lm_ids,
            records.masked_lm_offsets,
        ),
        (np.array(rules.special), rules.vocab_size, np.array(rules.num_masked)),
        counts,
        originals,
    )
    telling = np.diff(records.masked_lm_offsets) >= TELLING_MASKS
    originals = originals[telling]
    seen = 0 if known is None else int(np.isin(originals, known).sum())
    # Originals are kept of the evaluation set alone (known is None): those of 157 million training
    # sequences would take 1.3 GB, and are only looked up.
    return Audit(
        path=path,
        metadata=metadata,
        sequences=records.num_sequences,
        rows=records.num_rows,
        tokens=len(records.input_ids),
        masked=len(records.masked_lm_ids),
        replaced=(int(counts[0]), int(counts[1])),
        most_per_row=1
        if records.row_offsets is None
        else int(np.diff(records.row_offsets).max(initial=0)),
        fault=f"sequence {where} {_FAULTS[fault]}" if fault else "",
        originals=originals if known is None else originals[:0],
        seen=seen,
    )


@compiled
def _mix(state, value):  # type: ignore[no-untyped-def]
    """One step of a 64-bit hash (the finaliser of splitmix64)."""
    z = state + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(value) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def _fault_of(arrays, rules, i):  # type: ignore[no-untyped-def]
    """Index in _FAULTS of the first fault of sequence i."""
    ids, offsets, b_starts, positions, labels, masked_offsets = arrays
    special, vocab_size, num_masked = rules
    start, end, b_start = offsets[i], offsets[i + 1], b_starts[i]
    first, last = masked_offsets[i], masked_offsets[i + 1]
    wanted = num_masked[end - start] if end - start < num_masked.size else -1
    if ids[start] != special[0]:
        return 1
    if b_start < 1 or ids[start + b_start - 1] != special[1]:
        return 2
    if ids[end - 1] != special[1]:
        return 3
    at = first
    for j in range(start, end):
        if ids[j] >= vocab_size:
            return 8
        if at < last and positions[at] == j - start:
            if j == start or j == end - 1 or j - start == b_start - 1:
                return 4
            for k in range(special.size):
                if labels[at] == special[k]:
                    return 5
            if labels[at] >= vocab_size:
                return 8
            at += 1
        elif ids[j] == special[2]:
            return 6
    if last - first != wanted:
        return 7
    return 0


@compiled
def _check(arrays, rules, counts, originals):  # type: ignore[no-untyped-def]
    """Fills in counts and the hash of each text without masks; returns (first fault, its
    sequence).
    """
    ids, offsets, _, positions, labels, masked_offsets = arrays
    mask = rules[0][2]
    first_fault = 0
    where = -1
    for i in range(originals.size):
        start, end = offsets[i], offsets[i + 1]
        at, last = masked_offsets[i], masked_offsets[i + 1]
        if first_fault == 0:
            first_fault = _fault_of(arrays, rules, i)
            where = i
        original = np.uint64(end - start)
        for j in range(start, end):
            token = ids[j]
            if at < last and positions[at] == j - start:
                counts[0] += token == mask
                counts[1] += token == labels[at]
                token = labels[at]
                at += 1
            original = _mix(original, token)
        originals[i] = original
    return first_fault, where
