"""How the process of a rank ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Ends this process without exit handlers.

    After a failure, peers may hang in a collective that a handler would wait for; after a success, threads of the
    communicators now and then abort a process that is torn down around them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
