"""A hash of every sequence, and their sum: proof of a set of sequences in whatever order.

The hash is BLAKE2b (RFC 7693) of 16 bytes without a key. hashlib takes as long to begin, feed and end one as to hash a
sequence, so it is compiled here; without numba, hashlib does it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .compiled import compiled, numba

Array = npt.NDArray[Any]

HASH_BYTES = 16
_HEAD = 4  # numbers of a sequence that come before its tokens
_BLOCK = 64  # 16-bit numbers that BLAKE2b takes at a time
_START = np.array(
    [
        *(0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1),
        *(0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179),
    ],
    dtype=np.uint64,
)
_ORDERS = """
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15   14 10 4 8 9 15 13 6 1 12 0 2 11 7 5 3
    11 8 12 0 5 2 15 13 10 14 3 6 7 1 9 4   7 9 3 1 13 12 11 14 2 6 5 10 4 0 15 8
    9 0 5 7 2 4 10 15 14 1 11 12 6 8 3 13   2 12 6 10 0 11 8 3 4 13 7 5 15 14 1 9
    12 5 1 15 14 13 4 10 0 7 6 3 9 2 8 11   13 11 7 14 12 1 3 9 5 0 15 4 8 6 2 10
    6 15 14 9 11 3 0 8 12 2 13 7 1 4 10 5   10 2 8 4 7 6 1 5 15 11 9 14 3 12 13 0
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15   14 10 4 8 9 15 13 6 1 12 0 2 11 7 5 3
"""
_ORDER = np.array(_ORDERS.split(), dtype=np.uint64)  # of the 16 words of a block in each of 12 rounds


def sum_of_hashes(
    heads: Array, input_ids: Array, positions: Array, labels: Array, offsets: Array, masked_offsets: Array
) -> int:
    """Sum modulo 2^128 of the hash of each sequence: its head, tokens, masked positions and labels.

    heads: int16 (N, 4). The others, contiguous, are those of Records; all are hashed as 16-bit numbers, low byte first.
    Of a sequence that has an id beyond 16 bits all ids count as 32-bit numbers, low half first: how wide a file stores
    them changes nothing.

    Raises:
        ValueError: offsets that fall, or reach beyond the arrays: compiled code does not look.
    """
    lengths, counts = np.diff(offsets), np.diff(masked_offsets)
    ends = (offsets, len(input_ids)), (masked_offsets, len(positions)), (masked_offsets, len(labels))
    if (lengths < 0).any() or (counts < 0).any() or any(o[0] < 0 or o[-1] > end for o, end in ends):
        raise ValueError("offsets fall or reach beyond the arrays")
    if not len(heads):
        return 0
    if numba is None:
        return _interpreted_sum(heads, input_ids, positions, labels, offsets, masked_offsets)
    input_ids, labels = (_signed(ids) for ids in (input_ids, labels))
    width = max(input_ids.itemsize, labels.itemsize) // 2
    largest = _HEAD + int((width * lengths + (1 + width) * counts).max())
    message = np.zeros(-(-largest // _BLOCK) * _BLOCK, dtype=np.int16)
    low, high = _sum(heads, input_ids, positions, labels, offsets, masked_offsets, message, message.view(np.uint64))
    return int(low) + (int(high) << 64)


def _signed(ids: Array) -> Array:
    """The ids as int32 where they are wider than 16 bits, else as they are."""
    return ids if ids.itemsize == 2 else np.ascontiguousarray(ids, dtype=np.int32)


def add_multiset_digests(digests: Sequence[str]) -> str:
    """Multiset digest of the union of the files that have these."""
    return f"{sum(int(digest, 16) for digest in digests) % (1 << 128):032x}"


def _interpreted_sum(
    heads: Array, input_ids: Array, positions: Array, labels: Array, offsets: Array, masked_offsets: Array
) -> int:
    total = token = masked = 0
    for i, (token_end, masked_end) in enumerate(zip(offsets[1:].tolist(), masked_offsets[1:].tolist(), strict=True)):
        ids, to = input_ids[token:token_end], labels[masked:masked_end]
        wide = any(part.size and not -(2**15) <= part.min() <= part.max() < 2**15 for part in (ids, to))
        dtype = np.int32 if wide else np.int16
        h = hashlib.blake2b(heads[i].tobytes(), digest_size=HASH_BYTES)
        h.update(ids.astype(dtype).tobytes())
        h.update(positions[masked:masked_end].tobytes())
        h.update(to.astype(dtype).tobytes())
        total += int.from_bytes(h.digest(), "little")
        token, masked = token_end, masked_end
    return total % (1 << 128)


@compiled
def _mixed(a, b, c, d, x, y):  # type: ignore[no-untyped-def]
    """Function G of section 3.1."""
    a = a + b + x
    d ^= a
    d = (d >> np.uint64(32)) | (d << np.uint64(32))
    c = c + d
    b ^= c
    b = (b >> np.uint64(24)) | (b << np.uint64(40))
    a = a + b + y
    d ^= a
    d = (d >> np.uint64(16)) | (d << np.uint64(48))
    c = c + d
    b ^= c
    b = (b >> np.uint64(63)) | (b << np.uint64(1))
    return a, b, c, d


@compiled
def _is_wide(ids, first, last):  # type: ignore[no-untyped-def]
    """Whether one of ids[first:last] is beyond 16 bits."""
    beyond = np.int64(0)
    for j in range(first, last):
        beyond |= np.int64(ids[j]) ^ np.int64(np.int16(ids[j]))
    return beyond != 0


@compiled
def _put_ids(message, size, ids, first, last, wide):  # type: ignore[no-untyped-def]
    """Appends ids[first:last] to the message; its new size."""
    if wide:
        for j in range(first, last):
            message[size] = np.int16(np.int64(ids[j]) & 0xFFFF)
            message[size + 1] = np.int16(np.int64(ids[j]) >> 16)
            size += 2
    else:
        for j in range(first, last):
            message[size] = np.int16(ids[j])
            size += 1
    return size


@compiled
def _sum(heads, input_ids, positions, labels, offsets, masked_offsets, message, words):  # type: ignore[no-untyped-def]
    """`message` takes the longest sequence, in whole blocks; `words` are its bytes, 8 at a time."""
    low = np.uint64(0)
    high = np.uint64(0)
    h = np.empty(8, dtype=np.uint64)
    for i in range(heads.shape[0]):
        size = 0
        for j in range(heads.shape[1]):
            message[size] = heads[i, j]
            size += 1
        begin, end, first, last = offsets[i], offsets[i + 1], masked_offsets[i], masked_offsets[i + 1]
        wide = input_ids.itemsize > 2 and (_is_wide(input_ids, begin, end) or _is_wide(labels, first, last))
        size = _put_ids(message, size, input_ids, begin, end, wide)
        for j in range(first, last):
            message[size] = positions[j]
            size += 1
        size = _put_ids(message, size, labels, first, last, wide)
        num_blocks = (size + _BLOCK - 1) // _BLOCK
        message[size : num_blocks * _BLOCK] = 0
        h[:] = _START
        h[0] ^= np.uint64(0x01010000 | HASH_BYTES)
        for block in range(num_blocks):
            last = block == num_blocks - 1
            _compress(h, words[16 * block :], np.uint64(2 * size if last else 2 * _BLOCK * (block + 1)), last)
        low += h[0]
        high += h[1] + (np.uint64(1) if low < h[0] else np.uint64(0))
    return low, high


@compiled
def _compress(h, words, num_bytes, last):  # type: ignore[no-untyped-def]
    """Function F of section 3.2: takes a block of 16 words in, `num_bytes` into the message."""
    a0, a1, a2, a3, b0, b1, b2, b3 = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
    c0, c1, c2, c3 = _START[0], _START[1], _START[2], _START[3]
    d0, d1, d2, d3 = _START[4] ^ num_bytes, _START[5], _START[6], _START[7]
    if last:
        d2 = ~d2
    for first in range(0, 192, 16):
        o = _ORDER[first : first + 16]
        a0, b0, c0, d0 = _mixed(a0, b0, c0, d0, words[o[0]], words[o[1]])
        a1, b1, c1, d1 = _mixed(a1, b1, c1, d1, words[o[2]], words[o[3]])
        a2, b2, c2, d2 = _mixed(a2, b2, c2, d2, words[o[4]], words[o[5]])
        a3, b3, c3, d3 = _mixed(a3, b3, c3, d3, words[o[6]], words[o[7]])
        a0, b1, c2, d3 = _mixed(a0, b1, c2, d3, words[o[8]], words[o[9]])
        a1, b2, c3, d0 = _mixed(a1, b2, c3, d0, words[o[10]], words[o[11]])
        a2, b3, c0, d1 = _mixed(a2, b3, c0, d1, words[o[12]], words[o[13]])
        a3, b0, c1, d2 = _mixed(a3, b0, c1, d2, words[o[14]], words[o[15]])
    h[0] ^= a0 ^ c0
    h[1] ^= a1 ^ c1
    h[2] ^= a2 ^ c2
    h[3] ^= a3 ^ c3
    h[4] ^= b0 ^ d0
    h[5] ^= b1 ^ d1
    h[6] ^= b2 ^ d2
    h[7] ^= b3 ^ d3
