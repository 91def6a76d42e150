"""Compilation of inner loops with numba; no compiler is needed on the user's machine.

Without numba the same functions are interpreted, with the same results and a warning.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.process import say

numba: Any
try:
    import numba
except ImportError as error:  # absent, or for another NumPy
    numba = None
    say(
        f"bert: warning: data loading runs slower, interpreted: {error}; pip install numba"
    )

Function = Callable[..., Any]


def compiled_for(*arguments: Any) -> Callable[[Function], Function]:
    """Compiles a function eagerly for these argument types, or for each of several tuples of them,
    and no others.

    Machine code is cached in NUMBA_CACHE_DIR or beside the source; if neither is writable, each
    process compiles.
    """
    signature: Any = arguments or None
    if arguments and isinstance(arguments[0], tuple):
        signature = list(arguments)

    def compile_function(function: Function) -> Function:
        if numba is None:
            return function
        machine_code: Function
        users_folder = numba.config.CACHE_DIR
        # numba has one folder for all, read as it compiles: set for this function alone.
        numba.config.CACHE_DIR = _cache_folder(function, users_folder)
        try:
            # nogil: the data thread must not hold up the thread that launches kernels.
            machine_code = numba.njit(signature, cache=True, nogil=True)(function)
        except RuntimeError:  # no folder to cache in
            machine_code = numba.njit(signature, nogil=True)(function)
        finally:
            numba.config.CACHE_DIR = users_folder
        return machine_code

    return compile_function


compiled = compiled_for()  # compiles at the first call, for its argument types


def is_first(function: Function) -> bool:
    """Whether the function has to be compiled, not read from disk; announces the wait if so."""
    if first := not is_cached(function):
        say("compiling; this is done on the first run only, and can take a minute")
    return first


def is_cached(function: Function) -> bool:
    """Whether machine code of the function, from the current sources, is cached on disk."""
    if numba is None:
        return True
    folder = _cache_folder(function.py_func, numba.config.CACHE_DIR)  # type: ignore[attr-defined]
    # numba's index files are named by function.
    return any(Path(folder).rglob(f"*.{function.__name__}-*.nbi"))


def array(dtype: str, ndim: int = 1, readonly: bool = False) -> Any:
    """Type of a contiguous array. A read-only one accepts writable and unaligned (memory-mapped)
    arrays, too.
    """
    if numba is None:
        return dtype
    # Mapped datasets begin wherever HDF5 has put them, not at multiples of an item.
    return numba.types.Array(
        scalar(dtype), ndim, "C", readonly=readonly, aligned=not readonly
    )


def scalar(dtype: str) -> Any:
    """Type of a number."""
    return dtype if numba is None else getattr(numba.types, dtype)


def _cache_folder(function: Function, users_folder: str) -> str:
    """Cache folder, named by the content of the package's files with compiled functions.

    numba itself only compares the function's own file, and would reuse a caller after a change of
    what it calls in another file.
    """
    package = Path(function.__code__.co_filename).parent
    # The outermost package; a module may stand alone.
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    return str(
        Path(users_folder or package / "__pycache__") / f"numba-{_digest(package)[:12]}"
    )


@lru_cache
def _digest(package: Path) -> str:
    texts = (path.read_bytes() for path in sorted(package.rglob("*.py")))
    # Only files with compiled functions: other edits must not cost a minute of compiling.
    return hashlib.md5(
        b"".join(text for text in texts if b"compiled" in text)
    ).hexdigest()
