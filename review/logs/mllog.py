"""Reads the MLLOG lines of any vendor's result file; other output may be interleaved."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = ":::MLLOG "
# raw_decode stops behind the object: text after it is seen as such, and the event kept.
_DECODE = json.JSONDecoder().raw_decode
# Characters of a line, and blanks at its end: the official checker takes quadratic time, minutes at
# this length.
_LONGEST, _MOST_BLANKS = 250_000, 20_000
# No count, time, accuracy or power is larger: arithmetic with what is would overflow.
_LARGEST = 1e15


class Event(NamedTuple):  # not a dataclass: a large log has tens of thousands
    """One MLLOG line. ``line`` counts from 1 in the file; ``time_ms`` is a Unix time in
    milliseconds.
    """

    line: int
    time_ms: float
    key: Any
    value: Any
    metadata: Any
    text: str

    def meta(self, *names: str) -> float | None:
        """The first of these metadata entries that is a number, else None."""
        values = (
            map(self.metadata.get, names) if isinstance(self.metadata, dict) else ()
        )
        return next(
            (known for value in values if (known := number(value)) is not None), None
        )


@dataclass(frozen=True, slots=True)
class LineError:
    """A line with the token that is not an event. ``fatal``: the official checker crashes on it;
    ``endless``: or does not finish.
    """

    line: int
    reason: str
    fatal: bool
    endless: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """A result file: its events in file order, and its malformed lines."""

    path: Path
    events: tuple[Event, ...]
    errors: tuple[LineError, ...]
    # Numbers of lines with several events, of which only the last is read.
    glued: frozenset[int] = frozenset()

    def all(self, key: str) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def first(self, key: str) -> Event | None:
        return next((event for event in self.events if event.key == key), None)

    def last(self, key: str) -> Event | None:
        return next(iter(self.all(key)[-1:]), None)

    def value(self, key: str) -> Any:
        """Value of the first event with this key; None if there is none."""
        event = self.first(key)
        return None if event is None else event.value


def number(value: Any) -> float | None:
    """``value`` if it is a number (not a bool) that can be computed with, else None."""
    # In Python True is an integer; a flag is no number of samples and no accuracy.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST <= value <= _LARGEST else None


def text(value: Any) -> str:
    """A logged value for display: undoes the latin-1 decoding of UTF-8, replaces control
    characters.
    """
    string = value if isinstance(value, str) else json.dumps(value, default=str)
    with contextlib.suppress(UnicodeEncodeError, UnicodeDecodeError):
        # The official parser reads latin-1, so that UTF-8 names arrive here as pairs of characters.
        string = string.encode("latin-1").decode("utf-8")
    # Logs come from others: their escape sequences must not reach the reader's terminal.
    return "".join(
        character if character.isprintable() else "?" for character in string
    )


def read_log(path: Path) -> Log:
    """Raises OSError."""
    return parse(path, path.read_bytes())


def parse(path: Path, data: bytes) -> Log:
    r"""Parses a file like the official parser: latin-1, \r also ends a line, the last token of a line counts.

    Unlike it, keeps the event of a line with trailing text after the JSON object, along with the error.
    """
    events, errors, glued = [], [], set()
    # Not splitlines(): it also ends lines at characters such as \x85, part of many UTF-8 letters,
    # and every line number below would be another than the official parser's.
    for number, string in enumerate(
        io.StringIO(data.decode("latin-1"), newline=None), 1
    ):
        start = string.rfind(TOKEN)
        if start < 0:
            continue
        if string.find(TOKEN) != start:
            glued.add(number)
        event, error = _parse_line(number, string[start:].strip())
        if event is not None:
            events.append(event)
        blanks = len(string) - len(string.rstrip())
        if len(string) > _LONGEST or blanks > _MOST_BLANKS:
            reason = f"has {len(string):,} characters, too many for the official checker to finish"
            error = LineError(number, reason, True, endless=True)
        if error is not None:
            errors.append(error)
    return Log(
        path=path, events=tuple(events), errors=tuple(errors), glued=frozenset(glued)
    )


def _parse_line(line: int, full: str) -> tuple[Event | None, LineError | None]:
    """Event and error of a line that starts with the token."""
    body = full[len(TOKEN) :].lstrip(" \t\r\n")  # JSON's white space
    error = None
    try:
        record, end = _DECODE(body)
        if end != len(body):
            # Only loads() says "Extra data" and where; it always raises here.
            record = json.loads(body)  # for its error message
    except RecursionError:
        return None, LineError(line, "is nested too deeply", True)
    except ValueError as reason:
        error, record = LineError(line, f"is not JSON: {reason}", False), None
        with contextlib.suppress(ValueError, RecursionError):
            # An object followed by something else, such as a colour code.
            record = _DECODE(body)[0]
        if record is None:
            return None, error
    if (
        not isinstance(record, dict)
        or not {"time_ms", "key", "value", "metadata"} <= record.keys()
    ):
        # The official parser reads these four by name and
        # catches ValueError alone: a KeyError ends it.
        return None, error or LineError(
            line, "lacks one of time_ms, key, value, metadata", True
        )
    try:
        time_ms = float(record["time_ms"])
    except (ValueError, TypeError, OverflowError) as wrong:
        # float() of a list or a huge integer raises what the official parser does not catch.
        crashes = not isinstance(wrong, ValueError)
        return None, error or LineError(
            line, "has a time_ms that is not a number", crashes
        )
    return Event(
        line, time_ms, record["key"], record["value"], record["metadata"], full
    ), error
