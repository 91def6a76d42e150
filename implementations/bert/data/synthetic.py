"""Made-up sequences for trying a machine out before its data is there."""

from __future__ import annotations

import numpy as np

from bert.data.format import Records

_NUM_FILES, _ROWS_PER_FILE = 4, 4096
_FULL_SHARE = 0.235  # share of Wikipedia sequences that are full (Krell et al. 2021, arXiv 2107.02027)
_BETA = (1.1, 2.164)  # shape of the other lengths, chosen for Wikipedia's mean of 254.5 at 512


def wikipedia_like_lengths(count: int, max_seq_length: int, generator: np.random.Generator) -> np.ndarray:
    """Lengths (int64) with Wikipedia's share of full sequences and, at 512, its mean; at least 5 tokens each."""
    lengths = 5 + np.floor(generator.beta(*_BETA, size=count) * (max_seq_length - 5)).astype(np.int64)
    lengths[generator.random(count) < _FULL_SHARE] = max_seq_length
    return lengths


def pair_rows(lengths: np.ndarray, max_seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs two by two, longest with shortest where both fit. Returns (order of sequences, row offsets)."""
    by_length = np.argsort(lengths, kind="stable")
    order: list[int] = []
    offsets = [0]
    low, high = 0, len(by_length) - 1
    while low <= high:
        order.append(int(by_length[high]))
        # The longest takes as many of the shortest as fit, three sequences a row at the most.
        used, high = int(lengths[by_length[high]]), high - 1
        while low <= high and len(order) - offsets[-1] < 3 and used + lengths[by_length[low]] <= max_seq_length:
            used += int(lengths[by_length[low]])
            order.append(int(by_length[low]))
            low += 1
        offsets.append(len(order))
    return np.array(order), np.array(offsets)


def synthetic_records(num_rows: int, max_seq_length: int, vocab_size: int, packed: bool, seed: int) -> Records:
    """At most ``num_rows`` rows of random tokens, 15% of them masked, with random labels."""
    generator = np.random.default_rng(seed)
    lengths = wikipedia_like_lengths(2 * num_rows if packed else num_rows, max_seq_length, generator)
    row_offsets = None
    if packed:
        order, row_offsets = pair_rows(lengths, max_seq_length)
        row_offsets = row_offsets[: num_rows + 1]
        lengths = lengths[order[: row_offsets[-1]]]
    counts = np.maximum(1, np.rint(lengths * 0.15)).astype(np.int64)
    positions = [
        1 + np.sort(generator.choice(length - 1, size=count, replace=False))
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
    ]
    return Records(
        input_ids=generator.integers(0, vocab_size, int(lengths.sum())).astype(np.int16),
        sequence_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_b_start=(lengths // 2).astype(np.int16),
        masked_lm_positions=np.concatenate(positions).astype(np.int16),
        masked_lm_ids=generator.integers(0, vocab_size, int(counts.sum())).astype(np.int16),
        masked_lm_offsets=np.concatenate([[0], np.cumsum(counts)]),
        next_sentence_labels=generator.integers(0, 2, len(lengths)).astype(np.int8),
        row_offsets=row_offsets,
    )


class SyntheticShards:
    """Stands in for a folder of record files."""

    def __init__(self, max_seq_length: int, vocab_size: int, packed: bool) -> None:
        self.vocab_md5 = ""
        self._files = [
            synthetic_records(_ROWS_PER_FILE, max_seq_length, vocab_size, packed, seed) for seed in range(_NUM_FILES)
        ]

    def row_counts(self) -> np.ndarray:
        """Rows of every file, int64."""
        return np.array([records.num_rows for records in self._files], dtype=np.int64)

    def __getitem__(self, number: int) -> Records:
        """The records of one file."""
        return self._files[number]
