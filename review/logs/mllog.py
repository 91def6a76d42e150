"""Reads the MLLOG lines of a result file, whoever wrote it and whatever surrounds them."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = ":::MLLOG "
_DECODE = json.JSONDecoder().raw_decode


class Event(NamedTuple):  # not a dataclass: a large log has tens of thousands
    """One MLLOG line. ``line`` counts from 1 in the file; ``time_ms`` is a Unix time in milliseconds."""

    line: int
    time_ms: float
    key: Any
    value: Any
    metadata: Any
    text: str

    def meta(self, *names: str) -> float | None:
        """The first of these metadata entries that is a finite number."""
        if isinstance(self.metadata, dict):
            for name in names:
                found = number(self.metadata.get(name))
                if found is not None:
                    return found
        return None


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that carries the token but is no event. ``fatal``: the official checker crashes on it."""

    line: int
    reason: str
    text: str
    fatal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """A result file: its events in the order of the file, and the lines that are none."""

    path: Path
    events: tuple[Event, ...]
    errors: tuple[LineError, ...]

    def all(self, key: str) -> list[Event]:
        """Every event of this key."""
        return [event for event in self.events if event.key == key]

    def first(self, key: str) -> Event | None:
        """The first event of this key."""
        return next((event for event in self.events if event.key == key), None)

    def value(self, key: str) -> Any:
        """The value of the first event of this key; None where there is none."""
        event = self.first(key)
        return None if event is None else event.value


def number(value: Any) -> float | None:
    """``value`` if it is a finite number and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of float
        return None


def text(value: Any) -> str:
    """A logged value for people: undoes the latin-1 reading of UTF-8, drops control characters."""
    string = value if isinstance(value, str) else json.dumps(value, default=str)
    with contextlib.suppress(UnicodeEncodeError, UnicodeDecodeError):
        string = string.encode("latin-1").decode("utf-8")
    return "".join(character if character.isprintable() else "?" for character in string)


def read_log(path: Path) -> Log:
    """Reads a file. Raises OSError."""
    return parse_log(path, path.read_bytes())


def parse_log(path: Path, data: bytes) -> Log:
    """Parses the content of a file as the official parser does: latin-1, the last token of a line counts.

    Unlike it, keeps the event of a line that only has something after the JSON object, beside the error.
    """
    events: list[Event] = []
    errors: list[LineError] = []
    content = data.decode("latin-1").replace("\r\n", "\n").replace("\r", "\n")
    if TOKEN not in content:
        return Log(path=path, events=(), errors=())
    for line, string in enumerate(content.split("\n"), start=1):
        start = string.rfind(TOKEN)
        if start < 0:
            continue
        full = string[start:].strip()
        event, error = _parse_line(line, full)
        if event is not None:
            events.append(event)
        if error is not None:
            errors.append(error)
    return Log(path=path, events=tuple(events), errors=tuple(errors))


def _parse_line(line: int, full: str) -> tuple[Event | None, LineError | None]:
    """The event and the error of a line that starts with the token."""
    body = full[len(TOKEN) :].lstrip(" \t\r\n")  # what JSON takes for space
    error = None
    try:
        record, end = _DECODE(body)
        if end != len(body):
            record = json.loads(body)  # for its words about what is wrong
    except RecursionError:
        return None, LineError(line, "is nested too deeply", full, True)
    except ValueError as reason:
        error = LineError(line, f"is not JSON: {reason}", full, False)
        record = _leading_object(body)
        if record is None:
            return None, error
    fatal = error or LineError(line, "lacks one of time_ms, key, value, metadata", full, True)
    if not isinstance(record, dict) or not {"time_ms", "key", "value", "metadata"} <= record.keys():
        return None, fatal
    try:
        time_ms = float(record["time_ms"])
    except ValueError:
        return None, error or LineError(line, "has a time_ms that is not a number", full, False)
    except (TypeError, OverflowError):
        return None, error or LineError(line, "has a time_ms that is not a number", full, True)
    return Event(line, time_ms, record["key"], record["value"], record["metadata"], full), error


def _leading_object(body: str) -> Any:
    """The JSON object at the start of a string that goes on after it, such as with a colour code."""
    try:
        return _DECODE(body)[0]
    except (ValueError, RecursionError):
        return None
