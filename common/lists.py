"""Lists in a message."""

from collections.abc import Sequence


def first_few(items: Sequence[str], most: int = 3) -> str:
    """The first items, and the number of others."""
    more = len(items) - most
    return "; ".join(items[:most]) + (f"; and {more} more" if more > 0 else "")
