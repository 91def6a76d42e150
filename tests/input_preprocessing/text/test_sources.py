"""Files and folders of text in all supported formats become one pool of documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cramjam
import pytest

from input_preprocessing.stage import manifest, parallel, reading
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.text import corpus, parts, sources
from input_preprocessing.text import inputs as inputs_module
from input_preprocessing.text import json_lines as json_lines_module
from input_preprocessing.text.sentences import detect_layout, documents_of

from ...refused import refused
from ..conftest import made_up_documents, write_documents

DOCUMENTS = made_up_documents(12)
TEXTS = [" ".join(document) for document in DOCUMENTS]


class Pool(NamedTuple):
    found: list[sources.Source]
    parts: list[Path]

    @property
    def documents(self) -> Iterator[list[str]]:
        for part in self.parts:
            with open(part, encoding="utf-8") as lines:
                yield from documents_of(lines, "sentences")


def read_pool(
    inputs: Sequence[str], layout: str, key: str, folder: Path, jobs: int = 1
) -> Pool:
    found, left_out = sources.find(inputs, layout, key, folder / "work", jobs)
    inputs_module.report(left_out, len(found), folder, " ".join(inputs))
    return Pool(found, parts.split(found, key, folder / "work", jobs))


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))
    )
    return path


def sentences(path: Path, documents: list[list[str]]) -> Path:
    write_documents(path, documents)
    return path


def words_of(documents: Iterable[list[str]]) -> list[str]:
    """The words of each document, however it was cut into sentences."""
    return [" ".join(document) for document in documents]


def test_a_record_is_a_document_cut_into_sentences(tmp_path):
    path = str(json_lines(tmp_path / "x", TEXTS))
    documents = list(read_pool([path], "auto", "text", tmp_path).documents)
    assert words_of(documents) == TEXTS
    assert sum(map(len, documents)) > len(TEXTS), "sentences were found"


def test_the_key_names_the_text(tmp_path):
    path = str(json_lines(tmp_path / "x", TEXTS, "content"))
    assert words_of(read_pool([path], "prose", "content", tmp_path).documents) == TEXTS
    with refused(r"no text 'text' \(it has id, content\); give --text-field"):
        read_pool([path], "prose", "text", tmp_path)


def test_several_inputs_and_folders_are_one_pool_in_their_order(tmp_path):
    (tmp_path / "AA").mkdir()
    (tmp_path / "AB").mkdir()
    json_lines(tmp_path / "AB" / "wiki_00", TEXTS[4:6])
    json_lines(tmp_path / "AA" / "wiki_01", TEXTS[2:4])
    json_lines(tmp_path / "AA" / "wiki_00", TEXTS[:2])
    for name in ("README.md", "info.json", ".hidden"):
        (tmp_path / "AA" / name).write_text("Nothing to train on.")
    plain = sentences(tmp_path / "plain", DOCUMENTS[6:9])
    lines = json_lines(tmp_path / "lines", TEXTS[9:])
    pool = read_pool(
        [str(tmp_path / "AA"), str(tmp_path / "AB"), str(plain), str(lines)],
        "auto",
        "text",
        tmp_path,
    )
    assert words_of(pool.documents) == TEXTS
    kinds = list(dict.fromkeys(source.kind for source in pool.found))
    assert kinds == ["JSON Lines", "one sentence per line"]


def test_a_pipe_is_refused(tmp_path):
    reader, writer = os.pipe()  # as <(command) of the shell
    os.close(writer)
    with refused("is no regular file"):
        read_pool([f"/dev/fd/{reader}"], "sentences", "text", tmp_path)
    os.close(reader)


@pytest.mark.parametrize("make", [json_lines, sentences])
def test_a_text_of_any_size_takes_the_same_memory(tmp_path, monkeypatch, make):
    for module, name in (
        (json_lines_module, "DETECTED_ON"),
        (sources, "DETECTED_ON"),
        (sources, "CHUNK"),
        (sources, "PART_BYTES"),
        (reading, "CHUNK"),
        (manifest, "CHUNK"),
    ):
        monkeypatch.setattr(module, name, 50_000)
    document = [f"A {'cat' * 200} sat."] * 50
    make(tmp_path / "x", [document if make is sentences else " ".join(document)] * 150)
    tracemalloc.start()
    count = sum(
        1 for _ in read_pool([str(tmp_path / "x")], "auto", "text", tmp_path).documents
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 150
    assert peak < (tmp_path / "x").stat().st_size / 4


def test_documents_go_to_the_files_in_turn_but_each_nth_which_is_for_evaluation(
    tmp_path, monkeypatch
):
    documents = made_up_documents(50)
    line = [
        "corpus",
        "--input",
        str(sentences(tmp_path / "x", documents)),
        "--outputdir",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(
        "sys.argv",
        [*line, "--num-files", "5", "--eval-share", "0.1", "--vocab-size", "200"],
    )
    run_stage("corpus")
    train = [document for i, document in enumerate(documents) if i % 10 != 5]
    parts = {f"part-{i:05d}-of-00005": train[i::5] for i in range(5)}
    for name, expected in {"eval.txt": documents[5::10], **parts}.items():
        sentences(tmp_path / "expected", expected)
        assert (tmp_path / "out/download/results4" / name).read_bytes() == (
            tmp_path / "expected"
        ).read_bytes(), name
    assert not list(tmp_path.glob("tmp*")), "what is held meanwhile leaves nothing"


def test_a_file_that_changes_while_it_is_read_is_not_taken(tmp_path, monkeypatch):
    path = sentences(tmp_path / "x", DOCUMENTS)

    def meanwhile(text: str) -> str:
        with open(path, "a") as file:
            file.write("More.\n")
        return detect_layout(text)

    monkeypatch.setattr(sources, "detect_layout", meanwhile)
    with refused("changed while it was read"):
        read_pool([str(path)], "auto", "text", tmp_path)


@pytest.mark.parametrize(("text", "message"), [
    ('{"text": "a"}\nnothing\n', "line 2 is not JSON .*; give JSON Lines, one record per line"),
    ('{"text": "a"}\n[1]\n', r"line 2 has no text 'text' \(it has list\)"),
    ('{"text": 3}\n', "line 1 has no text 'text'"),
])  # fmt: skip
def test_what_is_no_record_is_a_one_line_error(tmp_path, text, message):
    (tmp_path / "x").write_text(text)
    with refused(message) as caught:
        read_pool([str(tmp_path / "x")], "auto", "text", tmp_path)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_one_line(tmp_path):
    (tmp_path / "none").mkdir()
    with refused("has no files of text"):
        read_pool([str(tmp_path / "none")], "auto", "text", tmp_path)


def test_the_command_takes_several_inputs(tmp_path, monkeypatch, capsys):
    inputs = [
        sentences(tmp_path / "a", made_up_documents(20)),
        json_lines(tmp_path / "b", [f"{text} It ends." for text in TEXTS], "body"),
    ]
    line = [
        "corpus",
        "--input",
        *map(str, inputs),
        "--outputdir",
        str(tmp_path / "out"),
        "--vocab-size",
        "300",
    ]
    monkeypatch.setattr("sys.argv", [*line, "--text-key", "body"])
    run_stage("corpus")
    told = capsys.readouterr().err
    assert "read as one sentence per line, JSON Lines; 30 documents" in told
    parts = "".join(
        path.read_text()
        for path in (tmp_path / "out" / "download" / "results4").iterdir()
    )
    assert DOCUMENTS[3][0] in parts


PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: bytes(cramjam.zstd.compress(data)),
    # As pzstd writes: before each frame, one to skip that has its size.
    "zstd": lambda data: (
        bytes.fromhex("502a4d18 04000000 00000000") + bytes(cramjam.zstd.compress(data))
    ),
}


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("make", [json_lines, sentences])
def test_packed_files_are_read_as_what_is_in_them(tmp_path, make, kind):
    plain = make(tmp_path / "x", DOCUMENTS if make is sentences else TEXTS).read_bytes()
    (tmp_path / f"x.{kind}").write_bytes(
        PACK[kind](plain[:700]) + PACK[kind](plain[700:])
    )  # two members, one file
    pools = [
        read_pool([str(tmp_path / name)], "auto", "text", tmp_path / name[1:])
        for name in ("x", f"x.{kind}")
    ]
    assert list(pools[0].documents) == list(pools[1].documents)
    (tmp_path / "cut").write_bytes(PACK[kind](plain)[:-20])
    with refused(r"cut is .* and cannot be unpacked .*; copy it again") as caught:
        read_pool([str(tmp_path / "cut")], "auto", "text", tmp_path)
    assert "\n" not in str(caught.value)


def prose(path: Path, documents: list[list[str]]) -> Path:
    path.write_text("\n\n\n".join("\n\n".join(document) for document in documents))
    return path


@pytest.mark.parametrize("make", [json_lines, sentences, prose])
def test_where_a_file_is_cut_changes_no_document(tmp_path, monkeypatch, make):
    documents = made_up_documents(60)
    path = make(
        tmp_path / "x",
        documents if make in (sentences, prose) else [" ".join(d) for d in documents],
    )
    layout = "sentences" if make is sentences else "prose"
    whole = list(read_pool([str(path)], layout, "text", tmp_path / "a").documents)
    for size in (1, 300, 5000):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        pool = read_pool([str(path)], layout, "text", tmp_path / str(size))
        assert list(pool.documents) == whole
        assert len(pool.parts) > (1 if size == 5000 else 10)


def test_prose_without_an_end_of_a_document_is_cut_at_paragraphs(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 500)
    monkeypatch.setattr(sources, "_PATIENCE", 100)
    (tmp_path / "x").write_text("\n\n".join(TEXTS * 3))
    pool = read_pool([str(tmp_path / "x")], "prose", "text", tmp_path)
    assert len(pool.parts) > 3
    assert " ".join(words_of(pool.documents)) == " ".join(TEXTS * 3)


def corpus_of(
    inputs: list[Path], out: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> dict[str, bytes]:
    line = [
        "corpus",
        "--input",
        *map(str, inputs),
        "--outputdir",
        str(out),
        "--vocab-size",
        "300",
        *more,
    ]
    monkeypatch.setattr("sys.argv", line)
    run_stage("corpus")
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def test_the_same_document_is_taken_once_and_reported(tmp_path, monkeypatch, capsys):
    documents = made_up_documents(30)
    once = sentences(tmp_path / "once", documents)
    more = sentences(
        tmp_path / "more",
        [documents[3], documents[29], [*documents[3], "It is another."], documents[3]],
    )
    last = sentences(tmp_path / "last", [[*documents[3], "It is another."]])
    name = "download/results4/eval.txt"
    made = corpus_of([once, more], tmp_path / "a", monkeypatch)[name]
    assert "29 documents" in (told := capsys.readouterr().err)
    assert "2 for evaluation, 3 duplicates dropped" in told
    assert made == corpus_of([once, last], tmp_path / "b", monkeypatch)[name]
    four = sentences(tmp_path / "four", documents[:4])
    corpus_of([four], tmp_path / "d", monkeypatch)
    assert "3 documents" in (told := capsys.readouterr().err)
    assert "1 for evaluation" in told
    few = sentences(tmp_path / "few", documents[:2] * 4)
    with pytest.raises(
        SystemExit,
        match=r"has 2 documents \(read as .*\), at least 4 different ones are needed; put",
    ):
        corpus_of([few], tmp_path / "c", monkeypatch)


def test_processes_and_kills_change_no_byte(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "PART_BYTES", 2000)
    inputs = [
        sentences(tmp_path / "a", made_up_documents(24)),
        json_lines(tmp_path / "b", TEXTS),
    ]
    one = ["--jobs", "1", "--num-files", "1"]
    wanted = corpus_of(inputs, tmp_path / "one", monkeypatch, *one)
    pools, run_pool = [], parallel._run_pool
    monkeypatch.setattr(
        parallel, "_run_pool", lambda *a: pools.append(a) or run_pool(*a)
    )
    three = "--jobs", "3", *one[2:]
    # Workers are for much text alone: files, sentences and shards.
    for worth, count in ((sources.WORTH_WORKERS, 0), (0, 3)):
        for module in (sources, parts, corpus):
            monkeypatch.setattr(module, "WORTH_WORKERS", worth)
        folder = tmp_path / f"three_{worth}"
        assert corpus_of(inputs, folder, monkeypatch, *three) == wanted
        assert len(pools) == count
    made: list[Path] = []
    for name, moments in (("_split", (1, 3)), ("_deal", (0, 1))):
        module = parts if name == "_split" else corpus
        work = getattr(module, name)
        for moment in moments:

            def dies(*arguments, moment=moment, work=work):  # type: ignore[no-untyped-def]
                if len(made) == moment:
                    raise KeyboardInterrupt
                made.append(arguments[-1][-1])
                return work(*arguments)

            made.clear()
            monkeypatch.setattr(module, name, dies)
            with pytest.raises(KeyboardInterrupt):
                corpus_of(inputs, tmp_path / "killed", monkeypatch, *one)
            monkeypatch.setattr(module, name, work)
    times = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("part-*")
    }
    assert len(times) > 4
    assert corpus_of(inputs, tmp_path / "killed", monkeypatch, *one) == wanted
    shard = tmp_path / "killed/download/results4/part-00000-of-00001"
    assert shard.stat().st_mtime_ns == times[shard], "what was finished is kept"
    assert not (tmp_path / "killed/download/corpus").exists()
    corpus_of(inputs[:1], tmp_path / "killed", monkeypatch, *one)
    assert shard.read_bytes() != wanted["download/results4/part-00000-of-00001"], (
        "nothing of another text is kept"
    )


@pytest.mark.parametrize("place", ["part", "table", "shard"])
def test_what_an_interrupted_run_left_and_is_damaged_since_is_made_again(
    tmp_path, monkeypatch, place
):
    monkeypatch.setattr(sources, "PART_BYTES", 2000)
    inputs = [sentences(tmp_path / "a", made_up_documents(24))]
    options = ["--jobs", "1", "--num-files", "3"]
    wanted = corpus_of(inputs, tmp_path / "whole", monkeypatch, *options)

    def dies(*_):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_write_vocabulary", dies)
        with pytest.raises(KeyboardInterrupt):
            corpus_of(inputs, tmp_path / "cut", patched, *options)
    download = tmp_path / "cut/download"
    folder, pattern = {
        "part": ("corpus", "part-*.txt"),
        "table": ("corpus", "part-*.npy"),
        "shard": ("results4", "part-*"),
    }[place]
    damaged = sorted((download / folder).glob(pattern))[1]
    data = bytearray(damaged.read_bytes())
    data[-40] ^= 1
    damaged.write_bytes(data)
    if folder == "corpus":  # what was made of it is gone, too
        for shard in (download / "results4").glob("part-*"):
            shard.unlink()
    assert corpus_of(inputs, tmp_path / "cut", monkeypatch, *options) == wanted


def test_a_shard_that_is_damaged_while_the_corpus_is_made_is_not_signed(
    tmp_path, monkeypatch, capsys
):
    inputs = [sentences(tmp_path / "a", made_up_documents(24))]
    wanted = corpus_of(inputs, tmp_path / "whole", monkeypatch)
    fit_of = corpus.fit_of

    def damages(words, text, options):  # type: ignore[no-untyped-def]
        shard = text.with_name("part-00000-of-00001")
        shard.write_bytes(b"X" + shard.read_bytes()[1:])
        return fit_of(words, text, options)

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "fit_of", damages)
        assert corpus_of(inputs, tmp_path / "b", patched) != wanted
    assert corpus_of(inputs, tmp_path / "b", monkeypatch) == wanted
    assert "up to date" not in capsys.readouterr().err


def test_records_without_a_text_are_skipped_counted_and_listed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sources, "PART_BYTES", 1000)
    with_blanks = [*TEXTS[:6], "", " \n", *TEXTS[6:]]
    path = json_lines(tmp_path / "x", with_blanks)
    path.write_text('{"text": null}\n' + path.read_text())
    wanted = corpus_of([json_lines(tmp_path / "y", TEXTS)], tmp_path / "b", monkeypatch)
    made = corpus_of([path], tmp_path / "a", monkeypatch)
    assert ", 3 records without a text skipped: " in capsys.readouterr().err
    listed = made.pop("download/left_out.tsv").decode()
    assert listed == f"{path}\t3 records whose text is null or blank\n"
    assert {name for name in made if made[name] != wanted[name]} == {
        "download/corpus.json"
    }
