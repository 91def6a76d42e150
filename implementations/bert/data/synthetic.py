"""Synthetic sequences, to try a machine before it has data."""

import functools
from typing import Any

import numpy as np

from bert.data.packing import pack
from bert.data.records import Records, id_dtype, offsets_of, ragged_indices

_NUM_ROWS = 16_384
# Which best fit packs as well as the linear program, without scipy; benchmarks use no more.
_FEW_ROWS = 512
# Share of Wikipedia's sequences that are full (Krell et al. 2021, arXiv 2107.02027).
_FULL_SHARE = 0.235
# Shape of the other lengths, chosen for Wikipedia's mean of 254.5 at 512.
_BETA = 1.1, 2.164


@functools.cache
def _draws() -> np.ndarray:
    """Of shorter lengths, ascending; kept, as drawing and sorting take ten milliseconds."""
    return np.sort(np.random.default_rng(0).beta(*_BETA, size=100_000))


def wikipedia_like_lengths(
    count: int, max_seq_length: int, generator: np.random.Generator
) -> np.ndarray:
    """Lengths (int64), shuffled, at least 5: quantiles of Wikipedia's mix, so that even few have
    its mean.
    """
    num_full = round(_FULL_SHARE * count)
    num_partial = count - num_full
    levels = (np.arange(num_partial) + 0.5) / max(num_partial, 1)
    table = _draws()
    quantiles = table[(levels * len(table)).astype(np.int64)]
    partial = 5 + np.floor(quantiles * (max_seq_length - 5)).astype(np.int64)
    return generator.permutation(
        np.concatenate([partial, np.full(num_full, max_seq_length)])
    )


def synthetic_records(
    num_rows: int, max_seq_length: int, vocab_size: int, packed: bool, seed: int
) -> Records:
    """About ``num_rows`` rows of random tokens, 15% of them masked, with random labels; packed,
    about two per row.
    """
    generator = np.random.default_rng(seed)
    lengths = wikipedia_like_lengths(
        2 * num_rows if packed else num_rows, max_seq_length, generator
    )
    row_offsets = None
    if packed:  # with rows in random order, as in prepared data
        order, offsets = pack(lengths, max_seq_length, program=num_rows > _FEW_ROWS)
        rows = generator.permutation(len(offsets) - 1)
        sizes = np.diff(offsets)[rows]
        lengths = lengths[order[ragged_indices(offsets[rows], sizes)]]
        row_offsets = offsets_of(sizes)
    # The reference's rule (create_pretraining_data.py): at least one, half rounded to even.
    counts = np.maximum(1, np.rint(lengths * 0.15)).astype(np.int64)
    chosen = [
        generator.choice(length - 1, size=count, replace=False)
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
    ]
    # Sorted within each sequence, as in prepared records: in one array, which is quicker.
    begins = np.repeat(np.arange(len(counts)) * max_seq_length, counts)
    positions = np.sort(begins + np.concatenate(chosen)) - begins
    dtype = id_dtype(vocab_size)
    return Records(
        input_ids=generator.integers(0, vocab_size, int(lengths.sum())).astype(dtype),
        sequence_offsets=offsets_of(lengths),
        segment_b_start=(lengths // 2).astype(np.int16),
        # From 1 on, as position 0 is [CLS].
        masked_lm_positions=(1 + positions).astype(np.int16),
        masked_lm_ids=generator.integers(0, vocab_size, int(counts.sum())).astype(
            dtype
        ),
        masked_lm_offsets=offsets_of(counts),
        next_sentence_labels=generator.integers(0, 2, len(lengths)).astype(np.int8),
        row_offsets=row_offsets,
    )


class SyntheticShards:
    """Stand-in for Shards: one file."""

    def __init__(self, max_seq_length: int, vocab_size: int, packed: bool) -> None:
        self.vocab_md5 = ""
        self._files = [
            synthetic_records(_NUM_ROWS, max_seq_length, vocab_size, packed, seed=0)
        ]
        self.bins = [np.zeros(1, np.int64)]

    def row_counts(self) -> np.ndarray:
        """Rows of every file, int64."""
        return np.array([records.num_rows for records in self._files], dtype=np.int64)

    def identity(self) -> dict[str, Any]:
        """Empty: the data follow from the settings."""
        return {}

    def __getitem__(self, number: int) -> Records:
        """The records of one file."""
        return self._files[number]
