"""CPython's random.Random in compiled code: the Mersenne Twister MT19937, and the random module's
functions on it.

A state is uint32 (END,): the 624 words, the index of the next number, and the tempered numbers,
computed for all words at once with vector instructions. Loops keep the index in a register:

    at = np.int64(state[INDEX])
    ...
        if at > ENOUGH:
            at = refill(state, at)
        bits, at = next_bits(state, at)
    ...
    state[INDEX] = np.uint32(at)

refill is called in the loop itself: inside another function, numba would count references for every
number.
"""

import random

import numpy as np
import numpy.typing as npt

from bert.data.compiled import compiled

# Words of MT19937's state, and the distance of the word that each new one is mixed with
# (Matsumoto and Nishimura, 1998).
_N, _M = 624, 397
_AHEAD = 4  # numbers that may be drawn without another check after one against ENOUGH
INDEX, _NUMBERS = _N, _N + 1 + _AHEAD
END = _NUMBERS + _N  # index at which no numbers are left
ENOUGH = END - _AHEAD


def initial_state(seed: int) -> npt.NDArray[np.uint32]:
    """State of random.Random(seed)."""
    # CPython does the seeding, since a seed may have any number of bits.
    words = random.Random(seed).getstate()[1]
    assert words[_N] == _N  # a new generator has used none of its words
    state = np.zeros(END, dtype=np.uint32)
    state[:_N], state[INDEX] = words[:_N], END
    return state


@compiled
def _mixed(word, following, distant):  # type: ignore[no-untyped-def]
    y = (word & np.uint32(0x80000000)) | (following & np.uint32(0x7FFFFFFF))
    odd = np.uint32(0) - (y & np.uint32(1))  # all ones if the last bit is one
    return distant ^ (y >> np.uint32(1)) ^ (odd & np.uint32(0x9908B0DF))


@compiled
def refill(state, at):  # type: ignore[no-untyped-def]
    """Makes 624 more numbers and puts those left (at most `_AHEAD`) before them; returns the index
    of the next.
    """
    left = END - at
    for k in range(left):
        state[_NUMBERS - left + k] = state[at + k]
    # The recurrence in two runs, so that no index needs a remainder: k + _M wraps around at _N.
    for k in range(_N - _M):
        state[k] = _mixed(state[k], state[k + 1], state[k + _M])
    for k in range(_N - _M, _N - 1):
        state[k] = _mixed(state[k], state[k + 1], state[k + _M - _N])
    state[_N - 1] = _mixed(state[_N - 1], state[0], state[_M - 1])
    # The tempering of MT19937, in a loop of its own, which is free of dependencies and vectorised.
    for k in range(_N):
        y = state[k]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        state[_NUMBERS + k] = y ^ (y >> np.uint32(18))
    return _NUMBERS - left


@compiled
def next_bits(state, at):  # type: ignore[no-untyped-def]
    """The 53 bits of random() (which is bits / 2^53) from the next two numbers, and the index after
    them.
    """
    # 27 bits of one number and 26 of the next, as in CPython's random().
    high = np.int64(state[at] >> np.uint32(5))
    low = np.int64(state[at + 1] >> np.uint32(6))
    return (high << 26) | low, at + 2


@compiled
def next_float(state):  # type: ignore[no-untyped-def]
    """random(): 53 bits, in [0, 1)."""
    at = np.int64(state[INDEX])
    if at > ENOUGH:
        at = refill(state, at)
    bits, at = next_bits(state, at)
    state[INDEX] = np.uint32(at)
    # 1 / 2^53: a power of two, so the product is exact.
    return np.float64(bits) * (1.0 / 9007199254740992.0)


@compiled
def next_below(state, limit):  # type: ignore[no-untyped-def]
    """randrange(limit), limit from 1 to 2^32 - 1: draws as many bits as the limit has until they
    are below it.
    """
    bits = 0
    # CPython's _randbelow takes the bits of limit itself, not of limit - 1, which decides how many
    # draws are rejected; getrandbits() are the top bits of a number.
    while (limit >> bits) > 0:
        bits += 1
    shift = np.uint32(32 - bits)
    at = np.int64(state[INDEX])
    value = np.int64(limit)
    while value >= limit:
        if at == END:
            at = refill(state, at)
        value = np.int64(state[at] >> shift)
        at += 1
    state[INDEX] = np.uint32(at)
    return value


@compiled
def shuffle(state, values):  # type: ignore[no-untyped-def]
    """shuffle(values) in place."""
    shuffle_with(state, values, np.empty(values.size, dtype=np.int64))


@compiled
def shuffle_with(state, values, partners):  # type: ignore[no-untyped-def]
    """shuffle(values) in place; `partners`: scratch space of the same size.

    First all draws, then all swaps. A number that is too large is written as well and overwritten
    by the next one: branches on random numbers, which the processor cannot predict, would cost more
    than everything else.
    """
    i = values.size - 1
    at = np.int64(state[INDEX])
    while i > 0:
        bits = 0
        while ((i + 1) >> bits) > 0:
            bits += 1
        shift = np.uint32(32 - bits)
        # The number of bits is the same down to here.
        last = max((1 << (bits - 1)) - 1, 1)
        while i >= last:
            if at == END:
                at = refill(state, at)
            j = np.int64(state[at] >> shift)
            at += 1
            partners[i] = j
            i -= np.int64(j <= i)
    state[INDEX] = np.uint32(at)
    # Swaps in the order of the draws, from the end, as CPython's shuffle() makes them.
    for i in range(values.size - 1, 0, -1):
        j = partners[i]
        value = values[i]
        values[i] = values[j]
        values[j] = value
