"""A dump becomes text with every article once, whatever its streams, --jobs and interruptions."""

from __future__ import annotations

import bz2
import itertools
import os
import random
import re
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from input_preprocessing.stage.manifest import StageFolder, is_recorded, md5_of, record
from input_preprocessing.wiki import clean as clean_module
from input_preprocessing.wiki.clean import clean
from input_preprocessing.wiki.extract import (
    extract,
    parse_page,
    read_dump,
    read_pages,
    write_pages,
)
from input_preprocessing.wiki.split import cut, split

from ... import forked
from ...refused import refused
from ..conftest import flip

pytest.importorskip("mwparserfromhell")
pytest.importorskip("nupunkt")

HEADER = "<mediawiki><siteinfo><sitename>Wikipedia</sitename></siteinfo>\n"


def page(number: int, text: str, namespace: int = 0, redirect: bool = False) -> str:
    target = '<redirect title="Elsewhere" />' if redirect else ""
    head = (
        f"<title>Title &amp; {number}</title>\n<ns>{namespace}</ns>\n<id>{number}</id>"
    )
    body = f'<text xml:space="preserve">{escape(text)}</text>'
    revision = f"<revision><id>{number + 9}</id>{body}</revision>"
    return f"<page>\n{head}\n{target}{revision}\n</page>\n"


def name_of(number: int) -> str:
    return "".join(chr(97 + int(digit)) for digit in str(number))


def article(number: int) -> str:
    """Wikitext of two to five sentences, each with the article's number in words of letters."""
    name = name_of(number)
    body = " ".join(
        f"Sentence {name} {chr(97 + i)} of an [[x|article]] stands <page>here</page>."
        for i in range(2 + number % 4)
    )
    return f"{{{{Infobox|{number}}}}}\n{body}\n\n== Part ==\n* a list\nOne more about {name} with é and 漢字.\n"


@pytest.fixture(scope="module")
def xml():
    pages = []
    for number in range(1, 61):
        kind = {"namespace": int(number % 7 == 0), "redirect": number % 11 == 0}
        pages.append(page(number, article(number), **kind))
    return whole(*pages)


def whole(*pages: str) -> bytes:
    return (HEADER + "".join(pages) + "</mediawiki>").encode()


ARTICLES = [number for number in range(1, 61) if number % 7 and number % 11]


def streams(data: bytes, cuts: list[int]) -> bytes:
    """The data as bzip2 streams, cut at these places."""
    bounds = itertools.pairwise([0, *sorted(cuts), len(data)])
    return b"".join(bz2.compress(data[a:b]) for a, b in bounds if b > a)


@pytest.fixture
def dump(tmp_path, xml):
    """A multistream dump, of which streams end anywhere, tags included."""
    generator = random.Random(3)
    anywhere = [generator.randrange(len(xml)) for _ in range(9)]
    cuts = [len(HEADER), *anywhere, xml.index(b"<page>", 2000) + 3]
    folder = tmp_path / "download" / "wiki"
    folder.mkdir(parents=True)
    path = folder / "simplewiki-20200101-pages-articles-multistream.xml.bz2"
    path.write_bytes(streams(xml, cuts))
    return path


def numbers(folder: Path) -> list[int]:
    paths = sorted(folder.glob("pages-*"))
    return [found["id"] for path in paths for found in read_pages(path)]


@given(st.lists(st.integers(1, 5999), max_size=12), st.integers(200, 4000))
@example([828, 829], 200)  # a stream of one byte within a <page> tag
@settings(max_examples=40, deadline=None)
def test_every_page_is_in_exactly_one_range(tmp_path_factory, cuts, step):
    data = whole(*(page(number, article(number)) for number in range(20)))
    path = tmp_path_factory.mktemp("dump") / "a.bz2"
    path.write_bytes(streams(data, [cut for cut in cuts if cut < len(data)]))
    begins = range(0, path.stat().st_size, step)
    found = [xml for at in begins for xml in read_dump(path, at, at + step)]
    assert [parse_page(xml, path)["id"] for xml in found] == list(range(20))
    assert list(read_dump(path)) == found


@pytest.mark.parametrize("chunk_bytes", [700, 10**7])
def test_articles_come_out_once_and_in_order(dump, tmp_path, chunk_bytes):
    extract([dump], tmp_path / "pages", jobs=1, chunk_bytes=chunk_bytes)
    assert numbers(tmp_path / "pages") == ARTICLES
    first = next(read_pages(tmp_path / "pages" / "pages-00000.jsonl.gz"))
    assert (first["title"], first["text"]) == ("Title & 1", article(1))


def test_a_dump_of_one_stream_gives_the_same_articles(tmp_path, xml):
    path = tmp_path / "enwiki-pages-articles.xml.bz2"
    path.write_bytes(bz2.compress(xml))
    assert extract([path], tmp_path / "pages", jobs=1, chunk_bytes=600) > 2
    assert numbers(tmp_path / "pages") == ARTICLES


def test_parts_of_a_dump_are_taken_in_the_order_of_their_numbers(tmp_path):
    for part, number in ((10, 9), (2, 3), (1, 1)):
        data = streams(whole(page(number, article(number))), [len(HEADER)])
        name = f"enwiki-pages-articles{part}.xml-p{number}.xml.bz2"
        (tmp_path / name).write_bytes(data)
    extract(list(tmp_path.glob("*.bz2")), tmp_path / "pages", jobs=1)
    assert numbers(tmp_path / "pages") == [1, 3, 9]


def outcome(folder: Path) -> dict[str, str]:
    """md5 of every file of text."""
    return {path.name: md5_of(path) for path in folder.iterdir()}


def make_text(dump: Path, folder: Path, jobs: int = 1) -> dict[str, str]:
    """The three stages; md5 of every file of text."""
    pages, text = folder / "pages", folder / "text"
    extract([dump], pages, jobs=jobs, chunk_bytes=2000)
    clean(pages, text, jobs=jobs)
    split(text, folder / "results4", jobs=jobs, shards=4)
    return outcome(folder / "results4")


@pytest.fixture
def made(dump):
    return make_text(dump, dump.parents[1])


def test_text_holds_every_article_once_in_shards_or_evaluation(made, dump):
    folder = dump.parent.parent / "results4"
    parts = [path.read_text("utf-8") for path in sorted(folder.glob("part-*-of-00004"))]
    held_out = (folder / "eval.txt").read_text("utf-8")
    documents = [*filter(None, "\n\n".join([*parts, held_out]).split("\n\n"))]
    assert len(documents) == len(ARTICLES)
    assert {len(document.split("\n")) for document in documents} == {3, 4, 5, 6}
    assert len(set(documents)) == len(documents)
    assert len([*filter(None, held_out.split("\n\n"))]) == int(len(ARTICLES) * 0.05)
    sizes = [len(part.encode()) for part in parts]
    longest = max(len(document.encode()) for document in documents)
    assert max(sizes) - min(sizes) < 2 * longest
    names = map(name_of, ARTICLES)
    order = [name for part in parts for name in re.findall(r"about (\w+)", part)]
    assert order == [name for name in names if f"about {name} " not in held_out]


def test_a_replaced_dump_is_made_into_text_again(made, dump):
    folder = dump.parents[1]
    pages = [page(number, article(number)) for number in range(100, 130)]
    dump.write_bytes(streams(whole(*pages), []))
    assert make_text(dump, folder).keys() == made.keys()
    parts = (folder / "results4").glob("part-*")
    texts = "".join(path.read_text("utf-8") for path in parts)
    assert {*re.findall(r"about (\w+)", texts)} <= {*map(name_of, range(100, 130))}


@pytest.mark.parametrize("stage", ["extract", "clean"])
def test_a_bit_that_fell_between_two_stages_is_named_and_only_its_file_made_again(
    dump, tmp_path, stage
):
    pages, text, parts = tmp_path / "pages", tmp_path / "text", tmp_path / "parts"

    def run() -> None:
        extract([dump], pages, jobs=1, chunk_bytes=2000)
        clean(pages, text, jobs=1)

    run()
    folder, following = {
        "extract": (pages, lambda: clean(pages, text, jobs=1)),
        "clean": (text, lambda: split(text, parts, jobs=1, shards=2)),
    }[stage]
    intact = outcome_of(folder)
    assert len(intact) > 2
    damaged = sorted(path for path in folder.iterdir() if path.name[0] in "pt")[1]
    flip(damaged)
    others = {folder / name: (folder / name).stat().st_mtime_ns for name in intact}
    with refused(rf"{damaged.name} is missing or was changed; run .*{stage}"):
        following()
    run()
    following()
    assert outcome_of(folder) == intact
    changed = [path for path, time in others.items() if path.stat().st_mtime_ns != time]
    assert changed == [damaged]


def test_a_file_of_an_interrupted_stage_is_kept_only_if_it_is_as_it_was_written(
    tmp_path,
):
    options = (tmp_path, "clean", ["text-*"], {"a": 1})
    StageFolder(*options)
    for name in ("text-1", "text-2", "text-3"):
        (tmp_path / name).write_text(name)
        record(tmp_path / name)
    flip(tmp_path / "text-2")
    (tmp_path / ".text-3.md5").unlink()
    folder = StageFolder(*options)
    assert [n for n in (1, 2, 3) if is_recorded(tmp_path / f"text-{n}")] == [1]
    with refused("text-3"):
        folder.finish(["text-1", "text-3"])


def outcome_of(folder):
    made = [path for path in folder.iterdir() if path.suffix in (".gz", ".txt")]
    return {path.name: md5_of(path) for path in made}


def test_jobs_do_not_matter(made, tmp_path, dump):
    assert make_text(dump, tmp_path / "other", jobs=2) == made


class Killed(BaseException):
    """Stands for kill -9."""


def test_killed_at_any_file_it_goes_on_to_the_same_bytes(
    made, dump, tmp_path, monkeypatch
):
    rename, unlink = os.replace, Path.unlink
    for crash_at in range(1, 200, 3):
        folder = tmp_path / f"again{crash_at}"
        folder.mkdir()
        calls = 0

        def crash(source: Path, target: Path, crash_at: int = crash_at) -> None:
            nonlocal calls
            calls += 1
            if calls == crash_at and crash_at % 2:
                raise Killed
            rename(source, target)
            if calls == crash_at:
                raise Killed

        def keep_partial(path: Path, missing_ok: bool = False) -> None:
            if not path.name.endswith(".partial"):
                unlink(path, missing_ok)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", crash)
            patched.setattr(Path, "unlink", keep_partial)
            try:
                make_text(dump, folder)
                break
            except Killed:
                pass
        assert make_text(dump, folder) == made
    assert crash_at > 12


def test_finished_work_is_not_repeated_and_other_options_redo_it(
    dump, tmp_path, monkeypatch
):
    pages, text, shards = tmp_path / "pages", tmp_path / "text", tmp_path / "shards"
    times = []
    for _ in range(2):
        extract([dump], pages, jobs=1, chunk_bytes=900)
        clean(pages, text, jobs=1)
        split(text, shards, jobs=1, shards=4)
        made = [path for folder in (pages, text, shards) for path in folder.iterdir()]
        times.append({path: path.stat().st_mtime_ns for path in made})
    assert times[0] == times[1]
    split(text, shards, jobs=1, shards=3)
    names = sorted(path.name for path in shards.glob("part-*"))
    assert names == [f"part-{i:05d}-of-00003" for i in range(3)]
    monkeypatch.setitem(clean_module._TABLE, "dropped_sections", ["part"])
    clean(pages, text, jobs=1)
    assert not any(b"One more" in path.read_bytes() for path in text.glob("text-*"))


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[-40:]
    elif how == "damaged":
        data[len(data) // 2] ^= 255
    elif how == "not a bzip2":
        data[:3] = b"PK\x03"
    else:
        xml = bz2.decompress(bytes(data))
        if how == "middle of a page":
            xml = xml[: xml.rindex(b"</page>")]
        elif how == "not XML":
            xml = xml.replace(b"</title>", b"</titl>")
        else:
            xml = whole(page(1, "x", namespace=4))
        data = bytearray(streams(xml, [70]))
    path.write_bytes(data)


@pytest.mark.parametrize("how", [
    "truncated",
    "damaged",
    "not a bzip2",
    "middle of a page",
    "not XML",
    "no articles",
])  # fmt: skip
def test_a_damaged_dump_is_one_clear_line(dump, tmp_path, how):
    damaged(dump, how)
    with refused(how) as caught:
        extract([dump], tmp_path / "pages", jobs=1)
    assert "\n" not in str(caught.value)
    assert dump.name in str(caught.value)


def test_stages_out_of_order_or_on_foreign_files_are_refused(dump, tmp_path):
    with refused(r"no finished output of extract; run python .* extract"):
        clean(tmp_path, tmp_path / "text", jobs=1)
    with refused("cannot read the dump"):
        extract([tmp_path / "none.xml.bz2"], tmp_path / "pages", jobs=1)
    extract([dump], tmp_path / "pages", jobs=1, chunk_bytes=900)
    clean(tmp_path / "pages", tmp_path / "text", jobs=1)
    with refused("too few for 500 shards; use --shards 22"):
        split(tmp_path / "text", tmp_path / "shards", jobs=1, shards=500)
    (tmp_path / "shards").mkdir(exist_ok=True)
    theirs = tmp_path / "shards" / "part-00000-of-00500"
    theirs.write_text("the benchmark's own\n\n")
    with refused("was not made by split"):
        split(tmp_path / "text", tmp_path / "shards", jobs=1, shards=4)
    assert theirs.read_text() == "the benchmark's own\n\n"
    (tmp_path / "text" / "text-00001.txt").write_text("cut")
    with refused(r"text-00001\.txt is missing or was changed"):
        split(tmp_path / "text", tmp_path / "other", jobs=1, shards=4)
    clean(tmp_path / "pages", tmp_path / "text", jobs=1)
    split(tmp_path / "text", tmp_path / "other", jobs=1, shards=4)


def test_pages_of_a_damaged_file_are_an_error(tmp_path):
    path = tmp_path / "pages-00000.jsonl.gz"
    write_pages(path, [])
    path.write_bytes(path.read_bytes()[:-4])
    with refused("damaged"):
        list(read_pages(path))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.data())
@settings(deadline=None)
def test_runs_of_documents_keep_order_and_are_never_empty(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    ends = np.cumsum(sizes)
    documents = np.stack([np.zeros(len(sizes), np.int64), ends - sizes, ends], axis=1)
    runs = cut(documents, count)
    assert len(runs) == count
    assert min(len(run) for run in runs) >= 1
    assert np.array_equal(np.concatenate(runs), documents)


def test_the_folder_of_a_stage_drops_files_of_another_recipe_only_and_says_so(
    tmp_path, capsys
):
    first = StageFolder(tmp_path, "clean", ["text-*"], {"a": 1})
    (tmp_path / "text-1").write_text("x")
    record(tmp_path / "text-1")
    first.finish(["text-1"])
    assert StageFolder(tmp_path, "clean", ["text-*"], {"a": 1}).finished
    (tmp_path / "mine").write_text("x")
    assert not capsys.readouterr().err
    assert not StageFolder(tmp_path, "clean", ["text-*"], {"a": 2}).finished
    said = "remaking 1 files made from another source or options"
    assert capsys.readouterr().err == f"{tmp_path}: {said}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "stage.json"]


def test_the_command_lines_run_one_after_the_other(dump, tmp_path):
    def run(stage: str, *options: object) -> str:
        done = forked.run("input_preprocessing", stage, *options, "--jobs", 1)
        assert done.returncode == 0, done.stderr
        return done.stderr

    run("extract", "--source", dump, "--target", tmp_path / "p")
    run("clean", "--source", tmp_path / "p", "--target", tmp_path / "t")
    line = ["--source", tmp_path / "t", "--target", tmp_path / "s", "--shards", "2"]
    assert "for evaluation" in run("split", *line)
    line = ["clean", "--source", tmp_path, "--target", tmp_path]
    failed = forked.run("input_preprocessing", *line)
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
