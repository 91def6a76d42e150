"""Checksums of the files that torch.save writes: zip archives with a CRC-32 of each record.

torch.load does not compare them, so that a flipped bit is read as a weight.
"""

import zipfile
import zlib
from pathlib import Path


class ChecksumError(ValueError):
    """A file is not as it was written."""


def check(path: Path, known: int | None = None) -> None:
    """Reads a file and raises ChecksumError, or zipfile's errors, if a record is not as it was
    written.

    known: ``sum_of`` when it was written, if that was noted; it tells a whole file of another
    checkpoint.
    """
    with _opened(path) as archive:
        if known is not None and _sum(archive) != known:
            raise ChecksumError(f"{path.name} is of another checkpoint")
        if (record := archive.testzip()) is not None:
            raise ChecksumError(f"{record} in {path.name} differs from its checksum")


def sum_of(path: Path) -> int:
    """Checksum of the records' names, sizes and checksums, from the archive's directory alone."""
    with _opened(path) as archive:
        return _sum(archive)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise ChecksumError(
            f"{path.name} is not what torch.save writes, or cut off"
        ) from None


def _sum(archive: zipfile.ZipFile) -> int:
    # The sizes and CRCs of all records identify the content as torch.save wrote it, and are read
    # from the archive's directory at its end.
    records = [
        (record.filename, record.file_size, record.CRC) for record in archive.infolist()
    ]
    return zlib.crc32(repr(records).encode())
