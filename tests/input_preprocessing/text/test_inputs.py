"""Every file of a folder is in the corpus, or listed with the reason; what cannot be read is told
all at once.
"""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import json
import os
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.stage import manifest, reading
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.text import json_lines, sources
from input_preprocessing.text import sentences as sentences_module

from ...refused import refused
from ..conftest import made_up_documents
from .test_sources import read_pool, sentences

DOCUMENTS = made_up_documents(12)
TEXT = " ".join([*DOCUMENTS[0], *DOCUMENTS[1]])
PROSE = {"prose.txt": TEXT, "more.md": TEXT[::-1], "sub/page": TEXT[5:]}


def tar_of(text: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("book.txt")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return file.getvalue()


# name: content, and the reason why it is left out of a folder
LEFT_OUT = {
    "README.md": (b"About.", "README, licence or checksums: name it as --input to use it"),
    "sub/LICENSE": (b"Yours.", "README, licence or checksums"),
    "data.md5": (b"0a1b data", "README, licence or checksums"),
    ".git/config": (b"x", "hidden"),
    "page.html": (b"<p>Text.</p>", "HTML or XML: extract its text"),
    "page": (b"\n<!DOCTYPE html><p>Text.</p>", "HTML or XML"),
    "dump.xml": (b'\xef\xbb\xbf<?xml version="1.0"?><a/>', "HTML or XML"),
    "wiki.xml": (b'<mediawiki xmlns="x">', "a Wikipedia dump: make text of it"),
    "wiki.xml.bz2": (bz2.compress(b"<mediawiki>"), "a Wikipedia dump"),
    "paper.txt": (b"%PDF-1.7 ...", "PDF: convert it to text"),
    "old.rtf": (b"{\\rtf1 Text.}", "RTF: convert it to text"),
    "old.doc": (b"\xd0\xcf\x11\xe0" + bytes(99), "an old office document"),
    # As many NULs as by chance, as in what is compressed.
    "photo.jpg": (random.Random(1).randbytes(9000), "not text: it holds control"),
    "books.gz": (gzip.compress(tar_of(TEXT * 9)), "a tar archive: unpack it"),
    "PAGE.HTM": (b"Text.", "HTML or XML"),
    "part": (b'<div class="x">Text.</div>', "HTML or XML"),
    "table.csv.gz": (gzip.compress(b"id,text\n1,a\n"), "a table: write its text column"),
    "blank": (b"\xef\xbb\xbf \n\n", "empty"),
    "table.parquet": (b"PAR1...", "Parquet: convert it to text"),
    "book.docx": (b"PK\3\4...", "or a zip archive: convert it to text"),
    "nothing": (b"", "empty"),
    "settings.json": (b'{\n "a": 1\n}', "JSON, but not JSON Lines: write a record per line"),
    "list.json": (b'[{"text": "a"}]', "JSON, but not JSON Lines"),
    "list": (b'[\n {"text": "a"}\n]', "JSON, but not JSON Lines"),
    "list.jsonl": (b'[{"text": "a"}, {"text": "b"}]\n', "JSON, but not JSON Lines"),
    "list.txt": (b'["A text.", "b"]\n["Another.", "c"]\n', "JSON, but not JSON"),
    "mixed.txt": (b'[1, {"text": "a"}]\n', "JSON, but not JSON Lines"),
    "list.json.gz": (gzip.compress(b"[1, 2]"), "JSON, but not JSON Lines"),
    "pretty.json.gz": (gzip.compress(b'{"a": 1,\n"b": 2}'), "JSON, but not JSON"),
    "UPPER.JSON": (b"[1]", "JSON, but not JSON Lines"),
    "strings.jsonl": (b'"A text."\n"Another."\n', "JSON, but not JSON Lines"),
    "commented": (b"<!-- saved -->\n<html><p>Text.</p></html>", "HTML or XML"),
    "fragment.md": (b'<span>A part.</span> See <a href="x">it</a>.', "HTML or XML"),
    "mail.eml": (b"Title: x\n\n<html><p>Text.</p></html>", "HTML or XML"),
    "tags.jsonl": (b'{"text": "<p>A text.<br/>More.</p>", "id": 1}\n' * 9, "HTML or XML"),
    "crawl": (b"WARC/1.0\r\nWARC-Type: response\r\n", "a web archive"),
    "mbox": (b"From a@b.org Mon Jan  1 10:00:00 2024\nSubject: x\n", "a mailbox"),
    "pointer.txt": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n", "a Git LFS pointer: get the file itself"),
    "wiki_00": (b'<doc id="1" title="T">\nT\n\nText.\n</doc>\n', "WikiExtractor's: have it write"),
    "index.json": (b'{"a": 1}\n', "JSON without the field 'text'"),
    "words.json": (b"no JSON", "named .json and is no JSON"),
}  # fmt: skip


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return folder


def corpus(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    line = ["corpus", "--outputdir", str(out), "--vocab-size", "200", *words]
    monkeypatch.setattr("sys.argv", line)
    run_stage("corpus")


def test_each_file_is_used_or_listed_with_its_reason(tmp_path, monkeypatch, capsys):
    folder = write(
        tmp_path / "in", {name: content for name, (content, _) in LEFT_OUT.items()}
    )
    write(
        folder,
        {
            f"{number}.md": f"<p>{' '.join(document)}"
            for number, document in enumerate(DOCUMENTS)
        },
    )
    corpus(monkeypatch, tmp_path / "out", "--input", str(folder))
    told = capsys.readouterr().err
    assert (
        f"12 files used, {len(LEFT_OUT)} left out (10 JSON, but not JSON Lines, 9 HTML or XML, 3 README, "
        in told
    )
    assert "12 documents" not in told, "one of them is for evaluation"
    lines = (tmp_path / "out/download/left_out.tsv").read_text().splitlines()
    listed = dict(line.split("\t") for line in lines)
    assert len(listed) == len(LEFT_OUT)
    for name, (_, reason) in LEFT_OUT.items():
        assert reason in listed[str(folder / name.replace("/config", ""))]


def test_a_name_with_tabs_line_breaks_or_other_bytes_is_one_cell_of_the_list(
    tmp_path, monkeypatch, capsys
):
    names = ["a\tb.html", "c\nd.html", os.fsdecode(b"\xff.html"), "ä.html"]
    folder = write(tmp_path / "in", dict.fromkeys(names, "<p>Text.") | PROSE)
    write(folder, {f"{n}.txt": " ".join(text) for n, text in enumerate(DOCUMENTS)})
    corpus(monkeypatch, tmp_path / "out", "--input", str(folder))
    lines = (tmp_path / "out/download/left_out.tsv").read_text("utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == [
        str(folder / name)
        for name in ("a\\tb.html", "c\\nd.html", "ä.html", "\\udcff.html")
    ]


@pytest.mark.parametrize(
    "name", [name for name in LEFT_OUT if "empty" not in LEFT_OUT[name][1]]
)
def test_a_file_that_is_named_is_used_or_an_error(tmp_path, name):
    content, reason = LEFT_OUT[name]
    path = write(tmp_path, {name: content}) / name
    if "README" in reason or reason == "hidden":
        assert len(read_pool([str(path)], "auto", "text", tmp_path / "out").found) == 1
    else:
        expected = "no text 'text'" if name == "index.json" else reason
        with refused(expected):
            read_pool([str(path)], "auto", "text", tmp_path / "out")


def test_a_folder_of_readmes_alone_is_an_error(tmp_path):
    folder = write(tmp_path / "in", {"README.md": "About.", ".hidden": "x"})
    with refused(r"has no files of text \(1 hidden, 1 README, .*\)"):
        read_pool([str(folder)], "auto", "text", tmp_path / "out")


def test_all_errors_are_told_at_once_by_the_names_that_the_user_knows(tmp_path):
    bad = {
        "a.txt": "café ".encode("latin-1") * 9,
        "b.gz": gzip.compress(b'{"text": "a"}\n{"body": "b"}\n'),
        "c.jsonl": b'{"text": "a"}\nnothing\n',
        "d.gz": gzip.compress(b"text" * 99)[:-9],
    }
    folder = write(tmp_path / "in", {**PROSE, **bad})
    with pytest.raises(DataError) as caught:
        read_pool([str(folder)], "auto", "text", tmp_path / "out")
    told = str(caught.value)
    assert "\n" not in told
    assert "/a.txt: 9 of 54 bytes are not UTF-8" in told or "/a.txt: 9 of 45" in told
    assert "in/b.gz: line 2 has no text 'text' (it has body); give --text-field" in told
    assert "in/c.jsonl: line 2 is not JSON" in told
    assert "; and 1 more; all in " in told
    listed = (tmp_path / "out" / "left_out.tsv").read_text()
    assert all(str(folder / name) in listed for name in bad)


def test_errors_beyond_what_is_looked_at_first_are_told_together(tmp_path, monkeypatch):
    for module in (sources, json_lines):
        monkeypatch.setattr(module, "DETECTED_ON", 10)
    lines = '{"text": "A cat sat here."}\n' * 9 + "{}\n"
    files = {"a.jsonl": lines, "b.gz": gzip.compress(lines.encode())}
    folder = write(tmp_path / "in", files)
    with refused(r"in/a.jsonl: line 10 has no text .*in/b.gz: line 10 has"):
        read_pool([str(folder)], "auto", "text", tmp_path / "out")


@pytest.mark.parametrize("content", [
    json.dumps({"text": TEXT}),
    "\ufeff" + json.dumps({"text": TEXT}),
])  # fmt: skip
def test_json_lines_may_be_called_json(tmp_path, content):
    folder = write(tmp_path / "in", {"x.json": content})
    (document,) = read_pool([str(folder)], "auto", "text", tmp_path / "out").documents
    assert " ".join(document) == TEXT


@pytest.mark.parametrize("text", [
    "[1]\nIs a note. It is long.",
    "[Music] She sings.\n[Laughter]",
    '"A whole line."\nHe said it.',
    "From Monday on, at 10:30, it rained.",
    "Use std::vector<int>, Map<String, List<T>> vector<a>, map<i> as <your name> said.",
    "If a < b > c or a<b && c>d or x<p>y, then if i<n, p<q. Mail <a.b@c.org>.",
    "#include <stdio.h>, then one <p> in all.",
    'A long text has a <a href="x">link</a> or two. ' + TEXT,
])  # fmt: skip
def test_brackets_of_prose_code_and_mathematics_are_text(tmp_path, text):
    folder = write(tmp_path / "in", {"x.txt": text})
    pool = read_pool([str(folder)], "prose", "text", tmp_path / "out")
    (document,) = pool.documents
    assert " ".join(document) == " ".join(text.split())


def test_tags_in_other_fields_of_records_are_no_mark_up(tmp_path):
    record = json.dumps({"text": TEXT, "html": "<p>Text.</p>" * 99})
    folder = write(tmp_path / "in", {"x.jsonl": record})
    assert read_pool([str(folder)], "prose", "text", tmp_path / "out").found


@pytest.mark.parametrize("end", [" ", "\n"])
def test_a_text_of_one_line_or_one_paragraph_takes_little_memory(
    tmp_path, monkeypatch, end
):
    for name in ("DETECTED_ON", "CHUNK", "PART_BYTES", "_PATIENCE"):
        monkeypatch.setattr(sources, name, 10_000)
    monkeypatch.setattr(reading, "CHUNK", 10_000)
    monkeypatch.setattr(manifest, "CHUNK", 10_000)
    sentence = "The naïve café sat on a mat of no great length, and so on. "
    text = "".join(f"{number} {sentence}" for number in range(24_000))
    text = text.replace(". ", f".{end}")
    path = write(tmp_path, {"x": text, "small": TEXT}) / "x"
    # What is imported or compiled once, or left by other tests, is no memory of this text.
    read_pool([str(path.with_name("small"))], "prose", "text", tmp_path / "warm")
    gc.collect()
    tracemalloc.start()
    pool = read_pool([str(path)], "prose", "text", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    documents = list(pool.documents)
    assert " ".join(map(" ".join, documents)) == " ".join(text.split())
    assert max(map(len, documents)) < 2 * sentences_module.MOST_SENTENCES
    assert peak < len(text) / 2


def test_a_record_that_no_memory_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_RECORD", 1000)
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    record = json.dumps({"text": "a" * 5000})
    path = write(tmp_path, {"x.jsonl": f"{record}\n"}) / "x.jsonl"
    with refused("has a record of over 1,000 bytes; split it"):
        read_pool([str(path)], "auto", "text", tmp_path / "out")


def test_deduplication_holds_a_hash_of_eight_bytes_a_document(tmp_path, monkeypatch):
    """Many short documents: the tables stay on the disk."""
    documents = [[f"Cat {number} sat."] for number in range(30_000)]
    path = sentences(tmp_path / "x", documents)
    tracemalloc.start()
    corpus(monkeypatch, tmp_path / "out", "--input", str(path), "--layout", "sentences",
           "--num-files", "50", "--vocab-file", str(vocabulary(tmp_path)), "--jobs", "1")  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000 * 300, (
        "of which the part that is cut into documents is the most"
    )


def vocabulary(folder: Path) -> Path:
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"])
    )
    return folder / "vocab.txt"
