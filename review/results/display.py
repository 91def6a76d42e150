"""How results are shown in a terminal and on a page: widths, rates, durations, and a result in one line."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from review.logs.mllog import text
from review.results.score import Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PIPED_WIDTH = 200
_LABEL_WIDTH = 12


def console(width: int | None = None) -> Console:
    """A console on stdout; wide where stdout is not a terminal, so that nothing is cut off in a file."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty():
        width = _PIPED_WIDTH
    return Console(width=width, highlight=False)


def labelled(label: str, line: str, style: str = "") -> Text:
    """A line beneath a table: a dim label in a column of its own, then the text."""
    from rich.text import Text

    return Text.assemble((f"  {label:<{_LABEL_WIDTH}}", "dim"), (line, style))


def subtitle(result: Result) -> str:
    """Submitter, platform, division, batch size and accelerators, as far as known."""
    parts = [part for part in (result.organization, result.platform, result.division) if part]
    if result.batch_size is not None:
        parts.append(f"batch {result.batch_size:g}")
    if result.accelerators:
        parts.append(f"{result.accelerators} accelerator{'s' if result.accelerators > 1 else ''}")
    elif result.processes:
        parts.append(f"{result.processes} process{'es' if result.processes > 1 else ''}")
    return ", ".join(parts)


def listed(value: object) -> str:
    """A value of a description for people: equal entries of a list counted, an object as its names and values."""
    if isinstance(value, dict):
        return ", ".join(f"{text(name)} {listed(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        names = [listed(entry) for entry in value]
        return ", ".join(f"{names.count(n)}x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    return text(value)


def rate_format(rate: float | None) -> str:
    """Three or more digits of a rate."""
    return ",.0f" if rate is None or rate >= 100 else ".3g" if rate < 10 else ".1f"


def duration(seconds: float) -> str:
    """1:02:03, 2:03 or 0:03; a dash for what no clock shows."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
