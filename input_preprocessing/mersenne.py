"""CPython's random.Random in compiled code: the Mersenne Twister MT19937 and what the random module draws from it.

A state is uint32 (625,): the 624 words and the index of the next one, as random.Random(seed).getstate() gives them.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from .compiled import compiled

_N, _M = 624, 397


def initial_state(seed: int) -> npt.NDArray[np.uint32]:
    """State of random.Random(seed)."""
    return np.array(random.Random(seed).getstate()[1], dtype=np.uint32)


@compiled
def _twist(state):  # type: ignore[no-untyped-def]
    for k in range(_N):
        y = (state[k] & np.uint32(0x80000000)) | (state[(k + 1) % _N] & np.uint32(0x7FFFFFFF))
        odd = np.uint32(0x9908B0DF) if y & np.uint32(1) else np.uint32(0)
        state[k] = state[(k + _M) % _N] ^ (y >> np.uint32(1)) ^ odd
    state[_N] = 0


@compiled
def next_word(state):  # type: ignore[no-untyped-def]
    """The next 32 bits."""
    if state[_N] >= _N:
        _twist(state)
    y = state[state[_N]]
    state[_N] += np.uint32(1)
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    return y ^ (y >> np.uint32(18))


@compiled
def next_float(state):  # type: ignore[no-untyped-def]
    """random(): 53 bits, in [0, 1)."""
    high = np.float64(next_word(state) >> np.uint32(5))
    low = np.float64(next_word(state) >> np.uint32(6))
    return (high * 67108864.0 + low) * (1.0 / 9007199254740992.0)


@compiled
def next_below(state, limit):  # type: ignore[no-untyped-def]
    """randrange(limit), limit from 1 to 2^32 - 1: as many bits as the limit has, drawn until below it."""
    bits = 0
    while (limit >> bits) > 0:
        bits += 1
    shift = np.uint32(32 - bits)
    value = np.int64(next_word(state) >> shift)
    while value >= limit:
        value = np.int64(next_word(state) >> shift)
    return value


@compiled
def shuffle(state, values):  # type: ignore[no-untyped-def]
    """shuffle(values) in place."""
    bits = 0
    while (values.size >> bits) > 0:
        bits += 1
    for i in range(values.size - 1, 0, -1):
        limit = i + 1
        if limit >> (bits - 1) == 0:
            bits -= 1
        shift = np.uint32(32 - bits)
        j = np.int64(next_word(state) >> shift)
        while j >= limit:
            j = np.int64(next_word(state) >> shift)
        values[i], values[j] = values[j], values[i]
