"""WordPiece tokenization with the character span of each token."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bert.data.records import DataError

Integers = npt.NDArray[np.int32]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST_WORD = 100  # characters; a longer one is [UNK]


class Pieces(NamedTuple):
    """Tokens of a text: ids, and the characters [begin, end) of each in the original text, all
    int32 (n,).
    """

    ids: Integers
    begins: Integers
    ends: Integers


def words_of(vocab_file: Path) -> list[str]:
    """Words by id, of a vocab.txt, or of a tokenizer.json, which newer transformers save alone.

    Raises DataError if it cannot be read.
    """
    try:
        text = vocab_file.read_bytes().decode("utf-8")
        if vocab_file.suffix == ".json":
            ids = json.loads(text)["model"]["vocab"]
            by_id = {number: word for word, number in ids.items()}
            return [by_id.get(number, "") for number in range(max(by_id) + 1)]
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "not UTF-8"
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = "no vocabulary of WordPiece in it"
    else:
        # Not splitlines, which also cuts at U+2028, a word of a vocabulary.
        lines = text.split("\n")
        return lines if lines[-1] else lines[:-1]
    raise DataError(f"{vocab_file}: cannot read the vocabulary ({reason})")


class WordPiece:
    """BERT's tokenizer for a vocabulary file. Special tokens spelled out in a text are split like
    other words.

    Raises DataError for a file that cannot be read or lacks special tokens.
    """

    def __init__(self, vocab_file: Path, lower_case: bool = True) -> None:
        words = words_of(vocab_file)
        self.ids: dict[str, int] = {}
        for number, word in enumerate(words):
            self.ids.setdefault(word.strip(), number)
        missing = [token for token in SPECIAL_TOKENS if token not in self.ids]
        if missing:
            raise DataError(
                f"{vocab_file}: no {', '.join(missing)}: is this a vocab.txt of BERT?"
            )
        self.size = len(words)
        self.cls, self.sep, self.mask = (
            self.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]")
        )
        self._tokenizer = Tokenizer(
            models.WordPiece(
                self.ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD
            )
        )
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @cached_property
    def names(self) -> dict[int, str]:
        """The token of each id."""
        return {number: token for token, number in self.ids.items()}

    def words(self, text: str) -> list[str]:
        """Normalized words and punctuation marks of a text, before they are split into pieces."""
        normalised = self._tokenizer.normalizer.normalize_str(text)
        return [
            word
            for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(normalised)
        ]

    def __call__(self, texts: Sequence[str]) -> list[Pieces]:
        """Tokens of every text, without [CLS] and [SEP]."""
        pieces = []
        for encoding in self._tokenizer.encode_batch(
            list(texts), add_special_tokens=False
        ):
            offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
            pieces.append(
                Pieces(
                    np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1]
                )
            )
        return pieces
