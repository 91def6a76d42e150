"""Packs a stream of sequences into rows, from a small buffer of them.

A row starts with the sequence that has waited longest and is filled exactly if the buffer allows it: by one sequence,
by two, by three, tried in that order; else by the longest that fits, and so on. Starting with the oldest bounds the
wait of every sequence to about two buffers, and on Wikipedia's lengths fills three slots per row to 99.9%
(`bench/prepare.py packing`): the buffer stays a fair sample of all lengths, whereas taking the longest first would
leave middling ones. Deterministic: rows depend only on the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from bert.data.compiled import array, compiled_for, scalar
from bert.data.records import DataError

# A line of `buffer` is a sequence, waiting or packed, in order of arrival. LENGTH 0: packed, or unused.
_FILE, _SEQUENCE, _LENGTH, _NEXT = range(4)  # NEXT: line of the next sequence of the length
_HEAD, _TAIL, _COUNT = range(3)  # of the queue of a length, by length
# State: oldest line and end; sequences waiting, and taken from the stream.
_OLDEST, _END, _WAITING, _TAKEN = range(4)
_NUMBER, _INT64, _MATRIX = scalar("int64"), array("int64"), array("int64", ndim=2)


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
        """stream: endless (file, sequences in it), files as any integers; lengths_of: their lengths in tokens."""
        self.stream, self.lengths_of = stream, lengths_of
        self.limits = buffer_size, max_tokens, max_sequences
        self._file, self._sequences, self._lengths = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
        # Each row takes the oldest sequence: while one waits, at most one row is made for each before it.
        self._buffer = np.zeros(((max_sequences + 1) * buffer_size, 4), np.int64)
        self._queues = np.zeros((max_tokens + 1, 3), np.int64)
        self._state = np.zeros(4, np.int64)

    def rows(self, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next rows: file and number in it of every sequence [S], and row offsets [num_rows + 1]."""
        chosen = np.empty((num_rows * self.limits[2], 2), np.int64)
        offsets = np.zeros(num_rows + 1, np.int64)
        done = 0
        while True:
            done = _pack_rows(
                self._buffer,
                self._queues,
                self._state,
                self._file,
                self._sequences,
                self._lengths,
                chosen,
                offsets,
                done,
                *self.limits,
            )
            if done == num_rows:
                return chosen[: offsets[-1], 0], chosen[: offsets[-1], 1], offsets
            self._file, sequences = next(self.stream)
            lengths = self.lengths_of(self._file, sequences)
            if lengths.size and not 1 <= lengths.min() <= lengths.max() <= self.limits[1]:
                problem = f"training data: sequences of {lengths.min()} to {lengths.max()} tokens"
                raise DataError(
                    f"{problem} do not fit rows of {self.limits[1]}; verify the data, or set MAX_SEQ_LENGTH"
                )
            self._sequences = np.ascontiguousarray(sequences, np.int64)
            self._lengths = np.ascontiguousarray(lengths, np.int64)
            self._state[_TAKEN] = 0


@compiled_for(_MATRIX, _NUMBER, _NUMBER)
def _next_length(queues, space, slots):  # type: ignore[no-untyped-def]
    """Length to put into a row with `space` tokens and `slots` sequences left: the longest of an exact fill by as few
    as possible, else the longest that fits; 0 if none does."""
    if queues[space, _COUNT]:
        return space
    if slots >= 2:  # the longer of the most similar two
        for short in range(space // 2, 0, -1):
            long = space - short
            if queues[short, _COUNT] > (short == long) and queues[long, _COUNT]:
                return long
    if slots >= 3:  # the longest of any three
        for first in range(space - 2, (space - 1) // 3, -1):
            if not queues[first, _COUNT]:
                continue
            rest = space - first
            for second in range(min(first, rest - 1), (rest - 1) // 2, -1):
                third = rest - second
                needed_of_third = 1 + (third == first) + (third == second)
                if (
                    queues[second, _COUNT] > (second == first)
                    and queues[third, _COUNT] >= needed_of_third
                ):
                    return first
    length = space
    while length and not queues[length, _COUNT]:
        length -= 1
    return length


@compiled_for(
    *(_MATRIX, _MATRIX, _INT64, _NUMBER, _INT64, _INT64, _MATRIX, _INT64),
    *(_NUMBER, _NUMBER, _NUMBER, _NUMBER),
)
def _pack_rows(  # type: ignore[no-untyped-def]
    buffer,
    queues,
    state,
    file,
    sequences,
    lengths,
    chosen,
    offsets,
    done,
    buffer_size,
    max_tokens,
    max_sequences,
):
    """Makes rows from `done` on until there are enough or the sequences are used up; returns how many there are then.

    Sequences [offsets[r], offsets[r + 1]) of `chosen`, each a file and an index in it, are row r.
    """
    size = buffer.shape[0]
    while done < offsets.size - 1:
        while state[_WAITING] < buffer_size and state[_TAKEN] < sequences.size:
            # The buffer is a ring: a line is free again once all lines before it are packed.
            line, length = state[_END] % size, lengths[state[_TAKEN]]
            buffer[line, _FILE], buffer[line, _SEQUENCE] = file, sequences[state[_TAKEN]]
            buffer[line, _LENGTH] = length
            if queues[length, _COUNT]:
                buffer[queues[length, _TAIL], _NEXT] = line
            else:
                queues[length, _HEAD] = line
            queues[length, _TAIL] = line
            queues[length, _COUNT] += 1
            state[_END] += 1
            state[_WAITING] += 1
            state[_TAKEN] += 1
        if state[_WAITING] < buffer_size:
            # From a full buffer only: rows must not depend on where the stream was cut.
            return done
        # Past those that rows of older sequences have taken already.
        while not buffer[state[_OLDEST] % size, _LENGTH]:
            state[_OLDEST] += 1
        end, space, slots = offsets[done], max_tokens, max_sequences
        # The oldest of all is also the oldest of its length, at the head of that queue.
        length = buffer[state[_OLDEST] % size, _LENGTH]
        while length:
            line = queues[length, _HEAD]
            queues[length, _HEAD] = buffer[line, _NEXT]
            queues[length, _COUNT] -= 1
            chosen[end, 0], chosen[end, 1] = buffer[line, _FILE], buffer[line, _SEQUENCE]
            buffer[line, _LENGTH] = 0
            state[_WAITING] -= 1
            end += 1
            space -= length
            slots -= 1
            length = _next_length(queues, space, slots) if slots and space else 0
        done += 1
        offsets[done] = end
    return done
