"""A dump becomes text with every article once, whatever its streams, --jobs and interruptions; the
reference's own files are split as the reference does, byte for byte.
"""

import bz2
import itertools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert.data import prepared
from input_preprocessing.stage.manifest import StageFolder, is_recorded, md5_of, record
from input_preprocessing.wiki import clean as clean_module
from input_preprocessing.wiki import extract as extract_module
from input_preprocessing.wiki import split as split_module
from input_preprocessing.wiki.clean import clean
from input_preprocessing.wiki.extract import (
    extract,
    parse_page,
    read_dump,
    read_pages,
    write_pages,
)
from input_preprocessing.wiki.split import (
    FILE_BYTES,
    Split,
    cut,
    fill,
    hold_out,
    split,
)

from ...refused import refused
from ..conftest import flip, run, times
from ..test_crash_points import check

pytest.importorskip("mwparserfromhell")
pytest.importorskip("nupunkt")

HEADER = "<mediawiki><siteinfo><sitename>Wikipedia</sitename></siteinfo>\n"


def page(number: int, text: str, namespace: int = 0, redirect: bool = False) -> str:
    target = '<redirect title="Elsewhere" />' if redirect else ""
    title = f"<title>Title &amp; {number}</title>\n<ns>{namespace}</ns>"
    body = f'<text xml:space="preserve">{escape(text)}</text>'
    revision = f"<revision><id>{number + 9}</id>{body}</revision>"
    return f"<page>\n{title}\n<id>{number}</id>\n{target}{revision}\n</page>\n"


def name_of(number: int) -> str:
    return "".join(chr(97 + int(digit)) for digit in str(number))


def article(number: int) -> str:
    """Wikitext of two to five sentences, each with the article's number in words of letters."""
    name = name_of(number)
    sentence = f"Sentence {name} {{}} of an [[x|article]] stands <page>here</page>."
    body = " ".join(sentence.format(chr(97 + i)) for i in range(2 + number % 4))
    end = f"== Part ==\n* a list\nOne more about {name} with é and 漢字.\n"
    return f"{{{{Infobox|{number}}}}}\n{body}\n\n{end}"


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


@pytest.mark.parametrize(("is_one_stream", "chunk_bytes"), [(False, 700), (False, 10**7), (True, 600)])  # fmt: skip
def test_articles_are_read_once_in_order(
    dump, xml, tmp_path, is_one_stream, chunk_bytes
):
    if is_one_stream:
        dump.write_bytes(bz2.compress(xml))
    made = extract([dump], tmp_path / "pages", jobs=1, chunk_bytes=chunk_bytes)
    assert (made > 2) is (chunk_bytes < 10**7)
    assert numbers(tmp_path / "pages") == ARTICLES
    first = next(read_pages(tmp_path / "pages" / "pages-00000.jsonl.gz"))
    assert (first["title"], first["text"]) == ("Title & 1", article(1))


def test_parts_of_a_dump_are_taken_in_the_order_of_their_numbers(tmp_path):
    for part, number in ((10, 9), (2, 3), (1, 1)):
        data = streams(whole(page(number, article(number))), [len(HEADER)])
        name = f"enwiki-pages-articles{part}.xml-p{number}.xml.bz2"
        (tmp_path / name).write_bytes(data)
    extract(list(tmp_path.glob("*.bz2")), tmp_path / "pages", jobs=1)
    assert numbers(tmp_path / "pages") == [1, 3, 9]


def outcome(folder: Path) -> dict[str, str]:
    """md5 of every file of text or pages."""
    files = (path for path in folder.iterdir() if path.name[0] in "ept")
    return {path.name: md5_of(path) for path in files}


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


@pytest.mark.parametrize(("stage", "place"), [("extract", "pages"), ("clean", "text")])
def test_a_bit_that_fell_between_two_stages_is_named_and_only_its_file_made_again(
    made, dump, stage, place, capsys
):
    folder = dump.parents[1] / place
    pages, text = folder.with_name("pages"), folder.with_name("text")
    following = {
        "extract": lambda: clean(pages, text, jobs=1),
        "clean": lambda: split(text, folder.with_name("other"), jobs=1, shards=2),
    }[stage]
    intact, before = outcome(folder), times(folder, "[pt]*")
    assert len(intact) > 2
    damaged = sorted(before)[1]
    flip(damaged)
    with refused(rf"{damaged.name} is missing or was changed; run .*{stage}"):
        following()
    assert make_text(dump, dump.parents[1]) == made
    told = f"{damaged.name} is missing or was changed: made again"
    assert told in capsys.readouterr().err
    assert outcome(folder) == intact
    after = times(folder, "[pt]*")
    assert [path for path in before if after[path] != before[path]] == [damaged]


def test_a_file_of_an_interrupted_stage_is_kept_as_it_was_written(tmp_path):
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


def test_jobs_do_not_matter(made, tmp_path, dump):
    assert make_text(dump, tmp_path / "other", jobs=2) == made


def test_killed_at_any_change_of_the_disk_it_ends_the_same(dump, tmp_path):
    make = lambda folder: shutil.copy(dump, folder)  # noqa: E731
    assert check(make, lambda d: make_text(d / dump.name, d), tmp_path, step=19) >= 4


def test_finished_work_is_kept_and_other_options_redo_it(dump, tmp_path, monkeypatch):
    results = tmp_path / "results4"
    make_text(dump, tmp_path)
    before = times(tmp_path, "*-*")
    make_text(dump, tmp_path)
    assert times(tmp_path, "*-*") == before
    split(tmp_path / "text", results, jobs=1, shards=3)
    names = sorted(path.name for path in results.glob("part-*"))
    assert names == [f"part-{i:05d}-of-00003" for i in range(3)]
    monkeypatch.setitem(clean_module._TABLE, "dropped_sections", ["part"])
    make_text(dump, tmp_path)
    assert not any(b"One more" in path.read_bytes() for path in results.glob("part-*"))


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: streams(change(bz2.decompress(data)), [70])


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-40],
    "damaged": lambda data: data[:5000] + bytes([data[5000] ^ 255]) + data[5001:],
    "not a bzip2": lambda data: b"PK\x03" + data[3:],
    "middle of a page": rewritten(lambda xml: xml[: xml.rindex(b"</page>")]),
    "not XML": rewritten(lambda xml: xml.replace(b"</title>", b"</titl>")),
    "no articles": rewritten(lambda xml: whole(page(1, "x", namespace=4))),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_dump_is_one_clear_line(dump, tmp_path, how):
    dump.write_bytes(DAMAGED[how](dump.read_bytes()))
    with refused(how) as caught:
        extract([dump], tmp_path / "pages", jobs=1)
    assert "\n" not in str(caught.value)
    assert dump.name in str(caught.value)


def test_stages_out_of_order_or_on_foreign_files_are_refused(made, dump, tmp_path):
    with refused(r"no finished output of extract; run python .* extract"):
        clean(tmp_path, tmp_path / "new", jobs=1)
    with refused("cannot read the dump"):
        extract([tmp_path / "none.xml.bz2"], tmp_path / "new", jobs=1)
    text, shards = dump.parents[1] / "text", tmp_path / "shards"
    with refused(r"too few for 500 shards; use --shards \d+"):
        split(text, shards, jobs=1, shards=500)
    shards.mkdir(exist_ok=True)
    theirs = shards / "part-00000-of-00500"
    theirs.write_text("the benchmark's own\n\n")
    with refused("was not made by split"):
        split(text, shards, jobs=1, shards=4)
    assert theirs.read_text() == "the benchmark's own\n\n"


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


def test_the_folder_of_a_stage_drops_files_of_another_recipe_alone(tmp_path, capsys):
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


def test_the_command_lines_run_one_after_the_other(dump, tmp_path, capsys):
    pages, text, shards = (tmp_path / name for name in "pts")
    run("extract", "--source", dump, "--target", pages, "--jobs", 1)
    run("clean", "--source", pages, "--target", text, "--jobs", 1)
    run("split", "--source", text, "--target", shards, "--shards", 2, "--jobs", 1)
    told = capsys.readouterr().err
    assert "for evaluation; eval.txt (md5 " in told
    assert "is not the benchmark's" in told
    with pytest.raises(SystemExit) as ended:
        run("clean", "--source", tmp_path, "--target", tmp_path)
    assert "\n" not in str(ended.value.code)


# Of the files of `tree`, what MLCommons' seperate_test_set.py (--num_test_articles=25) and
# do_gather.py (--input_suffix=.4 --block_size=0.003) wrote.
WRITTEN = {
    "eval.txt": "893af3709a8ac09c169b411373bec8bb",
    "part-00000-of-00005": "7ec85f3df433e34e1f63730e3af8fcc6",
    "part-00001-of-00005": "610c64c9d5f25121b6a1da221e6696a3",
    "part-00002-of-00005": "436f6390a27ca3c277b29f8b882dbcd7",
    "part-00003-of-00005": "1bf919303d8f8437971acf4211a6c547",
    "part-00004-of-00005": "16bfce09fc3f4457e2b9e7b4744e6a1b",
}


@pytest.fixture
def tree(tmp_path):
    """Seven made-up files of WikiExtractor's, of which only the size counts, and their sentences."""
    generator = random.Random(5)
    for number in range(7):
        folder = tmp_path / "text" / ("AA" if number < 4 else "AB")
        folder.mkdir(parents=True, exist_ok=True)
        articles = []
        for a in range(generator.randint(2, 30)):
            of = f"of article {a} in {number}, café."
            count = generator.randint(1, 5)
            articles.append("\n".join(f"Sentence {i} {of}" for i in range(count)))
        text = "\n\n".join(articles) + ("\n\n" if number % 3 else "\n\n\n")
        path = folder / f"wiki_{number % 4:02d}"
        path.with_suffix(".3").write_bytes(text.encode())
        path.write_bytes(b"x" * (1000 + 137 * number))
    return tmp_path / "text"


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(split_module, "BLOCK_BYTES", int(0.003 * (1 << 20)))


def split_25(tree: Path, out: Path, **more: int) -> Split:
    return split(tree, out, jobs=1, num_eval_documents=25, **more)


@pytest.mark.usefixtures("small_blocks")
def test_the_references_files_give_what_its_scripts_do(tree, tmp_path):
    made = split_25(tree, tmp_path / "out")
    files = {*(tmp_path / "out").iterdir()} - {tmp_path / "out" / "stage.json"}
    assert {path.name: md5_of(path) for path in files} == WRITTEN
    assert made.held_out == 25
    assert made.eval_md5 == WRITTEN["eval.txt"]


def test_the_benchmarks_evaluation_text_is_known(tree, tmp_path, monkeypatch):
    other = split_25(tree, tmp_path / "a").note
    theirs = "is not the benchmark's (2a220f790517261547b1b45ed3ada07a)"
    assert f"md5 {WRITTEN['eval.txt']}) {theirs}" in other
    monkeypatch.setitem(prepared.TEXT_MD5, "eval.txt", WRITTEN["eval.txt"])
    made = split_25(tree, tmp_path / "a")
    assert made.note == "eval.txt is the benchmark's, byte for byte"


@pytest.mark.usefixtures("small_blocks")
def test_files_of_the_same_name_in_two_folders_are_distinguished(tree, tmp_path):
    split_25(tree, tmp_path / "out")
    path = tree / "AA/wiki_00.3"
    path.write_text(path.read_text().replace("café", "tea"))
    split_25(tree, tmp_path / "out")
    assert "tea" in (tmp_path / "out/part-00000-of-00005").read_text()


def test_a_missing_or_cut_file_is_a_one_line_error(tree, tmp_path):
    (tree / "AB/wiki_01").unlink()
    with refused("AB/wiki_01 is missing, its size"):
        split_25(tree, tmp_path / "out")
    split_25(tree, tmp_path / "out", shards=3)
    assert len(list((tmp_path / "out").glob("part-*-of-00003"))) == 3
    (tree / "AB/wiki_01.3").write_text("cut")
    with refused(r"AB/wiki_01\.3 is truncated"):
        split_25(tree, tmp_path / "out")


def test_every_file_holds_out_its_share():
    files = np.repeat(np.arange(40), 30)
    held_out = hold_out(files, 50, 12345)
    assert np.bincount(files[held_out]).tolist() == [1, 1, 1, 2] * 10
    assert (hold_out(files, 50, 12345) == held_out).all()
    assert (hold_out(files, 50, 1) != held_out).any()
    # A small file gives all that it has.
    assert hold_out(np.array([0, 0, 1]), 6, 0).all()


def test_text_counts_as_files_of_a_mebibyte():
    half = FILE_BYTES // 2
    sizes = [half, half, 1, 3 * half, half, half, half]
    assert fill(sizes, FILE_BYTES).tolist() == [0, 0, 1, 2, 3, 3, 4]


def test_the_benchmarks_dump_is_known_by_its_md5(tmp_path):
    name = "enwiki-20200101-pages-articles-multistream.xml.bz2"
    extract_module._check_known({name: "00d47075e0f583fb7c0791fac1c57cb3"})
    extract_module._check_known({"dewiki-20200101-pages-articles.xml.bz2": "0" * 32})
    (tmp_path / name).write_bytes(b"BZh9")
    with refused(f"{name} has md5 .*, the published one 00d4.*download it again"):
        extract([tmp_path / name], tmp_path / "out", jobs=1)
