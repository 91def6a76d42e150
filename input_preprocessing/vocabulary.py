"""The WordPiece vocabulary: token ids, and the trie that the tokenizer walks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bert.data.format import DataError

from .compiled import compiled

SPECIAL_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[MASK]")
LARGEST_VOCABULARY = 32768  # ids are stored as int16


@dataclass(frozen=True)
class Trie:
    """Byte trie as an open-addressing hash table. Node 0 starts a word, node 1 continues one ("##")."""

    keys: npt.NDArray[np.int64]  # node << 8 | byte, -1 where empty; a power of two long
    children: npt.NDArray[np.int32]
    token_of_node: npt.NDArray[np.int32]  # -1 where no token ends


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their first line, which is their id."""

    tokens: tuple[str, ...]
    md5: str  # of the file

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each token."""
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def trie(self) -> Trie:
        """The trie of all tokens."""
        encoded = [token.encode() for token in self.tokens]
        data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        ends = np.cumsum([len(token) for token in encoded], dtype=np.int64)
        size = 1 << max(12, int(3 * len(data)).bit_length())
        keys = np.full(size, -1, dtype=np.int64)
        children = np.zeros(size, dtype=np.int32)
        token_of_node = np.full(len(data) + 2, -1, dtype=np.int32)
        _insert_tokens(data, ends, keys, children, token_of_node)
        return Trie(keys, children, token_of_node)


def load(path: str | Path) -> Vocabulary:
    """Reads a vocab.txt: one token a line, surrounding space dropped, a repeated token keeps its first id.

    Raises:
        DataError: unreadable, over 32,768 tokens, or without [UNK], [CLS], [SEP] or [MASK].
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the vocabulary {path}: {error.strerror}; check --vocab-file") from error
    lines = data.replace(b"\r", b"").split(b"\n")
    if not lines[-1]:
        lines.pop()
    tokens = tuple(dict.fromkeys(line.decode("utf-8", "ignore").strip() for line in lines))
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise DataError(f"{path} is no BERT vocabulary: it lacks {', '.join(missing)}; give a WordPiece vocab.txt")
    if len(tokens) > LARGEST_VOCABULARY:
        raise DataError(f"{path} has {len(tokens)} tokens, more than the {LARGEST_VOCABULARY} that records can hold")
    return Vocabulary(tokens, hashlib.md5(data).hexdigest())


@compiled
def slot_of(keys, key):  # type: ignore[no-untyped-def]
    """Slot of the key in the hash table, or the empty slot where it belongs."""
    mask = keys.size - 1
    slot = ((key * 0x9E3779B97F4A7C1) >> 20) & mask
    while keys[slot] != key and keys[slot] != -1:
        slot = (slot + 1) & mask
    return slot


@compiled
def _insert_tokens(data, ends, keys, children, token_of_node):  # type: ignore[no-untyped-def]
    num_nodes = 2
    start = 0
    for token in range(ends.size):
        end = ends[token]
        node = 0
        i = start
        if end - start > 2 and data[start] == 35 and data[start + 1] == 35:  # "##x" continues a word
            node = 1
            i = start + 2
        for j in range(i, end):
            key = (np.int64(node) << 8) | np.int64(data[j])
            slot = slot_of(keys, key)
            if keys[slot] == -1:
                keys[slot] = key
                children[slot] = num_nodes
                num_nodes += 1
            node = children[slot]
        if end > start:
            token_of_node[node] = token
        start = end
