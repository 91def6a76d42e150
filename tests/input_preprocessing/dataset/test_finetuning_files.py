"""SQuAD and GLUE are fetched once, resumed, and refused if they are not the published files."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
import zipfile
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.dataset import finetuning
from input_preprocessing.stage.cli import run_stage

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
def site(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:  # noqa: F811
    """Small files in place of the real ones."""
    squad = [
        dataclasses.replace(
            file,
            digest=f"md5 {hashlib.md5(QUESTIONS).hexdigest()}",
            url=f"{server.url}/{file.name}",
        )
        for file in finetuning.SQUAD
    ]
    monkeypatch.setattr(finetuning, "SQUAD", tuple(squad))
    tables = {
        "MRPC": {"train.tsv": {"1": 4}, "dev.tsv": {"1": 2}},
        "CoLA": {"train.tsv": {"0": 1, "1": 1}, "test.tsv": {"": 1}},
    }
    monkeypatch.setattr(finetuning, "TABLES", tables)
    server.files = {file.name: QUESTIONS for file in squad}
    server.files["CoLA.zip"] = archive(
        "CoLA", train="x\t1\t\tA cat .\nx\t0\t*\tCat a .\n", test="index\tsentence\n0\tA dog .\n"
    )
    server.files["msr_paraphrase_train.txt"] = "\r\n".join(PAIRS).encode()
    server.files["mrpc_dev_ids.tsv"] = b"1\t2\n4\t5\n"
    publish(monkeypatch, server)
    return server


def publish(monkeypatch: pytest.MonkeyPatch, site: Server) -> None:
    """The sources of GLUE's tables are those that the site has now."""
    sources = {
        task: tuple(
            dataclasses.replace(
                file, digest=f"sha256 {hashlib.sha256(site.files[file.name]).hexdigest()}"
            )
            for file in finetuning.SOURCES[task]
        )
        for task in finetuning.TABLES
    }
    monkeypatch.setattr(finetuning, "SOURCES", sources)


def test_squad_comes_from_its_site_and_goes_on_where_it_broke_off(
    site: Server, tmp_path: Path
) -> None:
    site.drops = 1
    finetuning.fetch("squad", tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        file.name for file in finetuning.SQUAD
    )
    assert site.ranges == [None, "bytes=300000-", None, None, None]
    finetuning.fetch("squad", tmp_path, None)
    assert len(site.ranges) == 5, "what is there is not fetched again"


def test_glue_is_unpacked_and_mrpc_is_made_of_its_pairs(site: Server, tmp_path: Path) -> None:
    finetuning.fetch("CoLA", tmp_path / "CoLA", site.url)
    assert sorted(path.name for path in (tmp_path / "CoLA").iterdir()) == ["test.tsv", "train.tsv"]
    (tmp_path / "CoLA" / "test.tsv").write_text("index\tsentence\n")
    with pytest.raises(
        DataError, match=r"test.tsv has 0 examples, GLUE's has 1 examples: remove it"
    ):
        finetuning.check("CoLA", tmp_path / "CoLA")
    finetuning.fetch("MRPC", tmp_path / "MRPC", site.url)
    tables = {path.name: path.read_text().splitlines() for path in (tmp_path / "MRPC").iterdir()}
    header = PAIRS[0].removeprefix("\ufeff")
    assert tables == {
        "dev.tsv": [header, PAIRS[2], PAIRS[5]],
        "train.tsv": [header, PAIRS[1], PAIRS[3], PAIRS[4], PAIRS[6]],
    }
    asked = len(site.ranges)
    finetuning.fetch("MRPC", tmp_path / "MRPC", site.url)
    assert len(site.ranges) == asked


@pytest.mark.parametrize(
    ("task", "name", "content", "published", "message"),
    [
        (
            "squad",
            "dev-v2.0.json",
            b"{}",
            False,
            "has another file .md5 99914b932bd37a50b983c5e7c90ae93b.",
        ),
        ("CoLA", "CoLA.zip", archive("CoLA", train="x\n" * 2), False, "has another file .sha256 "),
        ("MRPC", "mrpc_dev_ids.tsv", b"1\t2\n", False, "has another file .sha256 "),
        (
            "MRPC",
            "mrpc_dev_ids.tsv",
            None,
            False,
            "cannot download mrpc_dev_ids.tsv .6.2 kB, sha256 .*404",
        ),
        ("CoLA", "CoLA.zip", b"PK no archive", True, "cannot unpack"),
        (
            "CoLA",
            "CoLA.zip",
            archive("CoLA", train="one line"),
            True,
            r"has 1 examples \(0 with label 0, 0 with label 1\)",
        ),
        (
            "CoLA",
            "CoLA.zip",
            archive("CoLA", train="x\t1\n" * 2),
            True,
            r"has 2 examples \(0 with label 0, 2 with label 1\), GLUE's has 2 examples \(1 with label 0, 1 with ",
        ),
        (
            "MRPC",
            "mrpc_dev_ids.tsv",
            b"1\t2\n",
            True,
            r"train.tsv has 5 examples .*, GLUE's has 4 examples",
        ),
    ],
)
def test_other_files_than_the_published_ones_are_one_line(
    site: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    task: str, name: str, content: bytes | None, published: bool, message: str,
) -> None:  # fmt: skip
    del site.files[name]
    if content is not None:
        site.files[name] = content
    if published:
        publish(monkeypatch, site)
    with pytest.raises(DataError, match=message) as caught:
        finetuning.fetch(task, tmp_path, site.url)
    assert "\n" not in str(caught.value)


def test_labels_are_counted_of_as_many_examples_as_glue_publishes() -> None:
    sizes = {
        task: [sum(table.values()) for table in tables.values()]
        for task, tables in finetuning.TABLES.items()
    }
    assert sizes == {
        "MRPC": [3668, 408], "SST-2": [67349, 872, 1821], "CoLA": [8551, 1043, 1063],
        "MNLI": [392702, 9815, 9832, 9796, 9847], "QQP": [363846, 40430, 390965], "QNLI": [104743, 5463, 5463],
        "RTE": [2490, 277, 3000], "STS-B": [5749, 1500, 1379], "WNLI": [635, 71, 146],
    }  # fmt: skip
    assert set(sizes) == set(finetuning.SOURCES)


def test_archives_are_known_by_the_digests_that_others_recorded() -> None:
    for task, files in finetuning.SOURCES.items():
        assert finetuning.TABLES[task].keys() >= {"train.tsv"}
        for file in files:
            assert re.fullmatch("sha256 [0-9a-f]{64}", file.digest), file.name
            assert file.size


def test_without_a_network_what_lies_there_is_checked(
    site: Server, tmp_path: Path, monkeypatch, capsys
) -> None:
    def call() -> None:
        words = ["finetuning", "--outputdir", str(tmp_path), "--task", "squad", "--skip-download"]
        monkeypatch.setattr("sys.argv", words)
        run_stage("finetuning")

    (tmp_path / "squad").mkdir()
    for file in finetuning.SQUAD[:3]:
        (tmp_path / "squad" / file.name).write_bytes(QUESTIONS)
    with pytest.raises(SystemExit, match=r"dev-v2.0.json is missing; put it there"):
        call()
    (tmp_path / "squad" / "dev-v2.0.json").write_bytes(b"{}")
    with pytest.raises(SystemExit, match=r"is not the published file .md5 "):
        call()
    (tmp_path / "squad" / "dev-v2.0.json").write_bytes(QUESTIONS)
    call()
    assert capsys.readouterr().err == f"{tmp_path / 'squad'}: complete and checked\n"
    assert not site.ranges
