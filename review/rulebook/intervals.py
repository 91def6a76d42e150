"""How often a closed run is to be evaluated."""

from __future__ import annotations

import math


def evaluation_interval(batch_size: float) -> int:
    """Samples between evaluations: floor(0.05 (230.23 GBS + 3,000,000) / 25,000) 25,000 (training_rules)."""
    return math.floor(0.05 * (230.23 * batch_size + 3_000_000) / 25_000) * 25_000
