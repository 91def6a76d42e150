"""How a process ends, and which error of a chain its user is to read."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def hard_exit(status: int) -> NoReturn:
    """Ends this process without exit handlers.

    After a failure, peers may hang in a collective that a handler would wait for; after a success, threads of the
    communicators now and then abort a process that is torn down around them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain: the one that the others were raised from, or while it was handled."""
    while earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = earlier
    return error
