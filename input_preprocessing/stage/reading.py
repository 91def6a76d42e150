"""Reading what others write: a file that changes under the reader, or is not the text it should be, is an error."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

from bert.data.records import DataError

MOST_UNDECODABLE = 0.001  # of a text's bytes; above, it is of another encoding or no text
_SIGNATURES = {
    b"\x1f\x8b": "gzip", b"BZh91AY&": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip",
    b"\x89HDF\r\n\x1a\n": "HDF5", b"PAR1": "Parquet", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip

Stamp = tuple[int, int, int]  # bytes, time of change, number of the file


def stamp_of(status: os.stat_result) -> Stamp:
    """Detects that a file was written to or replaced during a run; between runs, contents are compared instead."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def changed(path: Path) -> DataError:
    return DataError(f"{path} changed while it was read; run the same command again once it is complete")


def read_whole(path: Path, option: str) -> bytes:
    """The contents of a file.

    Args:
        path: of the file.
        option: named in the message where it cannot be read.

    Raises:
        DataError: it cannot be read, or was written to or replaced meanwhile.
    """
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            data = file.read()
        after = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read the text {path}: {error.strerror}; check {option}") from error
    if stat.S_ISREG(before.st_mode) and (stamp_of(after) != stamp_of(before) or len(data) != before.st_size):
        raise changed(path)  # a pipe has no size
    return data


def read_text(path: Path, option: str) -> tuple[bytes, str]:
    """The contents of a text file and their md5; bytes that are left out of it are told on stderr.

    Raises:
        DataError: it cannot be read, changed meanwhile, or more than MOST_UNDECODABLE of it is not UTF-8.
    """
    data = read_whole(path, option)
    check_is_text(path, data)
    wrong = undecodable_bytes(data)
    share = f"{path}: {wrong:,} of {len(data):,} bytes are not UTF-8"
    if wrong > MOST_UNDECODABLE * len(data):
        raise DataError(f"{share}; convert it first, for example with iconv -f LATIN1 -t UTF-8, or copy it again")
    if wrong:
        print(f"warning: {share} and are left out", file=sys.stderr)
    if zeros := data.count(0):  # which the reference leaves out as well
        note = "; is it UTF-16?" if zeros > MOST_UNDECODABLE * len(data) else ""
        print(f"warning: {path}: {zeros:,} of {len(data):,} bytes are NUL and are left out{note}", file=sys.stderr)
    return data, hashlib.md5(data).hexdigest()


def check_is_text(path: Path, start: bytes) -> None:
    """Raises DataError for a file that starts as a packed one, or one of another encoding, does."""
    kind = next((kind for signature, kind in _SIGNATURES.items() if start.startswith(signature)), None)
    if kind:
        raise DataError(f"{path} is not text but {kind}; unpack or convert it to UTF-8, or copy the text again")


def undecodable_bytes(data: bytes) -> int:
    """How many bytes are no part of UTF-8 text: what a decoder drops."""
    try:
        data.decode("utf-8")
        return 0
    except UnicodeDecodeError:
        return len(data) - len(data.decode("utf-8", "ignore").encode("utf-8"))
