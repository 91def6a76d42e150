"""Downloads the benchmark's public files to OUTPUTDIR/download, resuming partial downloads, and
verifies them.

Files: bert_config.json, vocab.txt, the TensorFlow 1 checkpoint model.ckpt-28252 and the Wikipedia
text, which is unpacked to results4/. Sources: MLCommons' storage, then Google Drive; or --mirror, a
URL or folder with the files. A file is complete if its md5 is right; if no source has it, the
message says which file to put where.
"""

import argparse
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

from bert.data.prepared import NUM_PARTS, TEXT_MD5
from bert.data.records import DataError
from input_preprocessing.stage.cli import human_bytes, say
from input_preprocessing.stage.manifest import PUBLISHED, hash_of, md5_of
from input_preprocessing.stage.parallel import Progress, run_tasks

MLCOMMONS = "https://training.mlcommons-storage.org/metadata"
# confirm=t: without it Drive answers for large files with a page on missing virus scans.
_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
_ATTEMPTS = 6
RETRY_SECONDS = 1.0  # before the second attempt; doubles with each
# Seconds for a connection and for each read, not for a whole file.
_TIMEOUT = 60.0
_CHUNK = 1 << 20


class PublicFile(NamedTuple):
    """A published file with its digest, "md5 7f59165e..." or "sha256 ..."; '': checked after
    unpacking.

    Its source is its url, or else MLCommons' storage and Google Drive.
    """

    name: str
    digest: str
    size: int = 0  # bytes; 0: unknown
    drive_id: str = ""
    dataset: str = "bert-input-files"  # MLCommons' metadata file that lists it
    url: str = ""

    def digest_of(self, path: Path) -> str:
        """Digest of a local file in the format of ``digest``. Raises DataError if it cannot be
        read.
        """
        kind = self.digest.partition(" ")[0]
        return f"{kind} {hash_of(path, kind)}" if kind else ""


FILES = tuple(PublicFile(**file) for file in PUBLISHED["benchmark"])


class SourceError(Exception):
    """A source lacks the file, or does not answer."""


def fetch_url(url: str, partial: Path, label: str) -> None:
    """Fetches `url` to `partial`, resuming where an earlier attempt or run stopped.

    Raises:
        SourceError: the server lacks the file, answers with a web page, or fails six times without
        progress.
    """
    failures = 0
    while failures < _ATTEMPTS:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            if _fetch_rest(url, partial, before, label):
                return
            reason = "connection closed early"
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # range not satisfiable: already complete
                return
            # Time-outs (408), too many requests (429) and errors of the server pass; others do not.
            if error.code < 500 and error.code not in (408, 429):
                raise SourceError(
                    f"{url} answers {error.code} {error.reason}"
                ) from error
            reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        after = partial.stat().st_size if partial.exists() else 0
        # Only attempts without progress count: 13 GB may take many connections.
        failures = 0 if after > before else failures + 1
        if failures:
            time.sleep(min(30.0, RETRY_SECONDS * 2 ** (failures - 1)))
    raise SourceError(f"{url}: {reason}, {_ATTEMPTS} times")


def _fetch_rest(url: str, partial: Path, have: int, label: str) -> bool:
    """Appends the rest of the file from byte `have` on; False if the server sent less than
    announced.
    """
    request = urllib.request.Request(
        url, headers={"Range": f"bytes={have}-"} if have else {}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        if response.headers.get_content_type() == "text/html":
            raise SourceError(
                f"{url.split('&id=')[0]} answers with a web page (over its quota, or a login is needed)"
            )
        # A server that ignores the range sends the whole file, which replaces what is there.
        start = have if response.status == 206 else 0  # 206: partial content
        expected = int(response.headers.get("Content-Length") or 0)
        progress = Progress(label, float(start + expected) if expected else 0.0)
        progress.done = float(start)
        with open(partial, "ab" if response.status == 206 else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                progress.advance(len(chunk))
        progress.close()
    return not expected or progress.done == start + expected


def _mlcommons_url(file: PublicFile) -> str:
    """URL of the file in MLCommons' storage: BASE.uri holds the folder's URL, BASE.md5 lists its
    files.
    """
    base = f"{MLCOMMONS}/{file.dataset}"
    try:
        with urllib.request.urlopen(f"{base}.uri", timeout=_TIMEOUT) as response:
            folder = response.read(10_000).decode().strip()
        with urllib.request.urlopen(f"{base}.md5", timeout=_TIMEOUT) as response:
            listing = response.read(10_000_000).decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise SourceError(f"{base}.uri: {getattr(error, 'reason', error)}") from error
    for line in listing.splitlines():
        md5, _, name = line.partition(" ")
        path = name.strip().lstrip("*").removeprefix("./")
        # By content; by name the archive of the text, of which no md5 is recorded.
        if f"md5 {md5}" == file.digest or path.rpartition("/")[2] == file.name:
            return f"{folder.rstrip('/')}/{urllib.parse.quote(path)}"
    raise SourceError(f"{base}.md5 does not list {file.name}")


def fetch_file(file: PublicFile, folder: Path, mirror: str | None) -> Path:
    """The verified file in `folder`, fetched if missing.

    Raises:
        DataError: there is another file with this name, or no source provided the right one.
    """
    target = folder / file.name
    if target.is_file():
        if file.digest_of(target) == file.digest:
            return target
        raise DataError(
            f"{target} is not the published file ({file.digest}); remove it, or use --skip-download"
        )
    partial = folder / f".{file.name}.partial"
    reasons = []
    if mirror:
        sources = [f"{mirror.rstrip('/')}/{file.name}"]
    else:
        # "" stands for MLCommons' storage, whose URL is asked for only when it is needed.
        sources = [file.url] if file.url else ["", _DRIVE + file.drive_id]
    for source in sources:
        # A partial file of an earlier run may be from another version: then try the source again
        # from the start.
        for _ in range(2 if partial.exists() else 1):
            try:
                if not source or "://" in source:
                    fetch_url(source or _mlcommons_url(file), partial, file.name[:24])
                elif Path(source).is_file():
                    shutil.copyfile(source, partial)
                else:
                    raise SourceError(f"no {source}")
            except SourceError as error:
                reasons.append(str(error))
                break
            except OSError as error:
                partial.unlink(missing_ok=True)
                reason = f"cannot write {partial}: {error.strerror}"
                raise DataError(
                    f"{reason}; check space and permissions, run again"
                ) from error
            # Both are empty for the archive of the text: its contents are compared later.
            digest = file.digest_of(partial)
            if digest == file.digest:
                os.replace(partial, target)
                return target
            partial.unlink()
            reasons.append(f"a source has another file ({digest})")
    about = f"{human_bytes(file.size)}, " * bool(file.size) + (
        file.digest or "13 GB of text within"
    )
    raise DataError(
        f"cannot download {file.name} ({about}): {'; '.join(reasons)}; put it at {target} and run again"
    )


def unpack_text(archive: Path, folder: Path) -> None:
    """Unpacks results_text.tar.gz to `folder` (results4) atomically, and checks it.

    Raises:
        DataError: damaged archive, missing parts or wrong md5.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    progress = Progress("unpack text", float(archive.stat().st_size))
    try:
        with open(archive, "rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
            for member in tar:
                content = tar.extractfile(member)
                if member.isfile() and content is not None:
                    # By the bare name: no path in the archive leads out of the folder.
                    with open(partial / Path(member.name).name, "wb") as file:
                        shutil.copyfileobj(content, file, _CHUNK)
                progress.done = float(raw.tell())
                progress.refresh()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(
            f"cannot unpack {archive}: {error}; remove it and download it again"
        ) from error
    finally:
        progress.close()
    # The 500 parts and eval.txt must be there; of some the md5 is published.
    wanted = {
        f"part-{i:05d}-of-{NUM_PARTS:05d}": "" for i in range(NUM_PARTS)
    } | TEXT_MD5
    if missing := [name for name in wanted if not (partial / name).is_file()]:
        raise DataError(
            f"the text lacks {missing[0]}; download results_text.tar.gz again"
        )
    known = [partial / name for name, md5 in wanted.items() if md5]
    for path, md5 in zip(
        known, run_tasks("check text", md5_of, known, jobs=1), strict=True
    ):
        if md5 != wanted[path.name]:
            wrong = f"has md5 {md5}, not {wanted[path.name]}"
            raise DataError(
                f"{path.name} of the text {wrong}; download results_text.tar.gz again"
            )
    # Only now does results4 exist, so that where it exists it was checked.
    os.replace(partial, folder)


def download(folder: Path, mirror: str | None = None) -> None:
    """Downloads all files to `folder`, unpacks the text to results4 and removes its archive.

    Raises:
        DataError: a file cannot be downloaded or is wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    *others, archive = FILES
    for file in others:
        fetch_file(file, folder, mirror)
    if not (folder / "results4").is_dir():
        unpack_text(fetch_file(archive, folder, mirror), folder / "results4")
    # Also when an earlier run was killed between unpacking and this line.
    (folder / archive.name).unlink(missing_ok=True)


def main(options: argparse.Namespace) -> None:
    download(options.outputdir / "download", options.mirror)
    say(f"{options.outputdir / 'download'}: complete and verified")
