"""How a process ends, and which error of a chain its user is to read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def hard_exit(status: int) -> NoReturn:
    """Ends this process without exit handlers.

    After a failure, peers may hang in a collective that a handler would wait for; after a success, threads of the
    communicators now and then abort a process that is torn down around them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """``hard_exit`` with the status of ``main``. A reader of its output, such as head, may have seen enough."""
    try:
        try:
            status = main()
        except SystemExit as ended:  # argparse's: 0 of --help, 2 of a wrong word
            status = int(ended.code or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    hard_exit(status)


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain: the one that the others were raised from, or while it was handled."""
    while earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = earlier
    return error
