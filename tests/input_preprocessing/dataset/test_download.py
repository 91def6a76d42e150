"""Downloads survive dropped connections and refuse wrong files, with a real server on loopback; SQuAD and GLUE, too."""

import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from input_preprocessing.dataset import download, finetuning
from input_preprocessing.dataset.download import PublicFile

from ...refused import refused
from ..conftest import run

CONTENT = bytes(range(256)) * 4000  # 1 MB


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; drops connections after `drop_after` bytes, the first `drops` times."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"a.bin": CONTENT}
        self.drops = 0
        self.drop_after = 300_000
        self.ranges: list[str] = []
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
        server = self.server
        content = server.files.get(self.path.lstrip("/"))
        given = self.headers["Range"] or ""
        server.ranges.append(given)
        if server.statuses or content is None:
            self.send_error(server.statuses.pop(0) if server.statuses else 404)
            return
        asked = "" if server.ignore_ranges else given
        start = int(asked.removeprefix("bytes=").rstrip("-") or 0)
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        is_page = content.startswith(b"<html>")
        kind = "text/html" if is_page else "application/octet-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        is_dropped = server.drops > 0
        server.drops -= is_dropped
        self.close_connection = is_dropped
        self.wfile.write(content[start:][: server.drop_after if is_dropped else None])


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


@pytest.mark.parametrize(("given", "partial", "starts"), [
    ({"drops": 3}, None, [0, 300_000, 600_000, 900_000]),
    ({"drops": 3, "ignore_ranges": True}, None, [0, 300_000, 300_000, 300_000]),
    ({"statuses": [503, 429, 500]}, None, [0, 0, 0, 0]),
    ({}, CONTENT, []),  # complete, but not yet renamed
])  # fmt: skip
def test_a_download_goes_on_where_it_stopped(server, tmp_path, given, partial, starts):
    vars(server).update(given)
    if partial:
        (tmp_path / ".a.bin.partial").write_bytes(partial)
    target = download.fetch_file(public(), tmp_path, server.url)
    assert target.read_bytes() == CONTENT
    assert server.ranges[: len(starts)] == [f"bytes={n}-" if n else "" for n in starts]
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_a_download_goes_on_in_the_next_run(server, tmp_path):
    server.drops, server.drop_after = 1000, 0
    (tmp_path / ".a.bin.partial").write_bytes(CONTENT[:500_000])
    with refused("6 times"):
        download.fetch_file(public(), tmp_path, server.url)
    server.drops, server.ranges[:] = 0, []
    assert download.fetch_file(public(), tmp_path, server.url).read_bytes() == CONTENT
    assert server.ranges == ["bytes=500000-"]


def test_wrong_bytes_are_refused_and_removed(server, tmp_path):
    server.files["a.bin"] = CONTENT[:-1] + b"x"
    with refused("has another file") as caught:
        download.fetch_file(public(), tmp_path, server.url)
    assert not list(tmp_path.iterdir())
    told = str(caught.value)
    wanted = "a.bin", "1.0 MB", public().digest.split()[1], str(tmp_path / "a.bin")
    assert all(each in told for each in wanted)
    assert "\n" not in told


@pytest.mark.parametrize(("name", "reason"), [("none", "404"), ("page", "web page")])
def test_a_missing_file_and_a_quota_page_differ(server, tmp_path, name, reason):
    server.files["page"] = b"<html>quota exceeded</html>"
    with refused(reason):
        download.fetch_file(public(name=name), tmp_path, server.url)


def test_a_verified_file_stays_and_a_strange_one_is_not_touched(server, tmp_path):
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
    server.files = {"drive-drive-id": CONTENT}
    assert download.fetch_file(public(), tmp_path, None).read_bytes() == CONTENT
    (tmp_path / "a.bin").unlink()
    server.files["metadata/bert-input-files.uri"] = f"{server.url}/store\n".encode()
    md5 = public().digest.removeprefix("md5 ").encode()
    listed = b"0" * 32 + b"  ./x\n" + md5 + b"  ./tf1 ckpt/a.bin\n"
    server.files["metadata/bert-input-files.md5"] = listed
    server.files["store/tf1%20ckpt/a.bin"] = CONTENT
    del server.files["drive-drive-id"]
    assert download.fetch_file(public(), tmp_path, None).read_bytes() == CONTENT


TEXTS = {f"part-0000{i}-of-00003": f"text {i}\n".encode() for i in range(3)}
TEXTS["eval.txt"] = b"eval\n"


@pytest.fixture
def archive(monkeypatch, tmp_path):
    """A mirror folder with a text archive of 3 parts, and the other files."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    known = {name: hashlib.md5(text).hexdigest() for name, text in TEXTS.items()}
    make_archive(mirror / "results_text.tar.gz", TEXTS)
    files = []
    for name in ("vocab.txt", "bert_config.json"):
        (mirror / name).write_bytes(name.encode())
        files.append(public(name.encode(), name))
    files.append(PublicFile("results_text.tar.gz", "", 0, "", ""))
    for name, value in (("NUM_PARTS", 3), ("TEXT_MD5", known), ("FILES", tuple(files))):
        monkeypatch.setattr(download, name, value)
    return mirror


def make_archive(path: Path, texts: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in texts.items():
            member = tarfile.TarInfo(f"results4/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_everything_comes_from_a_mirror_folder_unpacked(archive, tmp_path):
    folder = tmp_path / "download"
    download.download(folder, str(archive))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["bert_config.json", "results4", "vocab.txt"]
    assert (folder / "results4" / "part-00002-of-00003").read_bytes() == b"text 2\n"
    # As if killed before it was removed.
    (archive / "results_text.tar.gz").rename(folder / "results_text.tar.gz")
    download.download(folder, str(archive))  # nothing is fetched twice
    assert not (folder / "results_text.tar.gz").exists()


@pytest.mark.parametrize(("damage", "reason"), [
    ("short", "cannot unpack"),
    ("missing", "lacks part-00002"),
    ("changed", "has md5"),
])  # fmt: skip
def test_a_damaged_archive_leaves_no_text(archive, tmp_path, damage, reason):
    path = archive / "results_text.tar.gz"
    texts = {
        name: content + b"x" * (damage == "changed") for name, content in TEXTS.items()
    }
    if damage == "missing":
        del texts["part-00002-of-00003"]
    make_archive(path, texts)
    if damage == "short":
        path.write_bytes(path.read_bytes()[:100])
    with refused(reason):
        download.download(tmp_path / "download", str(archive))
    assert not (tmp_path / "download" / "results4").exists()


QUESTIONS = b'{"data": []}' * 50_000
PAIRS = [
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    *(f'1\t{n}\t{n + 1}\tone "{n}\ttwo' for n in range(6)),
]


def zip_of(task: str, **tables: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, text in tables.items():
            zipped.writestr(f"{task}/{name}.tsv", text)
    return buffer.getvalue()


@pytest.fixture
def site(server, monkeypatch):
    """Small files in place of the real ones."""
    server.files = {file.name: QUESTIONS for file in finetuning.SOURCES["squad"]}
    tables = {
        "train": "x\t1\t\tA cat .\nx\t0\t*\tCat a .\n",
        "test": "index\tsentence\n0\tA dog .\n",
    }
    server.files["CoLA.zip"] = zip_of("CoLA", **tables)
    server.files["msr_paraphrase_train.txt"] = "\r\n".join(PAIRS).encode()
    server.files["mrpc_dev_ids.tsv"] = b"1\t2\n4\t5\n"
    publish(monkeypatch, server)
    return server


def publish(monkeypatch: pytest.MonkeyPatch, site: Server) -> None:
    """The sources are those that the site has now."""

    def of_site(file: PublicFile) -> PublicFile:
        digest = hashlib.sha256(site.files[file.name]).hexdigest()
        return file._replace(digest=f"sha256 {digest}", url=f"{site.url}/{file.name}")

    tasks = ("squad", "MRPC", "CoLA")
    sources = {task: tuple(map(of_site, finetuning.SOURCES[task])) for task in tasks}
    monkeypatch.setattr(finetuning, "SOURCES", sources)


def test_squad_comes_from_its_site_and_goes_on_where_it_broke_off(site, tmp_path):
    site.drops = 1
    finetuning.fetch("squad", tmp_path, None)
    names = {file.name for file in finetuning.SOURCES["squad"]}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert site.ranges == ["", "bytes=300000-", "", "", ""]
    finetuning.fetch("squad", tmp_path, None)
    assert len(site.ranges) == 5, "what is there is not fetched again"


def test_glue_is_unpacked_again_of_the_archive_that_is_there(site, tmp_path):
    finetuning.fetch("CoLA", tmp_path, site.url)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["CoLA.zip", "test.tsv", "train.tsv"]
    made = (tmp_path / "test.tsv").read_bytes()
    (tmp_path / "test.tsv").write_text("index\tsentence\n")
    finetuning.fetch("CoLA", tmp_path, site.url)
    assert (tmp_path / "test.tsv").read_bytes() == made


def test_mrpc_is_made_of_its_pairs(site, tmp_path):
    finetuning.fetch("MRPC", tmp_path, site.url)
    header = PAIRS[0].removeprefix("\ufeff")
    for name, rows in (("dev", (2, 5)), ("train", (1, 3, 4, 6))):
        made = (tmp_path / f"{name}.tsv").read_text().splitlines()
        assert made == [header, *(PAIRS[row] for row in rows)]
    asked = len(site.ranges)
    finetuning.fetch("MRPC", tmp_path, site.url)
    assert len(site.ranges) == asked


@pytest.mark.parametrize(("task", "name", "content", "published", "message"), [
    ("squad", "dev-v2.0.json", b"{}", False, "has another file .sha256 44136fa355b3678a"),
    ("CoLA", "CoLA.zip", zip_of("CoLA", train="x\n" * 2), False, "has another file .sha256 "),
    ("MRPC", "mrpc_dev_ids.tsv", b"1\t2\n", False, "has another file .sha256 "),
    ("MRPC", "mrpc_dev_ids.tsv", None, False, "cannot download mrpc_dev_ids.tsv .6.2 kB, sha256 .*404"),
    ("CoLA", "CoLA.zip", b"PK no archive", True, "cannot unpack"),
])  # fmt: skip
def test_other_files_than_the_published_ones_are_one_line(
    site, tmp_path, monkeypatch, task, name, content, published, message
):
    del site.files[name]
    if content is not None:
        site.files[name] = content
    if published:
        publish(monkeypatch, site)
    with refused(message) as caught:
        finetuning.fetch(task, tmp_path, site.url)
    assert "\n" not in str(caught.value)


def test_archives_are_known_by_the_digests_that_others_recorded():
    for file in (file for files in finetuning.SOURCES.values() for file in files):
        known = "sha256 [0-9a-f]{64}|md5 [0-9a-f]{32}"
        assert re.fullmatch(known, file.digest), file.name


def test_without_a_network_what_lies_there_is_checked(site, tmp_path, capsys):
    folder = tmp_path / "squad"
    folder.mkdir()
    for file in finetuning.SOURCES["squad"]:
        (folder / file.name).write_bytes(QUESTIONS)
    words = ["finetuning", "--outputdir", tmp_path, "--task", "squad"]
    run(*words)
    assert capsys.readouterr().err == f"{folder}: complete and checked\n"
    assert not site.ranges
    (folder / "dev-v2.0.json").write_bytes(b"{}")
    with pytest.raises(SystemExit, match=r"is not the published file .sha256 "):
        run(*words)
