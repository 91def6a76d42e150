"""Markdown of any content keeps its cells, and attributes of missing parts are null."""

from __future__ import annotations

from types import SimpleNamespace

from review.logs.output import Column, Heading, Line, Table, markdown, pick


def test_markdown_escapes_titles_cells_and_lines():
    table = Table([Column("a"), Column("n", right=True)], [["x|y", "1"]])
    shown = markdown([Heading("T|", "about"), table, Line("one", "*"), Line("", "two")])
    cells = "| a | n |\n|---|---:|\n| x\\|y | 1 |"
    assert shown == f"### T\\|\n\nabout\n\n{cells}\n\n- **one** \\*\n- **…** two"


def test_picked_attributes_of_a_missing_part_are_null():
    value = SimpleNamespace(name="x", part=None, whole=SimpleNamespace(size=0))
    assert pick(value, "name half=part.size size=whole.size") == {
        "name": "x",
        "half": None,
        "size": 0,
    }
