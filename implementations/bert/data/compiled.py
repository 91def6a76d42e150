"""Compilation of inner loops with numba; no compiler is needed on the user's machine.

Without numba the same functions are interpreted, with the same results, and a line on stderr says so.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

numba: Any
try:
    import numba
except ImportError as error:  # absent, or for another NumPy
    numba = None
    print(f"bert: warning: data are handled by slower, interpreted code: {error}; pip install numba", file=sys.stderr)

Function = Callable[..., Any]


def compiled(function: Function) -> Function:
    """The function as machine code, kept on disk between runs where there is a place to write to.

    It is kept in NUMBA_CACHE_DIR, where that is set, else beside the source; where that cannot be written, each process
    compiles again.
    """
    return _compile(function, None)


def is_first(function: Function) -> bool:
    """Whether the function has to be compiled, not read from disk; says so, for who would wait without a word."""
    if first := not is_kept(function):
        print("compiling; this is done on the first run only, and can take a minute", file=sys.stderr)
    return first


def compiled_for(*arguments: Any) -> Callable[[Function], Function]:
    """As ``compiled``, at once and for these argument types only, or each of several tuples of them: no later call
    waits for the compiler."""
    signature = list(arguments) if isinstance(arguments[0], tuple) else arguments
    return lambda function: _compile(function, signature)


def is_kept(function: Function) -> bool:
    """Whether machine code of the function, and of the sources as they are, is on disk from an earlier run."""
    if numba is None:
        return True
    folder = _cache_folder(function.py_func, numba.config.CACHE_DIR)  # type: ignore[attr-defined]
    return any(Path(folder).rglob(f"*.{function.__name__}-*.nbi"))


def array(dtype: str, ndim: int = 1, readonly: bool = False) -> Any:
    """Type of a contiguous array. A read-only one takes writable arrays too, and any address (memory-mapped files)."""
    if numba is None:
        return dtype
    return numba.types.Array(scalar(dtype), ndim, "C", readonly=readonly, aligned=not readonly)


def scalar(dtype: str) -> Any:
    """Type of a number."""
    return dtype if numba is None else getattr(numba.types, dtype)


def _compile(function: Function, signature: Any) -> Function:
    if numba is None:
        return function
    machine_code: Function
    users_folder = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _cache_folder(function, users_folder)
    try:
        machine_code = numba.njit(signature, cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to cache in
        machine_code = numba.njit(signature, nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = users_folder
    return machine_code


def _cache_folder(function: Function, users_folder: str) -> str:
    """Folder of the machine code made of the package's files that have compiled functions.

    numba compares the function's own file only, and would keep using what it compiled into a caller before a function
    of another file was changed.
    """
    package = Path(function.__code__.co_filename).parent
    while (package.parent / "__init__.py").is_file():  # the outermost package; a module may stand alone
        package = package.parent
    return str(Path(users_folder or package / "__pycache__") / f"numba-{_digest(package)[:12]}")


@lru_cache
def _digest(package: Path) -> str:
    texts = (path.read_bytes() for path in sorted(package.rglob("*.py")))
    return hashlib.md5(b"".join(text for text in texts if b"compiled" in text)).hexdigest()
