"""What a user's wrong data are answered with."""

import pytest

from bert.data.records import DataError


def refused(message):
    """A context whose code has to raise DataError with this message, a regular expression."""
    return pytest.raises(DataError, match=message)
