"""What tests of pictures need."""

from __future__ import annotations

import pytest

from review.logs.output import ReviewError
from review.report.chart import Axis, Chart, picture


@pytest.fixture
def font() -> None:
    """Skips where this machine has no font to draw with."""
    axis = Axis(label="", low=0, high=1)
    try:
        picture(Chart(key="", title="", alt="", x=axis, y=axis, series=()), "")
    except ReviewError as error:
        pytest.skip(str(error))
    except (ValueError, ZeroDivisionError):
        pass  # nothing to draw
