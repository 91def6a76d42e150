"""Order-free digests: a hash of every sequence, and their sum.

The hash is BLAKE2b (RFC 7693) of 16 bytes without a key. Compiled code lays out the messages, since
feeding hashlib a sequence in pieces takes longer than hashing it.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from .compiled import compiled
from .records import Array, Records

HASH_BYTES = 16
_HEAD = 4  # numbers before the tokens of a sequence
_AT_ONCE = 4096  # sequences laid out at a time


def sum_of_hashes(records: Records) -> int:
    """Sum modulo 2^128 of the hash of each sequence: its head, tokens, masked positions and labels.

    All are hashed as 16-bit numbers, low byte first. In a sequence with an id beyond 16 bits all
    ids are hashed as 32-bit numbers, low half first, so that the digest does not depend on how wide
    a file stores them.

    Raises:
        ValueError: offsets that fall, or reach beyond the arrays; compiled code does not check
        bounds.
    """
    _check_offsets(records)
    lengths, counts = records.sequence_lengths, np.diff(records.masked_lm_offsets)
    columns = lengths, counts, records.segment_b_start, records.next_sentence_labels
    heads = np.stack(columns, axis=1).astype(np.int16)
    input_ids, labels = (
        np.ascontiguousarray(ids, np.int16 if ids.itemsize == 2 else np.int32)
        for ids in (records.input_ids, records.masked_lm_ids)
    )
    flat = input_ids, np.ascontiguousarray(records.masked_lm_positions), labels
    width = max(input_ids.itemsize, labels.itemsize) // 2  # 16-bit numbers of an id
    total = 0
    for begin in range(0, len(heads), _AT_ONCE):
        end = min(begin + _AT_ONCE, len(heads))
        some, bounds = slice(begin, end), slice(begin, end + 1)
        ids = width * lengths[some].sum() + (1 + width) * counts[some].sum()
        messages = np.empty(int(_HEAD * (end - begin) + ids), np.int16)
        message_ends = np.zeros(end - begin + 1, np.int64)
        offsets = (
            np.ascontiguousarray(each[bounds])
            for each in (records.sequence_offsets, records.masked_lm_offsets)
        )
        _lay_out(heads[some], *flat, *offsets, messages, message_ends)
        data = messages.data.cast("B")
        # hashlib in C, a call a sequence, on slices that are not copied.
        for begin_of, end_of in itertools.pairwise(message_ends.tolist()):
            message = data[begin_of:end_of]
            hashed = hashlib.blake2b(message, digest_size=HASH_BYTES).digest()
            total += int.from_bytes(hashed, "little")
    return total % (1 << 128)


def _check_offsets(records: Records) -> None:
    """Before compiled code, which would read beyond the arrays."""
    for bounds, array in (
        (records.sequence_offsets, records.input_ids),
        (records.masked_lm_offsets, records.masked_lm_positions),
        (records.masked_lm_offsets, records.masked_lm_ids),
    ):
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > len(array):
            raise ValueError("offsets fall or reach beyond the arrays")


def add_multiset_digests(digests: Sequence[str]) -> str:
    """Multiset digest of the union of files with these digests."""
    return f"{sum(int(digest, 16) for digest in digests) % (1 << 128):032x}"


def digest_of_tensors(tensors: Iterable[tuple[str, Array]]) -> str:
    """Digest of weights by name, in any order; ignores zeros at the end of a tensor, which are
    padding.
    """
    total = 0
    for name, tensor in tensors:
        numbers = np.ascontiguousarray(tensor, "<f4").tobytes().rstrip(b"\0")
        hashed = hashlib.blake2b(
            name.encode() + b"\n" + numbers, digest_size=HASH_BYTES
        )
        # A sum, as for sequences, since files of weights list their tensors in different orders.
        total += int.from_bytes(hashed.digest(), "little")
    return f"{total % (1 << 128):032x}"


@compiled
def _is_wide(ids):  # type: ignore[no-untyped-def]
    """Whether an id is beyond 16 bits."""
    return (
        ids.itemsize > 2
        and ids.size > 0
        and (ids.min() < -(2**15) or ids.max() >= 2**15)
    )


@compiled
def _put_ids(message, size, ids, wide):  # type: ignore[no-untyped-def]
    """Appends ids of 16 bits, or of 32, low half first, to the message; returns its new size."""
    step = 2 if wide else 1
    end = size + step * ids.size
    message[size:end:step] = ids.astype(np.int16)
    if wide:
        message[size + 1 : end : 2] = (ids >> 16).astype(np.int16)
    return end


@compiled
def _lay_out(  # type: ignore[no-untyped-def]
    heads, input_ids, positions, labels, offsets, masked_offsets, message, ends
):
    """Writes the messages of the sequences end to end to `message`, and their ends in bytes to
    `ends`.
    """
    size = 0
    for i in range(heads.shape[0]):
        first, last = masked_offsets[i], masked_offsets[i + 1]
        sequence, answers = input_ids[offsets[i] : offsets[i + 1]], labels[first:last]
        # No loop over both: one may be writable, another type to numba.
        wide = _is_wide(sequence) or _is_wide(answers)
        message[size : size + _HEAD] = heads[i]
        size = _put_ids(message, size + _HEAD, sequence, wide)
        message[size : size + last - first] = positions[first:last]
        size = _put_ids(message, size + last - first, answers, wide)
        ends[i + 1] = 2 * size
