"""SQuAD and GLUE are fetched once, resumed, and refused if they are not the published files."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile

import pytest

from input_preprocessing.dataset import finetuning
from input_preprocessing.stage.cli import run_stage

from ...refused import refused
from .test_download import Server, server  # noqa: F401 - the fixture of a server on loopback

QUESTIONS = b'{"data": []}' * 50_000
PAIRS = [
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    *(f'1\t{n}\t{n + 1}\tone "{n}\ttwo' for n in range(6)),
]


def archive(task: str, **tables: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, text in tables.items():
            zipped.writestr(f"{task}/{name}.tsv", text)
    return buffer.getvalue()


@pytest.fixture
def site(server, monkeypatch):  # noqa: F811
    """Small files in place of the real ones."""
    server.files = {file.name: QUESTIONS for file in finetuning.SOURCES["squad"]}
    server.files["CoLA.zip"] = archive(
        "CoLA",
        train="x\t1\t\tA cat .\nx\t0\t*\tCat a .\n",
        test="index\tsentence\n0\tA dog .\n",
    )
    server.files["msr_paraphrase_train.txt"] = "\r\n".join(PAIRS).encode()
    server.files["mrpc_dev_ids.tsv"] = b"1\t2\n4\t5\n"
    publish(monkeypatch, server)
    return server


def publish(monkeypatch: pytest.MonkeyPatch, site: Server) -> None:
    """The sources are those that the site has now."""
    sources = {}
    for task in ("squad", "MRPC", "CoLA"):
        files = finetuning.SOURCES[task]
        digests = [
            f"sha256 {hashlib.sha256(site.files[file.name]).hexdigest()}"
            for file in files
        ]
        sources[task] = tuple(
            file._replace(digest=digest, url=f"{site.url}/{file.name}")
            for file, digest in zip(files, digests, strict=True)
        )
    monkeypatch.setattr(finetuning, "SOURCES", sources)


def test_squad_comes_from_its_site_and_goes_on_where_it_broke_off(site, tmp_path):
    site.drops = 1
    finetuning.fetch("squad", tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        file.name for file in finetuning.SOURCES["squad"]
    )
    assert site.ranges == [None, "bytes=300000-", None, None, None]
    finetuning.fetch("squad", tmp_path, None)
    assert len(site.ranges) == 5, "what is there is not fetched again"


def test_glue_is_unpacked_and_mrpc_is_made_of_its_pairs(site, tmp_path):
    finetuning.fetch("CoLA", tmp_path / "CoLA", site.url)
    names = sorted(path.name for path in (tmp_path / "CoLA").iterdir())
    assert names == ["CoLA.zip", "test.tsv", "train.tsv"]
    made = (tmp_path / "CoLA" / "test.tsv").read_bytes()
    (tmp_path / "CoLA" / "test.tsv").write_text("index\tsentence\n")
    finetuning.fetch("CoLA", tmp_path / "CoLA", site.url)
    assert (tmp_path / "CoLA" / "test.tsv").read_bytes() == made, (
        "of the archive that is there"
    )
    finetuning.fetch("MRPC", tmp_path / "MRPC", site.url)
    tables = {
        path.name: path.read_text().splitlines()
        for path in (tmp_path / "MRPC").glob("*[nv].tsv")
    }
    header = PAIRS[0].removeprefix("\ufeff")
    assert tables == {
        "dev.tsv": [header, PAIRS[2], PAIRS[5]],
        "train.tsv": [header, PAIRS[1], PAIRS[3], PAIRS[4], PAIRS[6]],
    }
    asked = len(site.ranges)
    finetuning.fetch("MRPC", tmp_path / "MRPC", site.url)
    assert len(site.ranges) == asked


@pytest.mark.parametrize(("task", "name", "content", "published", "message"), [
    ("squad", "dev-v2.0.json", b"{}", False, "has another file .sha256 44136fa355b3678a"),
    ("CoLA", "CoLA.zip", archive("CoLA", train="x\n" * 2), False, "has another file .sha256 "),
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
        assert re.fullmatch("sha256 [0-9a-f]{64}|md5 [0-9a-f]{32}", file.digest), (
            file.name
        )


def test_without_a_network_what_lies_there_is_checked(
    site, tmp_path, monkeypatch, capsys
):
    words = ["finetuning", "--outputdir", str(tmp_path), "--task", "squad"]
    monkeypatch.setattr("sys.argv", words)
    (tmp_path / "squad").mkdir()
    for file in finetuning.SOURCES["squad"]:
        (tmp_path / "squad" / file.name).write_bytes(QUESTIONS)
    run_stage("finetuning")
    assert capsys.readouterr().err == f"{tmp_path / 'squad'}: complete and checked\n"
    assert not site.ranges
    (tmp_path / "squad" / "dev-v2.0.json").write_bytes(b"{}")
    with pytest.raises(SystemExit, match=r"is not the published file .sha256 "):
        run_stage("finetuning")
