"""Which files are the text: those that are named, and all below the folders that are named, but for
those left out.

A file is left out where it is plainly no prose: the reason is listed. What looks like text and
cannot be read is an error, since its loss would go unnoticed among thousands of files.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bert.data.records import DataError
from input_preprocessing.stage.cli import some_of
from input_preprocessing.stage.manifest import write_text

LIST = "left_out.tsv"  # in the download folder: path, and why it is not in the corpus
_ABOUT_DATA = re.compile(r"README|LICEN[CS]E|.*\.(md5|sha\d+)$", re.IGNORECASE)
_MARK_UP = re.compile(
    rb"\s*<(\?xml|(!doctype|html|head|body|div|p|table|article|svg|rss|feed)[\s>])",
    re.IGNORECASE,
)
_MARK_UP_SUFFIXES = (".html", ".htm", ".xhtml", ".xml", ".svg")
_PACKED_SUFFIXES = (".gz", ".bz2", ".zst")
_BLANK = b"\xef\xbb\xbf \t\r\n\f"  # with a byte order mark
# No text has them in numbers, in whatever encoding of one byte or of UTF-8.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\f\r"))
_BINARY = {
    b"PAR1": "Parquet",
    b"%PDF": "PDF",
    b"{\\rtf": "RTF",
    b"PK\3\4": "a zip archive or an office document",
}


class LeftOut(NamedTuple):
    """A file that is not in the corpus."""

    path: Path
    reason: str
    is_error: bool = False


class NoText(DataError):
    """A file is no prose. In a folder it is left out; a file that is named has to be one."""


def files_in(folder: Path) -> Iterator[Path | LeftOut]:
    """All files below a folder, sorted; what is hidden is listed once, by its highest name."""
    hidden = set[Path]()
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        first = next(
            (number for number, part in enumerate(parts) if part.startswith(".")), None
        )
        if first is not None:
            top = folder.joinpath(*parts[: first + 1])
            if top not in hidden:
                hidden.add(top)
                yield LeftOut(top, "hidden")
        elif path.is_dir() and not path.is_symlink():
            # rglob() passes over such a folder in silence.
            if not os.access(path, os.R_OK | os.X_OK):
                yield LeftOut(path, "a folder that cannot be read", is_error=True)
        elif not path.is_file():
            yield LeftOut(
                path,
                "a link to a folder or no file: name what it stands for as --input",
            )
        elif _ABOUT_DATA.match(path.name):
            yield LeftOut(
                path, "README, licence or checksums: name it as --input to use it"
            )
        else:
            yield path


def check_prose(path: Path, start: bytes, is_found: bool) -> None:
    """Raises NoText for a file that starts like mark-up, a table or a binary format.

    is_found: in a folder, where an empty file is no error.
    """
    packed = path.suffix.lower() in _PACKED_SUFFIXES
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    content = start.lstrip(_BLANK)
    if is_found and not content:
        raise NoText(f"{path} is empty")
    if suffix == ".json" and not content.startswith((b"{", b"[")):
        raise NoText(f"{path} is named .json and is no JSON")
    # Markdown may begin with a tag.
    is_mark_up = suffix != ".md" and _MARK_UP.match(content)
    if is_mark_up or suffix in _MARK_UP_SUFFIXES:
        raise NoText(
            f"{path} is HTML or XML: extract its text, for example with trafilatura"
        )
    if suffix in (".csv", ".tsv"):
        raise NoText(f"{path} is a table: write its text column as JSON Lines")
    if start.startswith(b"<doc "):
        raise NoText(
            f"{path} is WikiExtractor's: have it write JSON Lines, with its --json"
        )
    if start[257:262] == b"ustar":
        raise NoText(f"{path} is a tar archive: unpack it")
    for signature, kind in _BINARY.items():
        if start.startswith(signature):
            raise NoText(f"{path} is {kind}: convert it to text")
    # UTF-16, an error of its own.
    is_wide = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    # More than rare accidents; NULs of a text are dropped, as by the reference.
    controls = len(start) - len(start.translate(None, _CONTROLS))
    if not is_wide and controls > 1 + len(start) / 100:
        raise NoText(f"{path} is not text: it holds control characters")


def report(left_out: Sequence[LeftOut], used: int, folder: Path, named: str) -> str:
    """Writes the list and returns one line with counts by reason.

    Raises DataError for all errors at once, and if no file is used. named: the inputs, for the
    message.
    """
    path = folder / LIST
    if left_out:
        folder.mkdir(parents=True, exist_ok=True)
        # A name may hold a tab, a line break, or bytes that are no UTF-8.
        cells = [
            [
                text if text.isprintable() else ascii(text)[1:-1]
                for text in (str(left.path), left.reason)
            ]
            for left in left_out
        ]
        write_text(path, "".join("\t".join(row) + "\n" for row in cells))
    else:
        path.unlink(missing_ok=True)
    if errors := [left.reason for left in left_out if left.is_error]:
        raise DataError(f"{some_of(errors)}; all in {path}")
    # Counted by kind: reasons begin with their file's name, and have advice after a colon.
    kinds = Counter(
        left.reason.replace(f"{left.path} is ", "").partition(":")[0]
        for left in left_out
    )
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    if not used:
        raise DataError(
            f"{named} has no files of text ({counts or 'none at all'}); check --input"
        )
    return (
        f"{used:,} files used, {len(left_out):,} left out ({counts}): all in {path}"
        if counts
        else ""
    )
