"""MASKING=dynamic: new masks in every epoch, drawn during training, in place of those of the
records.

Each token but [CLS] and [SEP] is chosen independently with probability 0.15, so that counts vary;
of those chosen 80% become [MASK], 10% any token of the vocabulary, 10% stay (Devlin et al. 2019,
section 3.1; drawn at loading as in Liu et al. 2019, RoBERTa). The random numbers are a hash of
(seed, epoch, file, sequence, position), and so do not depend on rank, batch and resumption.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bert.data.batch import MASKED_SHARE, PretrainingBatch
from bert.data.records import DataError
from bert.data.sampler import Chosen

# Bounds of the draw that decides what replaces a chosen token.
_TO_MASK, _TO_RANDOM = 0.8, 0.9
_DRAWS = 3  # per position: whether it is chosen, what replaces it, which random token
_DEVIATIONS = 6  # standard deviations of headroom: practically never exceeded
_GAMMA, _MIX_1, _MIX_2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class MaskTokens:
    """Ids of a vocabulary's special tokens, and its size. -1: has no such."""

    cls: int
    sep: int
    mask: int
    size: int

    @classmethod
    def read(cls, path: Path, vocab_md5: str) -> MaskTokens:
        """Reads a vocab.txt. vocab_md5: of the records' vocabulary, '' if unknown.

        Raises:
            DataError: another vocabulary than the records', or unreadable.
        """
        from bert.data.tokens import WordPiece  # slow to import, and rarely needed

        words = WordPiece(path)
        if vocab_md5 and hashlib.md5(path.read_bytes()).hexdigest() != vocab_md5:
            raise DataError(
                f"MASKING: the training data were made with another vocabulary than {path}"
            )
        return cls(words.cls, words.sep, words.mask, words.size)


def margin(tokens: int) -> int:
    """Headroom for masked tokens above their mean number, in a batch of ``tokens``."""
    return math.ceil(
        _DEVIATIONS * math.sqrt(MASKED_SHARE * (1 - MASKED_SHARE) * tokens)
    )


class DynamicMasks:
    """Draws the masks of batches."""

    def __init__(self, tokens: MaskTokens, seed: int, capacity: int) -> None:
        """capacity: most masked tokens of a batch; any beyond it stay unmasked."""
        self.tokens, self.seed, self.capacity = tokens, seed, capacity

    def __call__(self, batch: PretrainingBatch, chosen: Chosen) -> PretrainingBatch:
        """The batch of the sequences ``chosen`` with its masks undone and new ones drawn."""
        tokens = batch.input_ids.numpy().copy()
        tokens[batch.masked_positions.numpy()] = batch.masked_labels.numpy()
        lengths = np.diff(batch.cu_seqlens.numpy())
        with np.errstate(over="ignore"):  # arithmetic modulo 2^64
            keys = _mixed(np.full(len(lengths), self.seed, dtype=np.uint64))
            for part in (chosen.epochs, chosen.files, chosen.sequences):
                keys = _mixed(keys + part.astype(np.uint64) * _GAMMA)
            # Each position has _DRAWS states of its own in SplitMix64's sequence, so that no two
            # draws share one.
            steps = batch.position_ids.numpy().astype(np.uint64) * (
                _GAMMA * np.uint64(_DRAWS)
            )
            states = np.repeat(keys, lengths) + steps
            is_text = (tokens != self.tokens.cls) & (tokens != self.tokens.sep)
            is_chosen = is_text & (_uniform(states, 0) < MASKED_SHARE)
            where = np.flatnonzero(is_chosen)[: self.capacity]
            states = states[where]
            replacement, random = _uniform(states, 1), _uniform(states, 2)
        labels = tokens[where].astype(np.int64)
        # Any of the vocabulary, special tokens included, as the reference draws them.
        random_tokens = (random * self.tokens.size).astype(np.int32)
        unmasked = np.where(replacement < _TO_RANDOM, random_tokens, labels)
        tokens[where] = np.where(replacement < _TO_MASK, self.tokens.mask, unmasked)
        return dataclasses.replace(
            batch,
            input_ids=torch.from_numpy(tokens),
            masked_positions=torch.from_numpy(where.astype(np.int32)),
            masked_labels=torch.from_numpy(labels),
            num_masked=len(where),
        )


def _mixed(words: Words) -> Words:
    """Finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _uniform(states: Words, draw: int) -> npt.NDArray[np.float64]:
    """The draw of every state, in [0, 1)."""
    bits = _mixed(states + _GAMMA * np.uint64(draw + 1)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53  # of 64 bits the 53 that a double holds
