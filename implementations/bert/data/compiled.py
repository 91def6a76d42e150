"""Compilation of inner loops with numba; no compiler is needed on the user's machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types

Function = Callable[..., Any]


def compiled(function: Function) -> Function:
    """The function as machine code, kept on disk between runs where there is a place to write to.

    numba keeps it beside the source, else in the user's cache folder (or NUMBA_CACHE_DIR); where neither can
    be written, each process compiles anew.
    """
    return _compile(function, None)


def compiled_for(*arguments: Any) -> Callable[[Function], Function]:
    """As ``compiled``, at once and for these argument types only: no later call waits for the compiler."""
    return lambda function: _compile(function, arguments)


def array(dtype: str, ndim: int = 1, readonly: bool = False) -> Any:
    """Type of a contiguous array. A read-only one takes writable arrays too, and any address (memory-mapped files)."""
    return types.Array(getattr(types, dtype), ndim, "C", readonly=readonly, aligned=not readonly)


def _compile(function: Function, signature: Any) -> Function:
    machine_code: Function
    try:
        machine_code = numba.njit(signature, cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in
        machine_code = numba.njit(signature, nogil=True)(function)
    return machine_code
