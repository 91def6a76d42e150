"""Content digests of record files, computed once.

A digest is kept for as long as the file is the same one: a write changes ctime, which no program
can set back. The second run therefore reads nothing.
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path

from bert.data.format import content_digest, open_records
from common.files import text_of

FOLDER = ".digests"


def digest_of(path: Path, spare: Path | None = None) -> str:
    """The content digest of what a file holds, computed or kept from the last time.

    spare: a folder to keep it below where that of the file cannot be written, as in a container.
    Raises DataError.
    """
    identity = identity_of(path)
    for kept in _places(path, identity, spare):
        known, _, digest = text_of(kept).rpartition(" ")
        if known and known == identity and len(digest) == 32:
            return digest
    digest = content_digest(open_records(path)[0])
    keep(path, identity, digest, spare)
    return digest


def keep(path: Path, identity: str, digest: str, spare: Path | None = None) -> None:
    """Keeps the digest of a file that had this identity before it was read; one that was written to
    meanwhile has another by now.
    """
    for kept in _places(path, identity, spare):
        # Several ranks may write.
        temporary = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}")
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(f"{identity} {digest}\n")
            # Not synced, which takes longer than to read a small file: half of it is no digest.
            os.replace(temporary, kept)
            return


def identity_of(path: Path) -> str:
    """Size, times, number and device of a file; empty if there is none."""
    with suppress(OSError):
        status = os.stat(path)
        numbers = (
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
            status.st_dev,
        )
        return " ".join(map(str, numbers))
    return ""


def _places(path: Path, identity: str, spare: Path | None) -> list[Path]:
    """Where the digest of a file may be kept: beside it, or in the spare folder."""
    folder = path.parent.absolute()
    # With the device, whose number may differ between nodes that share the folder.
    name = f"{path.name}.{identity.rpartition(' ')[2]}.digest"
    spares = [spare / FOLDER / folder.relative_to("/") / name] if spare else []
    return [folder / FOLDER / name, *spares]
