"""Which accelerator a name means: one owner of the patterns, for figures by model wherever they are
kept.
"""

import re
from functools import cache
from typing import Any

from common.tables import read_table


@cache
def _names() -> dict[str, dict[str, Any]]:
    return read_table(__file__, "accelerators.yaml")


@cache
def model_of(name: str | None) -> str:
    """The model of a GPU by the driver's name, such as H100 SXM of NVIDIA H100 80GB HBM3; empty for
    an unknown one.
    """
    fits = (
        model
        for model, row in _names()["models"].items()
        if re.search(rf"\b({row['driver']})$", name or "")
    )
    return next(fits, "")


def bf16_tflops(model: str) -> float:
    """Dense peak of a model, 10^12 operations a second; 0 if it is not known."""
    return float(_names()["models"].get(model, {}).get("bf16_tflops", 0))


def family_of(name: str) -> str:
    """H100 of any name that a submitter has given one; empty for an unknown one."""
    families = _names()["families"].items()
    return next((family for family, part in families if re.search(part, name)), "")
