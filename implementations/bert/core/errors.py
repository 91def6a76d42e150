"""Which error of a chain a user is to read."""

from __future__ import annotations


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain: the one that the others were raised from, or while it was dealt with."""
    while True:
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None:
            return error
        error = earlier
