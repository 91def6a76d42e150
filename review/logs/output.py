"""How the commands put out what they found: files that appear whole or not at all, strict JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from review.logs.findings import ReviewError


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Raises ReviewError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ReviewError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise ReviewError(f"{path}: cannot be written: {error.strerror}") from None


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints strict JSON at once: numbers that JSON does not have become null. ``indent`` None: on one line."""
    print(json.dumps(_strict(value), indent=indent, default=str), flush=True)


def _strict(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_csv(rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows of CSV, the headings first; an unknown value is an empty cell."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if value is None else value for value in _strict(list(row))])


def markdown_table(rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """A Markdown table of headings and rows. ``right``: which columns are numbers."""
    sides = [*right, *[False] * (len(rows[0]) - len(right))]
    lines = [_markdown_row(rows[0]), "|" + "|".join("---:" if side else "---" for side in sides) + "|"]
    return "\n".join([*lines, *map(_markdown_row, rows[1:])])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown_text(cell) for cell in cells) + " |"


def markdown_text(content: str) -> str:
    """Text that Markdown shows as it is."""
    content = content.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
    return re.sub(r"[*`<\[]|(?<!\w)_|_(?!\w)", r"\\\g<0>", content)
