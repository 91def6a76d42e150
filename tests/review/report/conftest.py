"""What tests of pictures need."""

from __future__ import annotations

import pytest

from review.logs.output import ReviewError
from review.report import chart


@pytest.fixture
def font() -> None:
    """Skips where this machine has no font to draw with."""
    try:
        chart._font()
    except ReviewError as error:
        pytest.skip(str(error))
