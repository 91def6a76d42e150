"""Small data sets that several tests prepare from, or compare with."""

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from bert.data.format import open_records, verify_records
from bert.data.records import Records, concatenate
from input_preprocessing.dataset import prepare
from input_preprocessing.records import bins
from input_preprocessing.stage import cli

from .. import forked


def made_up_documents(count: int, seed: int = 0) -> list[list[str]]:
    """Documents of made-up words, always the same, unlike Python's documentation, which changes
    with its version.

    Frequent and rare words, short and long sentences, and documents of 2 to 70 sentences, as in
    prose.
    """
    generator = np.random.default_rng(seed)
    syllables = [
        a + b + c
        for a in ("b", "d", "k", "l", "m", "r", "st", "tr", "v")
        for b in "aeio"
        for c in ("", "n", "s")
    ]
    words = []
    for _ in range(1200):
        words.append("".join(generator.choice(syllables, generator.integers(1, 4))))
    documents = []
    for length in np.clip(generator.lognormal(2.6, 0.9, count), 2, 70).astype(int):
        sentences = []
        for size in generator.integers(3, 28, length):
            chosen = (len(words) ** generator.random(size)).astype(int) - 1
            picked = [words[i] for i in chosen]
            if size > 12:
                picked[size // 2] += generator.choice([",", ";", " -", "'s", " (7)"])
            end = generator.choice([".", ".", ".", "?", "!"])
            sentences.append(" ".join(picked).capitalize() + end)
        documents.append(sentences)
    return documents


def write_documents(path: Path, documents: list[list[str]]) -> None:
    """One sentence a line, a blank line after each document."""
    text = "".join("\n".join(document) + "\n\n" for document in documents)
    path.write_text(text, encoding="utf-8")


def prepare_options(folder: Path, *more: str) -> argparse.Namespace:
    """Options of a quick preparation of `folder`."""
    line = ["--outputdir", str(folder), "--skip-download", "--dupe-factor", "2"]
    line += ["--max-seq-length", "64", "--jobs", "1", *more]
    return cli.parser_of("prepare").parse_args(line)


def run(stage: str, *words: object) -> None:
    """Runs a stage with these words on its command line, in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [stage, *map(str, words)])
        cli.run_stage(stage)


def make(folder: Path, *more: str) -> None:
    """Prepares a folder in four packed shards, as `packed` is."""
    prepare.main(prepare_options(folder, "--packed-data", "--shards", "4", *more))


def contents(folder: Path) -> dict[str, str]:
    """md5 of every file, but for locks and for manifests, which record the time stamps of the text."""
    files = times(folder, "*")
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith("prepared-")
    }


def prepared_digests(folder: Path) -> dict[str, str]:
    """md5 of every prepared file."""
    found = contents(folder).items()
    prepared = (".hdf5", ".txt", ".json")
    return {
        name: md5
        for name, md5 in found
        if name.endswith(prepared) and "download/" not in name
    }


def times(folder: Path, pattern: str = "*.hdf5") -> dict[Path, int]:
    """When each file was written."""
    files = (path for path in folder.rglob(pattern) if path.is_file())
    return {path: path.stat().st_mtime_ns for path in files if path.name != ".lock"}


def interrupted(*_: object) -> None:
    """Stands for a step at which a run ends."""
    raise KeyboardInterrupt


def all_records(folder: Path) -> Records:
    """The verified records of all shards of a folder."""
    return concatenate(
        [verify_records(path)[0] for path in sorted(folder.glob("part_*.hdf5"))]
    )


@pytest.fixture(scope="session")
def downloaded(tmp_path_factory):
    """A data folder with a small corpus of made-up text, ready to prepare."""
    folder = tmp_path_factory.mktemp("data")
    text = tmp_path_factory.mktemp("text") / "text"
    write_documents(text, made_up_documents(60))
    options = ["--input", text, "--outputdir", folder, "--num-files", 3]
    options += ["--vocab-size", 800]
    assert forked.run("input_preprocessing", "corpus", *options).returncode == 0
    return folder


@pytest.fixture
def fresh(downloaded, tmp_path):
    """A copy of `downloaded` to prepare in."""
    shutil.copytree(downloaded, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(scope="session")
def packed(downloaded, tmp_path_factory):
    """The packed data set of an undisturbed run with one job; not to be written to."""
    folder = tmp_path_factory.mktemp("packed") / "data"
    shutil.copytree(downloaded, folder)
    make(folder)
    return folder


@pytest.fixture
def folder(packed, tmp_path):
    """A copy of `packed` to damage or to prepare again."""
    shutil.copytree(packed, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def two_bins(monkeypatch):
    """Bins of at most 32 and 64 tokens: of quarters some would be empty in so little text."""
    monkeypatch.setattr(bins, "edges_of", lambda _: (32, 64))


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def alter_first_id(path: Path) -> None:
    """Changes the first token of a record file, which neither size nor attributes tell."""
    data = bytearray(path.read_bytes())
    data[data.index(open_records(path)[0].input_ids[:8].tobytes())] ^= 1
    path.write_bytes(data)
