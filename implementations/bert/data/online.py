"""Packs sequences into rows as they come, from a small buffer of them.

A row starts with the sequence that has waited longest and is filled up exactly where the buffer allows it: by one
sequence, by two, by three, tried in that order; else by the longest that fits, and so on. Starting with the oldest
bounds the wait of every sequence to about two buffers, and on Wikipedia's lengths fills three slots a row to 99.9%
(`bench/packing.py`): the buffer stays a fair sample of all lengths, whereas a packer that takes the longest first
leaves itself the middling ones. Deterministic: rows depend on the order of the sequences only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bert.data.compiled import array, compiled_for, named, scalar
from bert.data.packing import Integers
from bert.data.records import DataError

_NEXT, _OLDER, _NEWER, _FILE, _SEQUENCE, _LENGTH = range(6)  # columns of a node; NEXT: of its length, or free
_HEAD, _TAIL, _COUNT = range(3)  # columns of a length's queue
_OLDEST, _NEWEST, _FREE = range(3)  # entries of the ends: nodes, -1 for none


class _Buffer(NamedTuple):
    """The waiting sequences: in the order of their coming, and a queue of each length."""

    nodes: Integers  # [buffer size, 6] a waiting sequence each, or free
    queues: Integers  # [max_tokens + 1, 3] by length
    ends: Integers  # [3] of the order of coming, and of the free nodes


class _Piece(NamedTuple):
    """Sequences of one file, to go into the buffer in this order."""

    file: int
    sequences: Integers
    lengths: Integers
    taken: Integers  # [1] how many have gone


class _Rows(NamedTuple):
    """Rows as they are made: sequences [offsets[r], offsets[r + 1]) of `chosen` are row r."""

    chosen: Integers  # [S, 2] file, and number in it
    offsets: Integers


_NUMBER, _INT64, _MATRIX = scalar("int64"), array("int64"), array("int64", ndim=2)
_BUFFER = named(_Buffer, _MATRIX, _MATRIX, _INT64)
_PIECE = named(_Piece, _NUMBER, _INT64, _INT64, _INT64)
_ROWS = named(_Rows, _MATRIX, _INT64)


class OnlinePacker:
    """Rows of at most ``max_tokens`` tokens and ``max_sequences`` sequences from an endless stream of sequences."""

    def __init__(
        self,
        stream: Iterator[tuple[int, np.ndarray]],
        lengths_of: Callable[[int, np.ndarray], np.ndarray],
        max_tokens: int,
        max_sequences: int,
        buffer_size: int,
    ) -> None:
        """stream: (file, sequences in it) after another, a file by any number; lengths_of of the same: their tokens."""
        self.stream, self.lengths_of = stream, lengths_of
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        nothing = np.zeros(0, np.int64)
        self._piece = _Piece(0, nothing, nothing, np.zeros(1, np.int64))
        nodes = np.full((buffer_size, 6), -1, dtype=np.int64)
        nodes[:, _NEXT] = np.arange(1, buffer_size + 1)  # the free list
        nodes[-1, _NEXT] = -1
        queues = np.full((max_tokens + 1, 3), -1, dtype=np.int64)
        queues[:, _COUNT] = 0
        self._buffer = _Buffer(nodes, queues, np.array([-1, -1, 0], dtype=np.int64))

    def rows(self, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next rows: file and number in it of every sequence [S], and row offsets [num_rows + 1]."""
        chosen = np.empty((num_rows * self.max_sequences, 2), dtype=np.int64)
        rows = _Rows(chosen, np.zeros(num_rows + 1, dtype=np.int64))
        done = 0
        while done < num_rows:
            done = _pack_rows(self._buffer, self._piece, rows, done, self.max_tokens, self.max_sequences)
            if done < num_rows:
                self._next_piece()
        end = rows.offsets[-1]
        return chosen[:end, 0], chosen[:end, 1], rows.offsets

    def _next_piece(self) -> None:
        file, sequences = next(self.stream)
        lengths = self.lengths_of(file, sequences)
        if lengths.size and not 1 <= lengths.min() <= lengths.max() <= self.max_tokens:
            raise DataError(
                f"training data: sequences of {lengths.min()} to {lengths.max()} tokens do not fit rows of "
                f"{self.max_tokens}; verify the data, or set MAX_SEQ_LENGTH"
            )
        numbers = np.ascontiguousarray(sequences, dtype=np.int64)
        self._piece = _Piece(file, numbers, np.ascontiguousarray(lengths, dtype=np.int64), np.zeros(1, np.int64))


@compiled_for(_MATRIX, _MATRIX, _INT64, _NUMBER, _NUMBER, _NUMBER)
def _insert(nodes, queues, ends, file, sequence, length):  # type: ignore[no-untyped-def]
    """Puts a sequence into the buffer, as the newest."""
    node = ends[_FREE]
    ends[_FREE] = nodes[node, _NEXT]
    nodes[node, _NEXT] = -1
    nodes[node, _OLDER] = ends[_NEWEST]
    nodes[node, _NEWER] = -1
    nodes[node, _FILE] = file
    nodes[node, _SEQUENCE] = sequence
    nodes[node, _LENGTH] = length
    if ends[_NEWEST] >= 0:
        nodes[ends[_NEWEST], _NEWER] = node
    else:
        ends[_OLDEST] = node
    ends[_NEWEST] = node
    if queues[length, _COUNT]:
        nodes[queues[length, _TAIL], _NEXT] = node
    else:
        queues[length, _HEAD] = node
    queues[length, _TAIL] = node
    queues[length, _COUNT] += 1


@compiled_for(_MATRIX, _MATRIX, _INT64, _NUMBER)
def _remove(nodes, queues, ends, length):  # type: ignore[no-untyped-def]
    """Takes the oldest sequence of a length out of the buffer; its node."""
    node = queues[length, _HEAD]
    queues[length, _HEAD] = nodes[node, _NEXT]
    queues[length, _COUNT] -= 1
    older, newer = nodes[node, _OLDER], nodes[node, _NEWER]
    if older >= 0:
        nodes[older, _NEWER] = newer
    else:
        ends[_OLDEST] = newer
    if newer >= 0:
        nodes[newer, _OLDER] = older
    else:
        ends[_NEWEST] = older
    nodes[node, _NEXT] = ends[_FREE]
    ends[_FREE] = node
    return node


@compiled_for(_MATRIX, _NUMBER)
def _of_two(queues, space):  # type: ignore[no-untyped-def]
    """The longer of two waiting sequences that fill the space exactly, as alike as there are; 0: there are none."""
    for short in range(space // 2, 0, -1):
        long = space - short
        if queues[short, _COUNT] > (short == long) and queues[long, _COUNT]:
            return long
    return 0


@compiled_for(_MATRIX, _NUMBER)
def _of_three(queues, space):  # type: ignore[no-untyped-def]
    """The longest of three waiting sequences that fill the space exactly, the longest there is; 0: there are none."""
    for first in range(space - 2, (space - 1) // 3, -1):
        if not queues[first, _COUNT]:
            continue
        rest = space - first
        for second in range(min(first, rest - 1), (rest - 1) // 2, -1):
            third = rest - second
            needed_of_third = 1 + (third == first) + (third == second)
            if queues[second, _COUNT] > (second == first) and queues[third, _COUNT] >= needed_of_third:
                return first
    return 0


@compiled_for(_MATRIX, _NUMBER, _NUMBER)
def _next_length(queues, space, slots):  # type: ignore[no-untyped-def]
    """Length to put into a row with `space` tokens and `slots` sequences left: the longest of an exact fill by as few
    as can be, else the longest that fits; 0 where none does."""
    if queues[space, _COUNT]:
        return space
    if slots >= 2:
        length = _of_two(queues, space)
        if length:
            return length
    if slots >= 3:
        length = _of_three(queues, space)
        if length:
            return length
    length = space
    while length and not queues[length, _COUNT]:
        length -= 1
    return length


@compiled_for(_BUFFER, _PIECE, _ROWS, _NUMBER, _NUMBER, _NUMBER)
def _pack_rows(buffer, piece, rows, done, max_tokens, max_sequences):  # type: ignore[no-untyped-def]
    """Makes rows from `done` on until there are enough or the buffer is short of sequences; how many there are then."""
    # Tuples are opened here, once: numba counts references each time an array is taken out of one.
    nodes, queues, ends = buffer
    file, sequences, lengths, taken = piece
    chosen, offsets = rows
    while done < offsets.size - 1:
        while ends[_FREE] >= 0 and taken[0] < sequences.size:
            _insert(nodes, queues, ends, file, sequences[taken[0]], lengths[taken[0]])
            taken[0] += 1
        if ends[_FREE] >= 0:
            return done
        end, space, slots = offsets[done], max_tokens, max_sequences
        length = nodes[ends[_OLDEST], _LENGTH]
        while length:
            node = _remove(nodes, queues, ends, length)
            chosen[end, 0] = nodes[node, _FILE]
            chosen[end, 1] = nodes[node, _SEQUENCE]
            end += 1
            space -= length
            slots -= 1
            length = _next_length(queues, space, slots) if slots and space else 0
        done += 1
        offsets[done] = end
    return done
