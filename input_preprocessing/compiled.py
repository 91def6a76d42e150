"""Compilation of the inner loops with numba; no compiler is needed on the user's machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

Function = Callable[..., Any]


def compiled(function: Function) -> Function:
    """The function as machine code, kept on disk between runs where there is a place to write to.

    numba keeps it beside the source, else in the user's cache folder (or NUMBA_CACHE_DIR); where neither can
    be written, each process compiles anew.
    """
    machine_code: Function
    try:
        machine_code = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in
        machine_code = numba.njit(nogil=True)(function)
    return machine_code
