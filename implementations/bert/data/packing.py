"""Packs sequences into rows of at most `max_tokens` tokens and `max_sequences` sequences.

A linear program over the histogram of lengths (Gilmore and Gomory's cutting stock with column
generation), where a slot of a row may hold a shorter sequence; its few fractions are rounded down
and the remaining sequences are packed best fit. Deterministic. Packing for BERT: Krell et al.,
arXiv 2107.02027.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from bert.data.records import DataError, offsets_of

Integers = npt.NDArray[np.int64]
# Relative distance to the bound at which no more patterns are sought.
_CLOSE_ENOUGH = 1e-5
_MAX_ROUNDS = 60
_FEW = 10_000  # sequences up to which best fit alone may beat the rounded program
_TRIES = 64  # lengths tried as the longest of the rest of a row


def pack(
    lengths: npt.ArrayLike,
    max_tokens: int = 512,
    max_sequences: int = 3,
    program: bool = True,
) -> tuple[Integers, Integers]:
    """Packs all sequences.

    Args:
        lengths: tokens of each sequence, (N,), from 1 to max_tokens.
        max_tokens, max_sequences: limits of a row.
        program: solve the linear program, which needs scipy; otherwise best fit packs everything,
            into about 1% more rows, or as few for some hundreds of sequences.

    Returns:
        order (N,) and row_offsets (R + 1,): row r holds the sequences
        order[row_offsets[r]:row_offsets[r + 1]]. Among sequences of one length, the earlier in
        `lengths` goes to the earlier place: shuffle them before and rows after.

    Raises:
        DataError: a length is out of range.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= max_tokens:
        raise DataError(
            f"sequences of {sizes.min()} to {sizes.max()} tokens do not fit rows of {max_tokens}"
        )
    histogram = np.bincount(sizes, minlength=max_tokens + 1)
    patterns, counts = plan(histogram, max_tokens, max_sequences, program)
    # Slots and sequences, both longest first: the k-th sequence fits the k-th slot, as the plan
    # covers the histogram.
    rows = np.repeat(patterns, counts, axis=0)
    slot_sizes = rows.reshape(-1)
    slots = np.argsort(-slot_sizes, kind="stable")[: len(sizes)]
    # Stable: of sequences of one length the earlier comes first, as promised above.
    by_length = np.argsort(-sizes, kind="stable")
    assert (slot_sizes[slots] >= sizes[by_length]).all()
    row_of = np.empty(len(sizes), dtype=np.int64)
    row_of[by_length] = slots // max_sequences
    per_row = np.bincount(row_of, minlength=len(rows))
    return np.argsort(row_of, kind="stable"), offsets_of(per_row[per_row > 0])


def plan(
    histogram: npt.ArrayLike, max_tokens: int, max_sequences: int, program: bool = True
) -> tuple[Integers, Integers]:
    """The strategy for a histogram of lengths (index = length): patterns (P, max_sequences) and how
    often each is used.

    A pattern is the sizes of a row's slots, longest first, 0 = no slot; together the slots can hold
    every sequence. ``program`` as in pack.
    """
    remaining = np.asarray(histogram, dtype=np.int64).copy()
    simple = None
    if not program or remaining.sum() <= _FEW:
        simple = _best_fit(remaining, max_tokens, max_sequences)
        if not program:
            return simple, np.ones(len(simple), np.int64)
    patterns, amounts = _solve(remaining, max_tokens, max_sequences)
    # The solver's whole numbers may lie a hair below one.
    counts = np.floor(amounts + 1e-6).astype(np.int64)
    patterns, counts = patterns[counts > 0], counts[counts > 0]
    # The slots take the longest sequences that fit, longest slots first.
    uses = np.repeat(counts, patterns.shape[1])
    slots = np.bincount(patterns.reshape(-1), weights=uses, minlength=len(remaining))
    free = 0
    for length in range(len(remaining) - 1, 0, -1):
        free += int(slots[length])
        used = min(free, int(remaining[length]))
        remaining[length] -= used
        free -= used
    left_over = _best_fit(remaining, max_tokens, max_sequences)
    if simple is not None and len(simple) < counts.sum() + len(left_over):
        return simple, np.ones(len(simple), np.int64)
    once_each = np.ones(len(left_over), np.int64)
    return np.concatenate([patterns, left_over]), np.concatenate([counts, once_each])


def _solve(
    histogram: Integers, max_tokens: int, max_sequences: int
) -> tuple[Integers, npt.NDArray[np.float64]]:
    """Patterns and fractional amounts that cover the histogram with the fewest rows, to within
    _CLOSE_ENOUGH.

    By column generation: solve for the patterns so far, price each length by the duals, add the
    patterns that are worth more than a row, until none is, or the rows are close to a lower bound.
    """
    if not histogram.any():
        return np.zeros((0, max_sequences), np.int64), np.zeros(0)
    total = int(histogram.sum())
    # No packing has fewer rows than the tokens fill, or the sequences.
    num_tokens = (histogram * np.arange(len(histogram))).sum()
    bound = max(num_tokens / max_tokens, total / max_sequences)
    patterns = sorted(_first_patterns(max_tokens, max_sequences))
    seen = set(patterns)
    for _ in range(_MAX_ROUNDS):
        columns = np.array(patterns, dtype=np.int64)
        result = _solve_for(columns, histogram / total, max_tokens)
        rows = result.fun * total
        improving, best_value = _price(
            result.eqlin.marginals, max_tokens, max_sequences
        )
        # Farley's bound: the duals, made feasible by scaling.
        bound = max(bound, rows / max(1.0, best_value))
        fresh = [pattern for pattern in improving if pattern not in seen]
        # Rows are whole: within half a row of the bound there is none to gain.
        if not fresh or rows <= bound + max(_CLOSE_ENOUGH * bound, 0.5):
            break
        seen.update(fresh)
        patterns += fresh
    amounts = result.x[: len(columns)]
    return columns[amounts > 0], amounts[amounts > 0] * total


def _first_patterns(max_tokens: int, max_sequences: int) -> set[tuple[int, ...]]:
    """For each length a slot of it, and the rest of the row shared evenly by the others."""
    others = max_sequences - 1
    patterns = set()
    for length in range(1, max_tokens + 1):
        rest = max_tokens - length
        shares = [rest // others + (i < rest % others) for i in range(others)]
        patterns.add(tuple(sorted([length, *shares], reverse=True)))
    return patterns


def _solve_for(
    columns: Integers, shares: npt.NDArray[np.float64], max_tokens: int
) -> Any:
    """linprog's result: how much of each pattern (columns: sizes of its slots, [P, max_sequences])
    covers the shares of the lengths with the fewest rows.

    Variables: the patterns' amounts, then for each length how many of its slots are handed down to
    the next shorter one. An equation per length, shortest first: slots of patterns of that length,
    plus those handed down from the length above, minus those handed down to the length below, equal
    the sequences of that length.
    """
    from scipy.optimize import linprog  # here, so that benchmarks run without scipy
    from scipy.sparse import csr_array

    size, max_sequences = columns.shape
    slots = columns.reshape(-1)
    used = slots > 0
    handed = np.arange(max_tokens)
    lines = np.concatenate([slots[used] - 1, handed, handed[:-1]])
    pattern_of_slot = np.repeat(np.arange(size), max_sequences)[used]
    variables = np.concatenate([pattern_of_slot, size + handed, size + handed[1:]])
    factors = np.concatenate(
        [np.ones(used.sum()), -np.ones(max_tokens), np.ones(max_tokens - 1)]
    )
    shape = (max_tokens, size + max_tokens)
    result = linprog(
        np.concatenate([np.ones(size), np.zeros(max_tokens)]),
        A_eq=csr_array((factors, (lines, variables)), shape=shape),
        b_eq=shares[1:],  # of all sequences: the solver's tolerances are absolute
        # The dual simplex ends in a basic solution, with at most one fraction for each length.
        # An interior point has many more, and all are rounded down.
        method="highs-ds",
    )
    if not result.success:
        raise RuntimeError(f"packing program not solved: {result.message}")
    return result


def _price(
    values_of_slots: npt.NDArray[np.float64], max_tokens: int, max_sequences: int
) -> tuple[list[tuple[int, ...]], float]:
    """For each first slot the best improving pattern, if any (a knapsack), and the best one's
    value.
    """
    value = np.concatenate([[0.0], values_of_slots])  # by size; never falls
    best, choice = [value], []
    for _ in range(max_sequences - 2):
        sums = np.full((max_tokens + 1, max_tokens + 1), -np.inf)  # [total, slot]
        for slot in range(max_tokens + 1):
            sums[slot:, slot] = value[slot] + best[-1][: max_tokens + 1 - slot]
        choice.append(sums.argmax(axis=1))
        best.append(sums.max(axis=1))
    if max_sequences == 1:
        return [], 1.0
    patterns = set()
    # Of the best pattern with a slot of length 1, 2, ...
    values = value[1:] + best[-1][max_tokens - 1 :: -1]
    # A pattern improves the program if its slots are worth more than the one row that it costs.
    for first in np.flatnonzero(values > 1 + 1e-9).tolist():
        first, rest = first + 1, max_tokens - first - 1
        pattern = [first]
        for slots in reversed(choice):
            pattern.append(int(slots[rest]))
            rest -= pattern[-1]
        patterns.add(tuple(sorted([*pattern, rest], reverse=True)))
    return sorted(patterns), float(values.max())


class _Stock:
    """Multiset of lengths, as counts and as a bit set, for quick lookup of the longest that
    fits.
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self.counts = [int(count) for count in counts]
        bits = (1 << length for length, count in enumerate(self.counts) if count)
        # Python's integers as bit sets: the longest that fits is one mask and a bit_length.
        self.at_hand = sum(bits) | 1  # bit 0: none fits

    def longest(self, space: int) -> int:
        """The longest available length of at most `space`, 0 = none."""
        return (self.at_hand & ((2 << max(space, 0)) - 1)).bit_length() - 1

    def take(self, length: int) -> None:
        """Takes one of the length out of stock."""
        self.counts[length] -= 1
        if not self.counts[length]:
            self.at_hand ^= 1 << length

    def put_back(self, length: int) -> None:
        """Undoes ``take``."""
        self.counts[length] += 1
        self.at_hand |= 1 << length

    def fullest(self, space: int, slots: int, most_each: int) -> list[int]:
        """At most `slots` lengths, none over `most_each`, that fill `space` best; they stay in
        stock.

        Those that leave room for the other slots come first: rows of few sequences would leave too
        many short ones.
        """
        best: list[int] = []
        most = 0
        for reserved in sorted({max(slots - 1, 0), 0}, reverse=True):
            length = self.longest(min(space - reserved, most_each)) if slots else 0
            for _ in range(_TRIES):
                if length * slots <= most or most == space:
                    break
                self.take(length)
                chosen = [length, *self.fullest(space - length, slots - 1, length)]
                self.put_back(length)
                if sum(chosen) > most:
                    best, most = chosen, sum(chosen)
                length = self.longest(length - 1)
        return best


def _best_fit(remaining: Integers, max_tokens: int, max_sequences: int) -> Integers:
    """Rows (R, max_sequences) for few sequences: each the longest left, filled as well as the
    others allow.
    """
    stock = _Stock(remaining)
    rows = []
    while longest := stock.longest(max_tokens):
        stock.take(longest)
        row = [
            longest,
            *stock.fullest(max_tokens - longest, max_sequences - 1, longest),
        ]
        for length in row[1:]:
            stock.take(length)
        rows.append(row + [0] * (max_sequences - len(row)))
    return np.array(rows, dtype=np.int64).reshape(-1, max_sequences)
