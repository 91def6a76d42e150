"""Text as people have it becomes documents: files and folders of every kind, as one pool."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.stage import reading
from input_preprocessing.stage.cli import run_stage
from input_preprocessing.text import corpus
from input_preprocessing.text.corpus import read_pool

from ..conftest import made_up_documents, write_documents

DOCUMENTS = made_up_documents(12)
TEXTS = [" ".join(document) for document in DOCUMENTS]


def json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def extracted(path: Path, texts: list[str]) -> Path:
    """As WikiExtractor writes: the title, an empty line, a paragraph per line."""
    docs = (f'<doc id="{i}" url="u" title="T {i}">\nT {i}\n\n{text}\n</doc>\n' for i, text in enumerate(texts))
    path.write_text("".join(docs))
    return path


def sentences(path: Path, documents: list[list[str]]) -> Path:
    write_documents(path, documents)
    return path


def parquet(path: Path, texts: list[str], key: str = "text") -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"id": list(range(len(texts))), key: texts})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=3)
    return path


def words_of(documents: Iterable[list[str]]) -> list[str]:
    """The words of each document, however it was cut into sentences."""
    return [" ".join(document) for document in documents]


@pytest.mark.parametrize("make", [json_lines, extracted, parquet])
def test_a_record_is_a_document_cut_into_sentences(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    documents = list(read_pool([str(make(tmp_path / "x", TEXTS))], "auto", "text").documents)
    assert words_of(documents) == TEXTS
    assert sum(map(len, documents)) > len(TEXTS), "sentences were found"


@pytest.mark.parametrize("make", [json_lines, parquet])
def test_the_key_names_the_text(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    path = str(make(tmp_path / "x", TEXTS, "content"))
    assert words_of(read_pool([path], "prose", "content").documents) == TEXTS
    with pytest.raises(DataError, match=r"no (text|column) 'text' \(it has id, content\); give --text-key"):
        read_pool([path], "prose", "text")


def test_several_inputs_and_folders_are_one_pool_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AB").mkdir()
    extracted(tmp_path / "AB" / "wiki_00", TEXTS[4:6])
    extracted(tmp_path / "AA" / "wiki_01", TEXTS[2:4])
    extracted(tmp_path / "AA" / "wiki_00", TEXTS[:2])
    for name in ("README.md", "info.json", ".hidden"):
        (tmp_path / "AA" / name).write_text("Nothing to train on.")
    plain = sentences(tmp_path / "plain", DOCUMENTS[6:9])
    lines = json_lines(tmp_path / "lines", TEXTS[9:])
    pool = read_pool([str(tmp_path / "AA"), str(tmp_path / "AB"), str(plain), str(lines)], "auto", "text")
    assert words_of(pool.documents) == TEXTS
    assert pool.kinds == ("WikiExtractor's documents", "one sentence per line", "JSON Lines")
    assert read_pool([str(plain), str(lines), str(lines)], "auto", "text").md5 != pool.md5


def test_a_pipe_is_read_from_its_first_byte(tmp_path: Path) -> None:
    data = sentences(tmp_path / "plain", DOCUMENTS).read_bytes()
    reader, writer = os.pipe()  # as <(command) of the shell
    os.write(writer, data)
    os.close(writer)
    pool = read_pool([f"/dev/fd/{reader}"], "sentences", "text")
    os.close(reader)
    assert list(pool.documents) == list(pool.documents) == DOCUMENTS


def test_mark_up_that_wikiextractor_escapes_is_text_again(tmp_path: Path) -> None:
    pool = read_pool([str(extracted(tmp_path / "x", ["One &lt; two &amp; three."] * 4))], "auto", "text")
    assert next(pool.documents) == ["One < two & three."]


@pytest.mark.parametrize("make", [json_lines, extracted, sentences])
def test_a_text_of_any_size_takes_the_same_memory(tmp_path: Path, monkeypatch, make) -> None:  # type: ignore[no-untyped-def]
    for module, name in ((corpus, "_DETECTED_ON"), (corpus, "CHUNK"), (reading, "CHUNK")):
        monkeypatch.setattr(module, name, 50_000)
    document = [f"A {'cat' * 200} sat."] * 50
    make(tmp_path / "x", [document if make is sentences else " ".join(document)] * 150)
    tracemalloc.start()
    count = sum(1 for _ in read_pool([str(tmp_path / "x")], "auto", "text").documents)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 150
    assert peak < (tmp_path / "x").stat().st_size / 4


def test_prose_is_cut_into_documents_and_paragraphs(tmp_path: Path) -> None:
    text = "---\nOne. Two\r\nthree.\n \nFour. ---\n* * *\nFive.\n\n\t\nSix.\fSeven.\n\f\n\nEight.\n\n\n\n\nNine."
    (tmp_path / "x").write_bytes(text.encode())
    documents = list(read_pool([str(tmp_path / "x")], "prose", "text").documents)
    assert documents == [["One.", "Two three.", "Four. --- Five."], ["Six."], ["Seven."], ["Eight."], ["Nine."]]
    (tmp_path / "x").write_text("\n\n".join(f"Sentence {i}." for i in range(4 * corpus.MOST_SENTENCES + 1)))
    sizes = [len(document) for document in read_pool([str(tmp_path / "x")], "prose", "text").documents]
    assert sizes == [corpus.MOST_SENTENCES] * 4 + [1]


@pytest.mark.parametrize("most_open", [2, 200])
def test_documents_go_to_the_files_in_turn_but_each_nth_which_is_for_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int
) -> None:
    monkeypatch.setattr(corpus, "_MOST_OPEN", most_open)
    documents = made_up_documents(50)
    line = ["corpus", "--input", str(sentences(tmp_path / "x", documents)), "--outputdir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*line, "--num-files", "5", "--eval-share", "0.1", "--vocab-size", "200"])
    run_stage("corpus")
    train = [document for i, document in enumerate(documents) if i % 10 != 5]
    parts = {f"part-{i:05d}-of-00005": train[i::5] for i in range(5)}
    for name, expected in {"eval.txt": documents[5::10], **parts}.items():
        sentences(tmp_path / "expected", expected)
        assert (tmp_path / "out/download/results4" / name).read_bytes() == (tmp_path / "expected").read_bytes(), name
    assert not list(tmp_path.glob("tmp*")), "what is held meanwhile leaves nothing"


def test_a_file_that_changes_while_it_is_read_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sentences(tmp_path / "x", DOCUMENTS)
    detect = corpus.detect_layout

    def meanwhile(text: str) -> str:
        with open(path, "a") as file:
            file.write("More.\n")
        return detect(text)

    monkeypatch.setattr(corpus, "detect_layout", meanwhile)
    with pytest.raises(DataError, match="changed while it was read"):
        read_pool([str(path)], "auto", "text")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\nnothing\n', "line 2 is not JSON .*; give JSON Lines, a record a line"),
        ('{"text": "a"}\n[1]\n', r"line 2 has no text 'text' \(it has list\)"),
        ('{"text": 3}\n', "line 1 has no text 'text'"),
        ("a,b\n1,2\n", r"has 1 document \(read as .*\), at least 4 are needed; put"),
    ],
)
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_pool([str(tmp_path / "x")], "auto", "text")
    assert "\n" not in str(caught.value)


def test_a_damaged_parquet_file_and_an_empty_folder_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(40))
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet") as caught:
        read_pool([str(tmp_path / "x.parquet")], "auto", "text")
    assert "\n" not in str(caught.value)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no files of text"):
        read_pool([str(tmp_path / "none")], "auto", "text")


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="needs pyarrow; run: python -m pip install pyarrow"):
        read_pool([str(tmp_path / "x")], "auto", "text")


def test_the_command_takes_several_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [sentences(tmp_path / "a", made_up_documents(20)), json_lines(tmp_path / "b", TEXTS, "body")]
    line = ["corpus", "--input", *map(str, inputs), "--outputdir", str(tmp_path / "out"), "--vocab-size", "300"]
    monkeypatch.setattr("sys.argv", [*line, "--text-key", "body"])
    run_stage("corpus")
    told = capsys.readouterr().err
    assert "read as one sentence per line, JSON Lines; 30 documents" in told
    parts = "".join(path.read_text() for path in (tmp_path / "out" / "download" / "results4").iterdir())
    assert DOCUMENTS[3][0] in parts
