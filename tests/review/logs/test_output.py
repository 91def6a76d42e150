"""Attributes of missing parts are null."""

from __future__ import annotations

from types import SimpleNamespace

from review.logs.output import pick


def test_picked_attributes_of_a_missing_part_are_null():
    value = SimpleNamespace(name="x", part=None, whole=SimpleNamespace(size=0))
    assert pick(value, "name half=part.size size=whole.size") == {
        "name": "x",
        "half": None,
        "size": 0,
    }
