"""Attributes of missing parts are null, and one thing is no plural."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from review.logs.output import counted, pick


def test_picked_attributes_of_a_missing_part_are_null():
    value = SimpleNamespace(name="x", part=None, whole=SimpleNamespace(size=0))
    assert pick(value, "name half=part.size size=whole.size") == {
        "name": "x",
        "half": None,
        "size": 0,
    }


@pytest.mark.parametrize(("count", "thing", "said"), [
    (1, "accelerator", "1 accelerator"),
    (8.0, "accelerator", "8 accelerators"),
    (2, "process", "2 processes"),
])  # fmt: skip
def test_one_is_no_plural(count, thing, said):
    assert counted(count, thing) == said
