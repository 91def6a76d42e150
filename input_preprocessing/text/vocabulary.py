"""The WordPiece vocabulary: token ids, and the trie that the tokenizer walks."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bert.data.compiled import compiled
from bert.data.records import Array, DataError
from input_preprocessing.stage.cli import say
from input_preprocessing.stage.reading import readable

SPECIAL_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[MASK]")
# An entry of the trie has 63 bits: 27 and 8 for the edge's source node and byte, 27 for its
# target, 1 for the end of a token. The sign is left for -1, an empty slot.
NODE_BITS = 27
NODE_MASK = (1 << NODE_BITS) - 1
_EDGE_SHIFT = NODE_BITS + 1
# Fibonacci hashing: the first 60 bits of 2^64 divided by the golden ratio.
_MULTIPLIER = 0x9E3779B97F4A7C1


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in file order, without repetitions; the index is the id."""

    tokens: tuple[str, ...]
    md5: str  # of the file

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def check_case(self, lower_case: bool) -> None:
        """Warns on stderr if the vocabulary does not look right for lower-cased or cased text."""
        has_capitals = any(
            token != token.lower() for token in self.tokens if not token.startswith("[")
        )
        if has_capitals == lower_case:
            which = (
                "tokens with capitals" if has_capitals else "no tokens with capitals"
            )
            doubt = f"is --do-lower-case {int(lower_case)} right?"
            say(f"warning: the vocabulary has {which}: {doubt}")

    @cached_property
    def trie(self) -> tuple[Array, Array]:
        """Byte trie as an open-addressing hash table. Node 0 starts a word, node 1 continues one
        ("##").

        An entry packs an edge: source node and byte (`edge`), target node, and in the lowest bit
        whether a token ends there. A single number, so one cache line per byte of text.

        Returns:
            The entries (-1: empty; the size is a power of two), and the id of the token that ends
            at each node.
        """
        encoded = [token.encode() for token in self.tokens]
        data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        ends = np.cumsum([len(token) for token in encoded], dtype=np.int64)
        # At most one node per byte, besides the two roots.
        if len(data) > NODE_MASK - 1:
            raise DataError(
                f"the vocabulary's tokens have {len(data):,} bytes; at most {NODE_MASK - 1:,} are allowed"
            )
        ids = np.zeros(len(data) + 2, dtype=np.int32)
        # Tokens share beginnings, so there are fewer nodes than bytes. They are counted in a first
        # table, so that the second is no larger than it must be; both are at least half empty.
        size = 1 << int(2 * len(data)).bit_length()
        num_nodes = _insert_tokens(data, ends, np.full(size, -1, dtype=np.int64), ids)
        entries = np.full(1 << int(2 * num_nodes).bit_length(), -1, dtype=np.int64)
        _insert_tokens(data, ends, entries, ids)
        return entries, ids[:num_nodes]


def load(path: str | Path) -> Vocabulary:
    """Reads a vocab.txt: one token per line, surrounding space is dropped, a repeated token keeps
    its first id.

    Raises:
        DataError: unreadable, or without [UNK], [CLS], [SEP] or [MASK].
    """
    with readable(f"the vocabulary {path}", "check --vocab-file"):
        data = Path(path).read_bytes()
    lines = data.replace(b"\r", b"").removesuffix(b"\n").split(b"\n")
    tokens = tuple(
        dict.fromkeys(line.decode("utf-8", "ignore").strip() for line in lines)
    )
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise DataError(
            f"{path} is not a BERT vocabulary: it lacks {', '.join(missing)}; give a WordPiece vocab.txt"
        )
    return Vocabulary(tokens, hashlib.md5(data).hexdigest())


@compiled
def slot_of(entries, edge):  # type: ignore[no-untyped-def]
    """Slot of the edge in the hash table, or the empty slot to put it in."""
    mask = entries.size - 1
    slot = ((edge * _MULTIPLIER) >> 20) & mask
    while entries[slot] >> _EDGE_SHIFT != edge and entries[slot] != -1:
        slot = (slot + 1) & mask
    return slot


@compiled
def _insert_tokens(data, ends, entries, ids):  # type: ignore[no-untyped-def]
    """Fills the table and the ids; returns the number of nodes."""
    num_nodes = 2
    start = 0
    for token in range(ends.size):
        end = ends[token]
        node = 0
        i = start
        # "##x" continues a word.
        if end - start > 2 and data[start] == 35 and data[start + 1] == 35:
            node = 1
            i = start + 2
        slot = 0
        for j in range(i, end):
            edge = (np.int64(node) << 8) | np.int64(data[j])
            slot = slot_of(entries, edge)
            if entries[slot] == -1:
                entries[slot] = (edge << _EDGE_SHIFT) | (num_nodes << 1)
                num_nodes += 1
            node = (entries[slot] >> 1) & NODE_MASK
        # A blank line of vocab.txt has an id, which keeps the later ones right, and never matches.
        if end > start:
            entries[slot] |= 1
            ids[node] = token
        start = end
    return num_nodes
