"""The sum is that of the sequences hashed one by one, part by part."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.data import digests


def arguments(lengths: list[int], counts: list[int], seed: int) -> list[np.ndarray]:
    """Random numbers of all 16 bits, in sequences of these lengths; of an odd seed, some ids of 17
    bits.
    """
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(-(2**15), 2**15, shape).astype(np.int16)

    flat = [numbers(sum(lengths)), numbers(sum(counts)), numbers(sum(counts))]
    if seed % 2:
        flat = (
            [ids.astype(np.int32) for ids in flat[:1]]
            + flat[1:2]
            + [ids.astype(np.int32) for ids in flat[2:]]
        )
        for ids in flat[::2]:
            ids[rng.random(len(ids)) < 0.003] += 1 << 16
    offsets = [
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        for sizes in (lengths, counts)
    ]
    return [numbers(len(lengths), 4), *flat, *offsets]


def hashed_apart(heads, input_ids, positions, labels, offsets, masked_offsets) -> int:
    total = token = masked = 0
    for i, (token_end, masked_end) in enumerate(
        zip(offsets[1:].tolist(), masked_offsets[1:].tolist(), strict=True)
    ):
        ids, to = input_ids[token:token_end], labels[masked:masked_end]
        wide = any(
            part.size and not -(2**15) <= part.min() <= part.max() < 2**15
            for part in (ids, to)
        )
        dtype = np.int32 if wide else np.int16
        h = hashlib.blake2b(heads[i].tobytes(), digest_size=16)
        h.update(ids.astype(dtype).tobytes())
        h.update(positions[masked:masked_end].tobytes())
        h.update(to.astype(dtype).tobytes())
        total += int.from_bytes(h.digest(), "little")
        token, masked = token_end, masked_end
    return total % (1 << 128)


@settings(deadline=None)  # the first call compiles
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 80)), min_size=1, max_size=8
    ),
    st.integers(0, 99),
)
def test_the_sum_is_that_of_hashlib(sizes: list[tuple[int, int]], seed: int) -> None:
    given_ = arguments([n for n, _ in sizes], [n for _, n in sizes], seed)
    assert digests.sum_of_hashes(*given_) == hashed_apart(*given_)


@pytest.mark.parametrize("length", [60, 61, 123, 124, 125])
def test_a_sequence_that_ends_where_a_block_does_is_hashed_as_by_hashlib(
    length: int,
) -> None:
    given_ = arguments([length] * 50, [0] * 50, length)  # with the head of four numbers
    assert digests.sum_of_hashes(*given_) == hashed_apart(*given_)


@pytest.mark.parametrize("offsets", [[0, 12, 9], [-1, 3, 10], [0, 5, 11]])
def test_offsets_that_leave_the_arrays_are_refused(offsets: list[int]) -> None:
    given_ = arguments([5, 5], [2, 2], 0)
    given_[4] = np.array(offsets)
    with pytest.raises(ValueError, match="offsets"):
        digests.sum_of_hashes(*given_)
