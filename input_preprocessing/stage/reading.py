"""Reads input files: one that changes while it is read, or is not text as expected, is an error."""

import codecs
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import charset_normalizer
import numpy as np

from bert.data.records import Array, DataError
from input_preprocessing.stage.cli import say

# Share of a text's bytes; above, it is in another encoding or no text.
MOST_UNDECODABLE = 0.001
CHUNK = 1 << 20  # bytes
_SAMPLE = 4000  # bytes on either side
# Those that files are in: of all that there are, rare ones would be found too often.
_ENCODINGS = [
    "cp1252",
    "cp1251",
    "koi8_r",
    "gb18030",
    "cp932",
    "euc_jp",
    "big5",
    "cp949",
    "cp1250",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
    "cp850",
    "cp866",
    "mac_roman",
    "utf_16_le",
    "utf_16_be",
]
_FEWEST = 5  # bytes that are not ASCII, by which an encoding may be told
# pzstd begins with a frame that others skip, of one of 16 kinds.
PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
} | {bytes([kind]) + b"\x2a\x4d\x18": "zstd" for kind in range(0x50, 0x60)}
_SIGNATURES = PACKED | {
    b"PK\3\4": "zip",
    b"\x89HDF\r\n\x1a\n": "HDF5",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

Stamp = tuple[int, int, int]  # size, modification time, inode


def stamp_of(status: os.stat_result) -> Stamp:
    """Stamp to detect changes of a file during a run; between runs, contents are compared
    instead.
    """
    return status.st_size, status.st_mtime_ns, status.st_ino


def changed(path: Path) -> DataError:
    return DataError(
        f"{path} changed while it was read; run the same command again once it is complete"
    )


@contextmanager
def readable(name: object, hint: str) -> Iterator[None]:
    """Turns OSError into DataError. name: the file's, for the message."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}; {hint}") from error


def open_text(
    path: Path, option: str, name: Path | None = None
) -> tuple[BinaryIO, str]:
    """Opens a text file, checked like in `read_text` but not kept in memory; also returns its
    md5. name: as the user knows it, if the path is its unpacked copy.
    """
    with readable(f"the text {path}", f"check {option}"):
        file: BinaryIO = open(path, "rb")  # noqa: SIM115 (the caller's)
        md5 = _check(name or path, iter(lambda: file.read(CHUNK), b""))
        file.seek(0)
    return file, md5


def read_text(path: Path, option: str) -> tuple[bytes, str]:
    """Contents of a text file and their md5; warns about bytes that will be dropped.

    Args:
        path: of the file.
        option: named in the error message.

    Raises:
        DataError: it cannot be read, changed meanwhile, or more than MOST_UNDECODABLE of it is not
        UTF-8.
    """
    with readable(f"the text {path}", f"check {option}"):
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            data = file.read()
        after = os.stat(path)
    if stat.S_ISREG(before.st_mode) and (
        stamp_of(after) != stamp_of(before) or len(data) != before.st_size
    ):
        raise changed(path)  # a pipe has no size
    return data, _check(
        path, (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
    )


def slices(paths: Sequence[Path], positions: Array) -> Iterator[list[bytes]]:
    """Contents at positions (file, begin, end), (N, 3): a list per file, in file order."""
    for number in np.unique(positions[:, 0]).tolist():
        with open(paths[number], "rb") as file:
            texts = []
            for begin, end in positions[positions[:, 0] == number, 1:].tolist():
                file.seek(begin)
                texts.append(file.read(end - begin))
        yield texts


def _check(path: Path, chunks: Iterable[bytes]) -> str:
    """md5 of a text's bytes. Warns about bytes that will be dropped; raises DataError if too many
    are not UTF-8.
    """
    # Incremental: a character may be cut between two chunks.
    digest, decoder = hashlib.md5(), codecs.getincrementaldecoder("utf-8")("ignore")
    size = kept = zeros = 0
    odd = b""  # some of the text about the first byte that is not UTF-8
    for chunk in chunks:
        if not size:
            check_is_text(path, chunk)
        digest.update(chunk)
        size += len(chunk)
        # The bytes that are left after decoding as the instance maker does.
        kept += len(decoder.decode(chunk).encode())
        zeros += chunk.count(0)
        if not odd:
            odd = _beside_an_odd_byte(chunk)
    share = f"{path}: {size - kept:,} of {size:,} bytes are not UTF-8"
    if size - kept > MOST_UNDECODABLE * size:
        raise DataError(f"{share}; {_advice(odd)}")
    if size > kept:
        say(f"warning: {share} and are dropped")
    if zeros:  # dropped by the reference, too
        note = "; is it UTF-16?" if zeros > MOST_UNDECODABLE * size else ""
        say(
            f"warning: {path}: {zeros:,} of {size:,} bytes are NUL and are dropped{note}"
        )
    return digest.hexdigest()


def _beside_an_odd_byte(chunk: bytes) -> bytes:
    """The lines about the first byte of a chunk that is not UTF-8; none if all are."""
    try:
        chunk.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":  # goes on in the next chunk
            return chunk[max(0, error.start - _SAMPLE) : error.start + _SAMPLE]
    return b""


def _advice(sample: bytes) -> str:
    """What encoding a sample seems to be in, with its first other letters for the user to judge,
    since every byte is some letter in many encodings.
    """
    others = len(sample.translate(None, bytes(range(128))))
    if others < _FEWEST:
        return "too few to tell its encoding; convert it first with iconv, or copy it again"
    found = charset_normalizer.from_bytes(sample, cp_isolation=_ENCODINGS).best()
    if found is None or found.encoding in ("utf_8", "ascii"):
        return "it is in no encoding that is known: damaged or binary; copy it again"
    word = next((word for word in str(found).split() if not word.isascii()), "")
    # Codec names of Python are iconv's but for their underscores.
    name = codecs.lookup(found.encoding).name.replace("_", "-").upper()
    return (
        f"it may be {name}, if {word[:40]!r} is one of its words: "
        f"convert it first, with iconv -f {name} -t UTF-8, or copy it again"
    )


def check_is_text(path: Path, start: bytes) -> None:
    """Raises DataError for a file that starts like a compressed or binary one, or one in another
    encoding.
    """
    kinds = (kind for begins, kind in _SIGNATURES.items() if start.startswith(begins))
    if kind := next(kinds, ""):
        raise DataError(
            f"{path} is not text but {kind}; unpack or convert it to UTF-8, or copy the text again"
        )
