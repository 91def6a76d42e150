"""Files and folders of text in all formats become one pool of documents; every file is in it or listed
with the reason, and what cannot be read is told all at once.
"""

import bz2
import gc
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cramjam
import pytest

from bert.data.records import DataError
from input_preprocessing.stage import manifest, parallel, reading
from input_preprocessing.text import corpus, parts, sources
from input_preprocessing.text import inputs as inputs_module
from input_preprocessing.text import json_lines as json_lines_module
from input_preprocessing.text.sentences import (
    MOST_SENTENCES,
    detect_layout,
    documents_of,
)

from ...refused import refused
from ..conftest import interrupted, made_up_documents, run, times, write_documents

DOCUMENTS = made_up_documents(12)
TEXTS = [" ".join(document) for document in DOCUMENTS]
TEXT = " ".join(TEXTS[:2])
PROSE = {f"{number}.txt": text for number, text in enumerate(TEXTS)}


class Pool(NamedTuple):
    found: list[sources.Source]
    parts: list[Path]

    @property
    def documents(self) -> Iterator[list[str]]:
        for part in self.parts:
            with open(part, encoding="utf-8") as lines:
                yield from documents_of(lines, "sentences")


def read_pool(folder: Path, *paths: object, layout: str = "auto") -> Pool:
    names, work = [*map(str, paths)], folder / "work"
    found, left_out = sources.find(names, layout, "text", work)
    inputs_module.report(left_out, len(found), folder, " ".join(names))
    return Pool(found, parts.split(found, "text", work, 1))


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return folder


def json_lines(path: Path, documents: list[list[str]], key: str = "text") -> Path:
    records = ({"id": i, key: " ".join(each)} for i, each in enumerate(documents))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sentences(path: Path, documents: list[list[str]]) -> Path:
    write_documents(path, documents)
    return path


def prose(path: Path, documents: list[list[str]]) -> Path:
    path.write_text("\n\n\n".join("\n\n".join(document) for document in documents))
    return path


def corpus_of(inputs: list[Path], out: Path, *more: object) -> dict[str, bytes]:
    """The files of a corpus, by name."""
    given = "--outputdir", out, "--vocab-size", 300, "--jobs", 1
    run("corpus", "--input", *inputs, *given, *more)
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def small_reads(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """As of a text that is larger by a factor."""
    for module, name in (
        (json_lines_module, "DETECTED_ON"),
        (sources, "DETECTED_ON"),
        (sources, "CHUNK"),
        (sources, "PART_BYTES"),
        (sources, "_PATIENCE"),
        (reading, "CHUNK"),
        (manifest, "CHUNK"),
    ):
        monkeypatch.setattr(module, name, size)


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


def test_each_file_is_used_or_listed_with_its_reason(tmp_path, capsys):
    folder = write(
        tmp_path / "in", {name: data for name, (data, _) in LEFT_OUT.items()}
    )
    write(folder, {f"{number}.md": f"<p>{text}" for number, text in enumerate(TEXTS)})
    corpus_of([folder], tmp_path / "out")
    told = capsys.readouterr().err
    assert f"12 files used, {len(LEFT_OUT)} left out (10 JSON, but not JSON Lines, 9 HTML or XML, 3 README, " in told  # fmt: skip
    assert "12 documents" not in told, "one of them is for evaluation"
    lines = (tmp_path / "out/download/left_out.tsv").read_text().splitlines()
    listed = dict(line.split("\t") for line in lines)
    assert len(listed) == len(LEFT_OUT)
    for name, (_, reason) in LEFT_OUT.items():
        assert reason in listed[str(folder / name.replace("/config", ""))]


def test_a_name_with_tabs_line_breaks_or_other_bytes_is_one_cell_of_the_list(tmp_path):
    names = ["a\tb.html", "c\nd.html", os.fsdecode(b"\xff.html"), "ä.html"]
    folder = write(tmp_path / "in", dict.fromkeys(names, "<p>Text.") | PROSE)
    read_pool(tmp_path, folder)
    lines = (tmp_path / "left_out.tsv").read_text("utf-8").splitlines()
    told = ["a\\tb.html", "c\\nd.html", "ä.html", "\\udcff.html"]
    assert [line.split("\t")[0] for line in lines] == [str(folder / n) for n in told]


@pytest.mark.parametrize("name", [n for n in LEFT_OUT if "empty" not in LEFT_OUT[n][1]])
def test_a_file_that_is_named_is_used_or_an_error(tmp_path, name):
    content, reason = LEFT_OUT[name]
    path = write(tmp_path, {name: content}) / name
    if "README" in reason or reason == "hidden":
        assert len(read_pool(tmp_path / "out", path).found) == 1
    else:
        with refused("no text 'text'" if name == "index.json" else reason):
            read_pool(tmp_path / "out", path)


@pytest.mark.parametrize(("files", "message"), [
    ({}, "has no files of text"),
    ({"README.md": "About.", ".hidden": "x"}, r"has no files of text \(1 hidden, 1 README, .*\)"),
    ({"x": '{"text": "a"}\nnothing\n'}, "line 2 is not JSON .*; give JSON Lines, one record per line"),
    ({"x": '{"text": "a"}\n[1]\n'}, r"line 2 has no text 'text' \(it has list\)"),
    ({"x": '{"text": 3}\n'}, "line 1 has no text 'text'"),
    ({"x.jsonl": json.dumps({"text": "a" * 5000}) + "\n"}, "has a record of over 1,000 bytes; split it"),
])  # fmt: skip
def test_what_holds_no_text_is_one_line(tmp_path, monkeypatch, files, message):
    monkeypatch.setattr(sources, "MOST_RECORD", 1000)
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    (tmp_path / "in").mkdir()
    with refused(message) as caught:
        read_pool(tmp_path / "out", write(tmp_path / "in", files))
    assert "\n" not in str(caught.value)


def test_a_pipe_is_refused(tmp_path):
    reader, writer = os.pipe()  # as <(command) of the shell
    os.close(writer)
    with refused("is no regular file"):
        read_pool(tmp_path, f"/dev/fd/{reader}", layout="sentences")
    os.close(reader)


def test_all_errors_are_told_at_once_by_the_names_that_the_user_knows(tmp_path):
    bad = {
        "a.txt": "café ".encode("latin-1") * 9,
        "b.gz": gzip.compress(b'{"text": "a"}\n{"body": "b"}\n'),
        "c.jsonl": b'{"text": "a"}\nnothing\n',
        "d.gz": gzip.compress(b"text" * 99)[:-9],
    }
    folder = write(tmp_path / "in", {**PROSE, **bad})
    with pytest.raises(DataError) as caught:
        read_pool(tmp_path / "out", folder)
    told = str(caught.value)
    assert "\n" not in told
    assert "/a.txt: 9 of 45 bytes are not UTF-8" in told
    assert "in/b.gz: line 2 has no text 'text' (it has body); give --text-field" in told
    assert "in/c.jsonl: line 2 is not JSON" in told
    assert "; and 1 more; all in " in told
    listed = (tmp_path / "out" / "left_out.tsv").read_text()
    assert all(str(folder / name) in listed for name in bad)


def test_errors_beyond_what_is_looked_at_first_are_told_together(tmp_path, monkeypatch):
    small_reads(monkeypatch, 10)
    lines = '{"text": "A cat sat here."}\n' * 9 + "{}\n"
    files = {"a.jsonl": lines, "b.gz": gzip.compress(lines.encode())}
    folder = write(tmp_path / "in", files)
    with refused(r"in/a.jsonl: line 10 has no text .*in/b.gz: line 10 has"):
        read_pool(tmp_path / "out", folder)


@pytest.mark.parametrize(("name", "content", "text"), [
    ("x.json", json.dumps({"text": TEXT}), TEXT),
    ("x.json", "\ufeff" + json.dumps({"text": TEXT}), TEXT),
    ("x.jsonl", json.dumps({"text": TEXT, "html": "<p>Text.</p>" * 99}), TEXT),
    *(("x.txt", text, " ".join(text.split())) for text in (
        "[1]\nIs a note. It is long.",
        "[Music] She sings.\n[Laughter]",
        '"A whole line."\nHe said it.',
        "From Monday on, at 10:30, it rained.",
        "Use std::vector<int>, Map<String, List<T>> vector<a>, map<i> as <your name> said.",
        "If a < b > c or a<b && c>d or x<p>y, then if i<n, p<q. Mail <a.b@c.org>.",
        "#include <stdio.h>, then one <p> in all.",
        'A long text has a <a href="x">link</a> or two. ' + TEXT,
    )),
])  # fmt: skip
def test_records_and_brackets_of_prose_and_code_are_text(tmp_path, name, content, text):
    folder = write(tmp_path / "in", {name: content})
    (document,) = read_pool(tmp_path / "out", folder, layout="prose").documents
    assert " ".join(document) == text


def test_several_inputs_and_folders_are_one_pool_in_their_order(tmp_path):
    for name in ("AA", "AB"):
        (tmp_path / name).mkdir()
    json_lines(tmp_path / "AB" / "wiki_00", DOCUMENTS[4:6])
    json_lines(tmp_path / "AA" / "wiki_01", DOCUMENTS[2:4])
    json_lines(tmp_path / "AA" / "wiki_00", DOCUMENTS[:2])
    write(tmp_path / "AA", dict.fromkeys(("README.md", "info.json", ".hidden"), "No."))
    plain = sentences(tmp_path / "plain", DOCUMENTS[6:9])
    lines = json_lines(tmp_path / "lines", DOCUMENTS[9:])
    pool = read_pool(tmp_path, tmp_path / "AA", tmp_path / "AB", plain, lines)
    assert list(pool.documents) == DOCUMENTS
    kinds = list(dict.fromkeys(source.kind for source in pool.found))
    assert kinds == ["JSON Lines", "one sentence per line"]


SENTENCE = "The naïve café sat on a mat of no great length, and so on."


@pytest.mark.parametrize(("begin", "end", "layout", "count"), [
    ("", " ", "prose", 24_000),
    ("", "\n", "prose", 24_000),
    ("", "\n\n", "sentences", 3_000),
    ('{"text": "', '"}\n', "auto", 3_000),
])  # fmt: skip
def test_any_text_takes_little_memory(tmp_path, monkeypatch, begin, end, layout, count):
    small_reads(monkeypatch, 10_000)
    words = [f"{number} {SENTENCE}" for number in range(count)]
    text = "".join(f"{begin}{each}{end}" for each in words)
    files = write(tmp_path, {"x": text, "few": f"{begin}A. B.{end}"})
    # What is imported or compiled once, or left by other tests, is no memory of this text.
    read_pool(tmp_path / "warm", files / "few")
    gc.collect()
    tracemalloc.start()
    pool = read_pool(tmp_path / "out", files / "x", layout=layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    documents = list(pool.documents)
    assert " ".join(map(" ".join, documents)) == " ".join(words)
    assert max(map(len, documents)) < 2 * MOST_SENTENCES
    assert peak < len(text) / 2


def test_deduplication_holds_a_hash_of_eight_bytes_a_document(tmp_path):
    """Many short documents: the tables stay on the disk."""
    documents = [[f"Cat {number} sat."] for number in range(20_000)]
    path = sentences(tmp_path / "x", documents)
    write(tmp_path, {"vocab": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ncat"})
    given = "--layout", "sentences", "--num-files", 50, "--jobs", 1
    vocabulary = "--vocab-file", tmp_path / "vocab"
    tracemalloc.start()
    run("corpus", "--outputdir", tmp_path / "out", "--input", path, *vocabulary, *given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Of which the part that is cut into documents is the most.
    assert peak < len(documents) * 300


def test_documents_go_to_the_files_in_turn_and_each_nth_to_evaluation(tmp_path):
    documents = made_up_documents(50)
    path = sentences(tmp_path / "x", documents)
    made = corpus_of([path], tmp_path / "out", "--num-files", 5, "--eval-share", 0.1)
    train = [document for i, document in enumerate(documents) if i % 10 != 5]
    wanted = {f"part-{i:05d}-of-00005": train[i::5] for i in range(5)}
    for name, expected in (wanted | {"eval.txt": documents[5::10]}).items():
        content = sentences(path, expected).read_bytes()
        assert made[f"download/results4/{name}"] == content, name
    assert not list(tmp_path.glob("tmp*")), "what is held meanwhile leaves nothing"


def test_a_file_that_changes_while_it_is_read_is_not_taken(tmp_path, monkeypatch):
    path = sentences(tmp_path / "x", DOCUMENTS)

    def meanwhile(text: str) -> str:
        with open(path, "a") as file:
            file.write("More.\n")
        return detect_layout(text)

    monkeypatch.setattr(sources, "detect_layout", meanwhile)
    with refused("changed while it was read"):
        read_pool(tmp_path, path)


def test_the_command_takes_several_inputs(tmp_path, capsys):
    plain = sentences(tmp_path / "a", made_up_documents(20))
    records = json_lines(tmp_path / "b", [[*d, "It ends."] for d in DOCUMENTS], "body")
    made = corpus_of([plain, records], tmp_path / "out", "--text-key", "body")
    told = capsys.readouterr().err
    assert "read as one sentence per line, JSON Lines; 30 documents" in told
    texts = [data for name, data in made.items() if "/part-" in name]
    assert DOCUMENTS[3][0].encode() in b"".join(texts)


PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: bytes(cramjam.zstd.compress(data)),
    # As pzstd writes: before each frame, one to skip that has its size.
    "zstd": lambda data: bytes.fromhex("502a4d18 04000000 00000000") + PACK["zst"](data),
}  # fmt: skip


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("make", [json_lines, sentences])
def test_packed_files_are_read_as_what_is_in_them(tmp_path, make, kind):
    pack = PACK[kind]
    plain = make(tmp_path / "x", DOCUMENTS).read_bytes()
    members = pack(plain[:700]) + pack(plain[700:])
    write(tmp_path, {f"x.{kind}": members, "cut": pack(plain)[:-20]})
    names = "x", f"x.{kind}"
    pools = [read_pool(tmp_path / name[1:], tmp_path / name) for name in names]
    assert list(pools[0].documents) == list(pools[1].documents)
    with refused(r"cut is .* and cannot be unpacked .*; copy it again") as caught:
        read_pool(tmp_path, tmp_path / "cut")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [json_lines, sentences, prose])
def test_where_a_file_is_cut_changes_no_document(tmp_path, monkeypatch, make):
    path = make(tmp_path / "x", made_up_documents(60))
    layout = "sentences" if make is sentences else "prose"
    whole = list(read_pool(tmp_path / "a", path, layout=layout).documents)
    for size in (1, 300, 5000):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        pool = read_pool(tmp_path / str(size), path, layout=layout)
        assert list(pool.documents) == whole
        assert len(pool.parts) > (1 if size == 5000 else 10)


def test_prose_without_an_end_of_a_document_is_cut_at_paragraphs(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    monkeypatch.setattr(sources, "_PATIENCE", 100)
    path = write(tmp_path, {"x": "\n\n".join(TEXTS * 3)}) / "x"
    pool = read_pool(tmp_path, path, layout="prose")
    assert len(pool.parts) > 3
    assert " ".join(map(" ".join, pool.documents)) == " ".join(TEXTS * 3)


def test_the_same_document_is_taken_once_and_reported(tmp_path, capsys):
    documents = made_up_documents(30)
    another = [*documents[3], "It is another."]
    once = sentences(tmp_path / "once", documents)
    repeated = [documents[3], documents[29], another, documents[3]]
    more = sentences(tmp_path / "more", repeated)
    made = corpus_of([once, more], tmp_path / "a")
    assert "29 documents" in (told := capsys.readouterr().err)
    assert "2 for evaluation, 3 duplicates dropped" in told
    name = "download/results4/eval.txt"
    last = sentences(tmp_path / "last", [another])
    assert made[name] == corpus_of([once, last], tmp_path / "b")[name]
    corpus_of([sentences(tmp_path / "four", documents[:4])], tmp_path / "d")
    assert "3 documents" in (told := capsys.readouterr().err)
    assert "1 for evaluation" in told
    few = sentences(tmp_path / "few", documents[:2] * 4)
    said = r"has 2 documents \(read as .*\), at least 4 different ones are needed; put"
    with pytest.raises(SystemExit, match=said):
        corpus_of([few], tmp_path / "c")


def test_processes_and_kills_change_no_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 2000)
    plain = sentences(tmp_path / "a", made_up_documents(24))
    inputs = [plain, json_lines(tmp_path / "b", DOCUMENTS)]
    killed = tmp_path / "killed"

    def make(folder: Path, *more: object) -> dict[str, bytes]:
        return corpus_of(inputs, folder, "--num-files", 1, *more)

    wanted = make(tmp_path / "one")
    pools, run_pool = [], parallel._run_pool
    counted = lambda *given: pools.append(given) or run_pool(*given)  # noqa: E731
    monkeypatch.setattr(parallel, "_run_pool", counted)
    # Workers are for much text alone: files, sentences and shards.
    for worth, count in ((sources.WORTH_WORKERS, 0), (0, 3)):
        for module in (sources, parts, corpus):
            monkeypatch.setattr(module, "WORTH_WORKERS", worth)
        assert make(tmp_path / f"two_{worth}", "--jobs", 2) == wanted
        assert len(pools) == count
    for module, name, moments in ((parts, "_split", (1, 3)), (corpus, "_deal", (0, 1))):
        work = getattr(module, name)
        for moment in moments:
            calls = iter([work] * moment + [interrupted])
            with monkeypatch.context() as patched:
                patched.setattr(module, name, lambda *a, calls=calls: next(calls)(*a))
                with pytest.raises(KeyboardInterrupt):
                    make(killed)
    before = times(killed, "part-*")
    assert len(before) > 4
    assert make(killed) == wanted
    shard = killed / "download/results4/part-00000-of-00001"
    assert shard.stat().st_mtime_ns == before[shard], "what was finished is kept"
    assert not (killed / "download/corpus").exists()
    del inputs[1]
    name = "download/results4/part-00000-of-00001"
    assert make(killed)[name] != wanted[name], "nothing of another text is kept"


@pytest.mark.parametrize("damaged", ["corpus/part-*.txt", "corpus/part-*.npy", "results4/part-*"])  # fmt: skip
def test_what_an_interruption_let_be_damaged_is_remade(tmp_path, monkeypatch, damaged):
    monkeypatch.setattr(sources, "PART_BYTES", 2000)
    inputs = [sentences(tmp_path / "a", made_up_documents(24))]
    wanted = corpus_of(inputs, tmp_path / "whole", "--num-files", 3)
    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_write_vocabulary", interrupted)
        with pytest.raises(KeyboardInterrupt):
            corpus_of(inputs, tmp_path / "cut", "--num-files", 3)
    download = tmp_path / "cut/download"
    path = sorted(download.glob(damaged))[1]
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    if damaged.startswith("corpus"):  # what was made of it is gone, too
        for shard in (download / "results4").glob("part-*"):
            shard.unlink()
    assert corpus_of(inputs, tmp_path / "cut", "--num-files", 3) == wanted


def test_a_shard_damaged_meanwhile_is_not_signed(tmp_path, monkeypatch, capsys):
    inputs = [sentences(tmp_path / "a", made_up_documents(24))]
    wanted = corpus_of(inputs, tmp_path / "whole")
    fit_of = corpus.fit_of

    def damages(words, text, options):  # type: ignore[no-untyped-def]
        shard = text.with_name("part-00000-of-00001")
        shard.write_bytes(b"X" + shard.read_bytes()[1:])
        return fit_of(words, text, options)

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "fit_of", damages)
        assert corpus_of(inputs, tmp_path / "b") != wanted
    assert corpus_of(inputs, tmp_path / "b") == wanted
    assert "up to date" not in capsys.readouterr().err


def test_records_without_a_text_are_skipped_and_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "PART_BYTES", 1000)
    path = json_lines(tmp_path / "x", [*DOCUMENTS[:6], [], [" \n"], *DOCUMENTS[6:]])
    path.write_text('{"text": null}\n' + path.read_text())
    wanted = corpus_of([json_lines(tmp_path / "y", DOCUMENTS)], tmp_path / "b")
    made = corpus_of([path], tmp_path / "a")
    assert ", 3 records without a text skipped: " in capsys.readouterr().err
    listed = made.pop("download/left_out.tsv").decode()
    assert listed == f"{path}\t3 records whose text is null or blank\n"
    differing = {name for name in made if made[name] != wanted[name]}
    assert differing == {"download/corpus.json"}
