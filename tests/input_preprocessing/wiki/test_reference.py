"""The reference's own files are split like the reference does, byte for byte; other text by the
same rule.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from bert.data import prepared
from input_preprocessing.wiki import extract, split

from ... import forked
from ...refused import refused

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
    """Seven made-up files of WikiExtractor's, of which only the size counts, and their
    sentences.
    """
    generator = random.Random(5)
    for number in range(7):
        folder = tmp_path / "text" / ("AA" if number < 4 else "AB")
        folder.mkdir(parents=True, exist_ok=True)
        articles = [
            "\n".join(
                f"Sentence {i} of article {a} in {number}, café."
                for i in range(generator.randint(1, 5))
            )
            for a in range(generator.randint(2, 30))
        ]
        text = "\n\n".join(articles) + ("\n\n" if number % 3 else "\n\n\n")
        (folder / f"wiki_{number % 4:02d}.3").write_text(
            text, encoding="utf-8", newline="\n"
        )
        (folder / f"wiki_{number % 4:02d}").write_bytes(b"x" * (1000 + 137 * number))
    return tmp_path / "text"


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(split, "BLOCK_BYTES", int(0.003 * (1 << 20)))


def md5s(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.md5(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "stage.json"
    }


@pytest.mark.usefixtures("small_blocks")
def test_the_references_files_give_what_its_scripts_do(tree, tmp_path):
    made = split.split(tree, tmp_path / "out", jobs=1, num_eval_documents=25)
    assert md5s(tmp_path / "out") == WRITTEN
    assert made.held_out == 25
    assert made.eval_md5 == WRITTEN["eval.txt"]


def test_the_benchmarks_evaluation_text_is_known_and_another_is_called_so(
    tree, tmp_path, monkeypatch
):
    other = split.split(tree, tmp_path / "a", jobs=1, num_eval_documents=25)
    assert (
        f"md5 {WRITTEN['eval.txt']}) is not the benchmark's (2a220f790517261547b1b45ed3ada07a)"
        in other.note
    )
    monkeypatch.setitem(prepared.TEXT_MD5, "eval.txt", WRITTEN["eval.txt"])
    made = split.split(tree, tmp_path / "a", jobs=1, num_eval_documents=25)
    assert made.note == "eval.txt is the benchmark's, byte for byte"


@pytest.mark.usefixtures("small_blocks")
def test_files_of_the_same_name_in_two_folders_are_distinguished(tree, tmp_path):
    split.split(tree, tmp_path / "out", jobs=1, num_eval_documents=25)
    (tree / "AA/wiki_00.3").write_text(
        (tree / "AA/wiki_00.3").read_text().replace("café", "tea")
    )
    split.split(tree, tmp_path / "out", jobs=1, num_eval_documents=25)
    assert "tea" in (tmp_path / "out/part-00000-of-00005").read_text()


def test_a_missing_or_cut_file_is_a_one_line_error(tree, tmp_path):
    (tree / "AB/wiki_01").unlink()
    with refused("AB/wiki_01 is missing, its size"):
        split.split(tree, tmp_path / "out", jobs=1, num_eval_documents=25)
    split.split(tree, tmp_path / "out", jobs=1, num_eval_documents=25, shards=3)
    assert len(list((tmp_path / "out").glob("part-*-of-00003"))) == 3
    (tree / "AB/wiki_01.3").write_text("cut")
    with refused(r"AB/wiki_01\.3 is truncated"):
        split.split(tree, tmp_path / "out", jobs=1, num_eval_documents=25)


def test_every_file_holds_out_its_share():
    files = np.repeat(np.arange(40), 30)
    held_out = split.hold_out(files, 50, 12345)
    assert np.bincount(files[held_out]).tolist() == [1, 1, 1, 2] * 10
    assert (split.hold_out(files, 50, 12345) == held_out).all()
    assert (split.hold_out(files, 50, 1) != held_out).any()
    assert split.hold_out(np.array([0, 0, 1]), 6, 0).all(), (
        "a small file gives all it has"
    )


def test_text_counts_as_files_of_a_mebibyte():
    half = split.FILE_BYTES // 2
    assert split.fill(
        [half, half, 1, 3 * half, half, half, half], split.FILE_BYTES
    ).tolist() == [0, 0, 1, 2, 3, 3, 4]


def test_the_benchmarks_dump_is_known_by_its_md5():
    name = "enwiki-20200101-pages-articles-multistream.xml.bz2"
    extract._check_known({name: "00d47075e0f583fb7c0791fac1c57cb3"})
    extract._check_known({"dewiki-20200101-pages-articles.xml.bz2": "0" * 32})
    with refused(f"{name} has md5 0+, the published one 00d4.*download it again"):
        extract._check_known({name: "0" * 32})


def test_a_damaged_dump_under_the_benchmarks_name_is_refused(tmp_path):
    path = tmp_path / "enwiki-20200101-pages-articles-multistream.xml.bz2"
    path.write_bytes(b"BZh9")
    with refused("the published one 00d47075"):
        extract.extract([path], tmp_path / "out", jobs=1)


def test_the_command_says_what_it_made(tree, tmp_path):
    line = [
        "--source",
        tree,
        "--target",
        tmp_path / "out",
        "--num-eval-documents",
        25,
        "--jobs",
        1,
    ]
    done = forked.run("input_preprocessing", "split", *line)
    assert done.returncode == 0, done.stderr
    assert "in 1 files, 25 for evaluation; eval.txt (md5 893af3709a8ac" in done.stderr
    assert "is not the benchmark's" in done.stderr
