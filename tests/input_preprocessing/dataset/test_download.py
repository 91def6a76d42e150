"""Downloads survive dropped connections and refuse wrong files; with a real server on loopback."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from pathlib import Path

import pytest

from input_preprocessing.dataset import download
from input_preprocessing.dataset.download import PublicFile

from ...refused import refused

CONTENT = bytes(range(256)) * 4000  # 1 MB


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; drops connections after `drop_after` bytes, the first `drops` times."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.drops = 0
        self.drop_after = 300_000
        self.ranges: list[str | None] = []
        self.ignore_ranges = False
        self.statuses: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        content = self.server.files.get(self.path.lstrip("/"))
        self.server.ranges.append(self.headers["Range"])
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
            return
        if content is None:
            self.send_error(404)
            return
        start = 0
        if self.headers["Range"] and not self.server.ignore_ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        is_page = content.startswith(b"<html>")
        kind = "text/html" if is_page else "application/octet-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        rest = content[start:]
        if self.server.drops > 0:
            self.server.drops -= 1
            self.wfile.write(rest[: self.server.drop_after])
            self.close_connection = True
        else:
            self.wfile.write(rest)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.01)
    with Server() as running:
        serve = running.serve_forever
        threading.Thread(target=serve, args=(0.05,), daemon=True).start()
        yield running
        running.shutdown()


def public(content: bytes = CONTENT, name: str = "a.bin") -> PublicFile:
    digest = f"md5 {hashlib.md5(content).hexdigest()}"
    return PublicFile(name, digest, len(content), "drive-id", "bert-input-files")


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_dropped_download_goes_on_where_it_stopped(server, tmp_path, ignore_ranges):
    server.files["a.bin"] = CONTENT
    server.drops, server.ignore_ranges = 3, ignore_ranges
    target = download.fetch_file(public(), tmp_path, server.url)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, *(f"bytes={n}-" for n in ([300_000] * 3 if ignore_ranges else
                                                           [300_000, 600_000, 900_000]))]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_a_download_goes_on_in_the_next_run(server, tmp_path, monkeypatch):
    server.files["a.bin"] = CONTENT
    server.drops, server.drop_after = 1000, 0
    (tmp_path / ".a.bin.partial").write_bytes(CONTENT[:500_000])
    with refused("6 times"):
        download.fetch_file(public(), tmp_path, server.url)
    server.drops, server.ranges[:] = 0, []
    assert download.fetch_file(public(), tmp_path, server.url).read_bytes() == CONTENT
    assert server.ranges == ["bytes=500000-"]


def test_a_complete_but_unrenamed_download_is_kept(server, tmp_path):
    server.files["a.bin"] = CONTENT
    (tmp_path / ".a.bin.partial").write_bytes(CONTENT)
    assert download.fetch_file(public(), tmp_path, server.url).read_bytes() == CONTENT


def test_a_busy_server_is_tried_again(server, tmp_path):
    server.files["a.bin"] = CONTENT
    server.statuses = [503, 429, 500]
    assert download.fetch_file(public(), tmp_path, server.url).read_bytes() == CONTENT


def test_wrong_bytes_are_refused_and_removed(server, tmp_path):
    server.files["a.bin"] = CONTENT[:-1] + b"x"
    with refused("has another file") as caught:
        download.fetch_file(public(), tmp_path, server.url)
    assert not list(tmp_path.iterdir())
    digest = public().digest.split()[1]
    for told in ("a.bin", "1.0 MB", digest, str(tmp_path / "a.bin")):
        assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("none", "404"), ("page", "web page")])
def test_a_missing_file_and_a_quota_page_are_distinguished(
    server, tmp_path, name, reason
):
    server.files["page"] = b"<html>quota exceeded</html>"
    with refused(reason):
        download.fetch_file(public(name=name), tmp_path, server.url)


def test_a_verified_file_is_not_fetched_again_and_a_strange_one_is_not_touched(
    server, tmp_path
):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    download.fetch_file(public(), tmp_path, server.url)
    assert not server.ranges
    (tmp_path / "a.bin").write_bytes(b"mine")
    with refused(r"is not the published file .md5 "):
        download.fetch_file(public(), tmp_path, server.url)
    assert (tmp_path / "a.bin").read_bytes() == b"mine"


def test_mlcommons_storage_comes_first_and_drive_after(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MLCOMMONS", f"{server.url}/metadata")
    monkeypatch.setattr(download, "_DRIVE", f"{server.url}/drive-")
    server.files["drive-drive-id"] = CONTENT
    assert download.fetch_file(public(), tmp_path, None).read_bytes() == CONTENT
    (tmp_path / "a.bin").unlink()
    server.files["metadata/bert-input-files.uri"] = f"{server.url}/store\n".encode()
    md5 = public().digest.removeprefix("md5 ")
    server.files["metadata/bert-input-files.md5"] = (
        f"{'0' * 32}  ./x\n{md5}  ./tf1 ckpt/a.bin\n".encode()
    )
    server.files["store/tf1%20ckpt/a.bin"] = CONTENT
    del server.files["drive-drive-id"]
    assert download.fetch_file(public(), tmp_path, None).read_bytes() == CONTENT


@pytest.fixture
def archive(monkeypatch, tmp_path):
    """A mirror folder with a text archive of 3 parts, and the other files."""
    monkeypatch.setattr(download, "NUM_PARTS", 3)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    texts = {f"part-0000{i}-of-00003": f"text {i}\n".encode() for i in range(3)}
    texts["eval.txt"] = b"eval\n"
    names = "part-00000-of-00003", "eval.txt"
    known = {name: hashlib.md5(texts[name]).hexdigest() for name in names}
    monkeypatch.setattr(download, "TEXT_MD5", known)
    make_archive(mirror / "results_text.tar.gz", texts)
    files = []
    for name in ("vocab.txt", "bert_config.json"):
        (mirror / name).write_bytes(name.encode())
        files.append(public(name.encode(), name))
    files.append(PublicFile("results_text.tar.gz", "", 0, "", ""))
    monkeypatch.setattr(download, "FILES", tuple(files))
    return mirror


def make_archive(path: Path, texts: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in texts.items():
            member = tarfile.TarInfo(f"results4/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_everything_comes_from_a_mirror_folder_unpacked(archive, tmp_path):
    download.download(tmp_path / "download", str(archive))
    folder = tmp_path / "download"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["bert_config.json", "results4", "vocab.txt"]
    assert (folder / "results4" / "part-00002-of-00003").read_bytes() == b"text 2\n"
    # As if killed before it was removed.
    (archive / "results_text.tar.gz").rename(folder / "results_text.tar.gz")
    download.download(tmp_path / "download", str(archive))  # nothing is fetched twice
    assert not (folder / "results_text.tar.gz").exists()


@pytest.mark.parametrize(("damage", "reason"), [("short", "cannot unpack"), ("missing", "lacks part-00002"),
                                                ("changed", "has md5")])  # fmt: skip
def test_a_damaged_archive_leaves_no_text(archive, tmp_path, damage, reason):
    path = archive / "results_text.tar.gz"
    with tarfile.open(path) as tar:
        texts = {Path(m.name).name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    if damage == "missing":
        del texts["part-00002-of-00003"]
    texts["part-00000-of-00003"] += b"x" * (damage == "changed")
    make_archive(path, texts)
    if damage == "short":
        path.write_bytes(path.read_bytes()[:100])
    with refused(reason):
        download.download(tmp_path / "download", str(archive))
    assert not (tmp_path / "download" / "results4").exists()
