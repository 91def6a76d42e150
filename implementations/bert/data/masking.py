"""MASKING=dynamic: masks drawn while training, other ones in every epoch, in place of those of the records.

Each token but [CLS] and [SEP] is chosen with probability 0.15, by itself, so that counts vary; of those chosen 80%
become [MASK], 10% any token of the vocabulary, 10% stay (Devlin et al. 2019, section 3.1; drawn at loading as in Liu et
al. 2019, RoBERTa). The random numbers are a hash of (seed, epoch, file, sequence, position): which rank trains on a
sequence, in which batch, and whether the run was resumed change nothing.
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

_TO_MASK, _TO_RANDOM = 0.8, 0.9  # of the draw that says what becomes of a chosen token
_DRAWS = 3  # of a position: is it chosen, what becomes of it, which token at random
_DEVIATIONS = 6  # of the number of masks: more are as good as never drawn
_GAMMA, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class MaskTokens:
    """What a vocabulary says of masking: ids of its special tokens, and the number of its tokens."""

    cls: int
    sep: int
    mask: int
    size: int

    @classmethod
    def read(cls, path: Path, vocab_md5: str) -> MaskTokens:
        """Of a vocab.txt, which must be that of the records (md5; '': not known).

        Raises:
            DataError: it is not, or cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            reason = f"{error.strerror}: put it there, or set CHECKPOINTDIR_PHASE1"
            raise DataError(f"MASKING=dynamic needs the vocabulary {path}: {reason}") from None
        if vocab_md5 and hashlib.md5(data).hexdigest() != vocab_md5:
            raise DataError(f"MASKING=dynamic: the training data were made with another vocabulary than {path}")
        lines = data.decode("utf-8", "ignore").removesuffix("\n").split("\n")
        ids: dict[str, int] = {}
        for number, line in enumerate(lines):  # as WordPiece numbers them, also where a word is there twice
            ids.setdefault(line.strip(), number)
        missing = [token for token in ("[CLS]", "[SEP]", "[MASK]") if token not in ids]
        if missing:
            raise DataError(f"{path}: no {', '.join(missing)}: is this a vocab.txt of BERT?")
        return cls(ids["[CLS]"], ids["[SEP]"], ids["[MASK]"], len(lines))

    @classmethod
    def made_up(cls, vocab_size: int) -> MaskTokens:
        """For made-up records, all of whose tokens are alike."""
        return cls(-1, -1, vocab_size - 1, vocab_size)


def margin(tokens: int) -> int:
    """Masked tokens beyond the mean that there must be room for among so many tokens."""
    return math.ceil(_DEVIATIONS * math.sqrt(MASKED_SHARE * (1 - MASKED_SHARE) * tokens))


class DynamicMasks:
    """Draws the masks of batches."""

    def __init__(self, tokens: MaskTokens, seed: int, capacity: int) -> None:
        """capacity: masked tokens of a batch at most; the last ones beyond it, were there ever any, are not masked."""
        self.tokens, self.seed, self.capacity = tokens, seed, capacity

    def __call__(self, batch: PretrainingBatch, chosen: Chosen) -> PretrainingBatch:
        """The batch of the sequences ``chosen`` with its own tokens back in place and new masks."""
        tokens = batch.input_ids.numpy().copy()
        tokens[batch.masked_positions.numpy()] = batch.masked_labels.numpy()
        lengths = np.diff(batch.cu_seqlens.numpy())
        with np.errstate(over="ignore"):
            keys = _mixed(np.full(len(lengths), self.seed, dtype=np.uint64))
            for part in (chosen.epochs, chosen.files, chosen.sequences):
                keys = _mixed(keys + part.astype(np.uint64) * _GAMMA)
            steps = batch.position_ids.numpy().astype(np.uint64) * (_GAMMA * np.uint64(_DRAWS))
            states = np.repeat(keys, lengths) + steps
            text = (tokens != self.tokens.cls) & (tokens != self.tokens.sep)
            where = np.flatnonzero(text & (_uniform(states, 0) < MASKED_SHARE))[: self.capacity]
            states = states[where]
            fate, other = _uniform(states, 1), _uniform(states, 2)
        labels = tokens[where].astype(np.int64)
        random = (other * self.tokens.size).astype(np.int32)
        tokens[where] = np.where(fate < _TO_MASK, self.tokens.mask, np.where(fate < _TO_RANDOM, random, labels))
        return dataclasses.replace(
            batch,
            input_ids=torch.from_numpy(tokens),
            masked_positions=torch.from_numpy(where.astype(np.int32)),
            masked_labels=torch.from_numpy(labels),
            num_masked=len(where),
        )


def _mixed(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _uniform(states: Words, draw: int) -> npt.NDArray[np.float64]:
    """The draw of every state, in [0, 1)."""
    words = _mixed(states + _GAMMA * np.uint64(draw + 1))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
