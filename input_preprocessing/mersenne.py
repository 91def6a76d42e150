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
def _mixed(word, following, distant):  # type: ignore[no-untyped-def]
    y = (word & np.uint32(0x80000000)) | (following & np.uint32(0x7FFFFFFF))
    odd = np.uint32(0) - (y & np.uint32(1))  # all ones where the last bit is one
    return distant ^ (y >> np.uint32(1)) ^ (odd & np.uint32(0x9908B0DF))


@compiled
def _twist(state):  # type: ignore[no-untyped-def]
    for k in range(_N - _M):
        state[k] = _mixed(state[k], state[k + 1], state[k + _M])
    for k in range(_N - _M, _N - 1):
        state[k] = _mixed(state[k], state[k + 1], state[k + _M - _N])
    state[_N - 1] = _mixed(state[_N - 1], state[0], state[_M - 1])
    state[_N] = 0


@compiled
def _tempered(y):  # type: ignore[no-untyped-def]
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    return y ^ (y >> np.uint32(18))


@compiled
def next_word(state):  # type: ignore[no-untyped-def]
    """The next 32 bits."""
    if state[_N] >= _N:
        _twist(state)
    y = state[state[_N]]
    state[_N] += np.uint32(1)
    return _tempered(y)


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
    i = values.size - 1
    at = np.int64(state[_N])
    while i > 0:
        bits = 0
        while ((i + 1) >> bits) > 0:
            bits += 1
        shift = np.uint32(32 - bits)
        last = max((1 << (bits - 1)) - 1, 1)  # down to here, as many bits are drawn
        while i >= last:
            if at >= _N:
                _twist(state)
                at = 0
            j = np.int64(_tempered(state[at]) >> shift)
            at += 1
            # A number that is too large is drawn in vain: values[i] is swapped with itself. Branches on random numbers,
            # which the processor cannot foresee, would cost more than all the rest.
            in_vain = j > i
            j = i if in_vain else j
            value = values[i]
            values[i] = values[j]
            values[j] = value
            i -= 0 if in_vain else 1
    state[_N] = np.uint32(at)
