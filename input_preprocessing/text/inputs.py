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
from common.foreign import foreign
from common.lists import first_few
from input_preprocessing.stage.manifest import write_text

LIST = "left_out.tsv"  # in the download folder: path, and why it is not in the corpus
_ABOUT_DATA = re.compile(r"README|LICEN[CS]E|.*\.(md5|sha\d+)$", re.IGNORECASE)
MARK_UP = "HTML or XML: extract its text, for example with trafilatura"
_MARK_UP = re.compile(
    rb"\s*<(\?xml|(!doctype|html|head|body|div|p|table|article|svg|rss|feed)[\s>])",
    re.IGNORECASE,
)
# Closing tags of any name, and HTML's others but after a word: vector<int>, a<b>c and <name> are
# none.
_TAG = re.compile(
    r"</[a-z][\w:.-]*\s*>|(?<!\w)<(?:a|article|aside|b|body|br|center|code|dd|div|dl|dt|em|font|footer|form|h[1-6]|head|header|hr|html|i"
    r"|iframe|img|input|label|li|link|main|meta|nav|ol|option|p|pre|ref|script|section|small|span|strong|style|sub|sup|table|tbody|td"
    r"|th|thead|title|tr|u|ul)(?:\s+[\w:-]+\s*=[^<>]*|\s*/?)>",
    re.IGNORECASE,
)
_MARK_UP_SUFFIXES = (".html", ".htm", ".xhtml", ".xml", ".svg")
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_BLANK = b"\xef\xbb\xbf \t\r\n\f"  # with a byte order mark
# No text has them in numbers, in whatever encoding of one byte or of UTF-8.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\f\r"))


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
        if not hidden.isdisjoint(path.parents):
            continue
        if path.name.startswith("."):
            hidden.add(path)
            yield LeftOut(path, "hidden")
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


def suffix_of(path: Path) -> str:
    """Lower-cased, of what is packed."""
    packed = path.suffix.lower() in _PACKED_SUFFIXES
    return (path.with_suffix("") if packed else path).suffix.lower()


def is_marked_up(start: str) -> bool:
    """Whether a text has a tag in 200 characters, and more than one."""
    return len(_TAG.findall(start)) > 1 + len(start) / 200


def check_prose(path: Path, start: bytes, is_found: bool) -> None:
    """Raises NoText for a file that starts like mark-up, a table or a binary format.

    is_found: in a folder, where an empty file is no error.
    """
    suffix = suffix_of(path)
    content = start.lstrip(_BLANK)
    if is_found and not content:
        raise NoText(f"{path} is empty")
    if suffix == ".json" and not content.startswith((b"{", b"[")):
        raise NoText(f"{path} is named .json and is no JSON")
    if message := foreign(start, "text"):
        raise NoText(f"{path} is {message}")
    # Markdown may begin with a tag.
    is_mark_up = suffix != ".md" and _MARK_UP.match(content)
    if is_mark_up or suffix in _MARK_UP_SUFFIXES:
        raise NoText(f"{path} is {MARK_UP}")
    if suffix in (".csv", ".tsv"):
        raise NoText(f"{path} is a table: write its text column as JSON Lines")
    # UTF-16, an error of its own.
    is_wide = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    # More than rare accidents; NULs of a text are dropped, as by the reference.
    controls = len(start) - len(start.translate(None, _CONTROLS))
    if not is_wide and controls > 1 + len(start) / 100:
        raise NoText(f"{path} is not text: it holds control characters")


def report_records(counts: dict[Path, int], folder: Path) -> str:
    """Adds records without a text to the list, by file, and returns their number for the summary,
    if there are any.
    """
    path = folder / LIST
    rows = [
        f"{name}\t{count:,} records whose text is null or blank\n"
        for name, count in counts.items()
    ]
    if not rows:
        return ""
    write_text(path, (path.read_text() if path.exists() else "") + "".join(rows))
    return f", {sum(counts.values()):,} records without a text skipped: {path}"


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
        raise DataError(f"{first_few(errors)}; all in {path}")
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
