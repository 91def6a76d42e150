"""Shards are compared with a list of md5 before they are imported; each difference is a line."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.records.foreign import differences, read_list
from input_preprocessing.stage.cli import run_stage

from ...bert.data.samples import make_records, sequences_of, write_nvidia


def write_shards(folder: Path, schema: str = "variable") -> list[Path]:
    folder.mkdir()
    paths = [folder / f"part_{i:05d}_of_00003.hdf5" for i in range(3)]
    for seed, path in enumerate(paths):
        write_nvidia(path, make_records(5, seed), schema)
    return paths


def md5(data: str | bytes) -> str:
    return hashlib.md5(data.encode() if isinstance(data, str) else data).hexdigest()


def published(seed: int) -> str:
    """The digest of a shard as NVIDIA's list has it, said plainly."""
    return md5(str([md5(str(ids.tolist())) for ids, *_ in sequences_of(make_records(5, seed))]))


def test_a_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"# a comment\n\nhdf5/train/part_1 {'B' * 32}\npart_2.hdf\t{'c' * 32}\n")
    assert read_list(tmp_path / "list") == {"part_1": "b" * 32, "part_2.hdf": "c" * 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no files"),
        ("part_0 abc\n", "line 1 is not 'name  md5'"),
        (f"{'a' * 32}\n", "line 1 is not"),
        (f"{'a' * 32}  part_0\n", "one of md5sum: md5sum -c"),
        (f"x/part_0 {'a' * 32}\ny/part_0 {'b' * 32}\n", "line 2 gives part_0 another md5"),
        (None, "cannot read"),
    ],
)
def test_a_list_that_cannot_be_used_is_told_in_a_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "list").write_text(text)
    with pytest.raises(DataError, match=message):
        read_list(tmp_path / "list")


def test_files_as_listed_differ_in_nothing(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards")
    lines = [f"{path.name}\t{published(i)}" for i, path in enumerate(paths)]
    (tmp_path / "list").write_text("\n".join(lines))
    listed = read_list(tmp_path / "list")
    assert not differences(paths, listed, whole=True, jobs=1)
    assert not differences(paths[:1], listed, whole=False, jobs=1), "one file of the list, by itself"
    write_nvidia(paths[1], make_records(5, 9), "variable")
    (told,) = differences(paths, listed, whole=True, jobs=1)
    assert told.startswith(f"{paths[1]} has md5 ")


def test_the_command_tells_each_difference_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_shards(tmp_path / "shards")
    lines = [f"{path.name}\t{published(i)}" for i, path in enumerate(paths)]
    (tmp_path / "list").write_text("\n".join(lines))
    line = ["import_records", "--source", tmp_path / "shards", "--target", tmp_path / "out", "--check-list",
            tmp_path / "list", "--jobs", "1"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(map(str, line)))
    paths[0].rename(tmp_path / "shards" / "part_7.hdf5")
    write_nvidia(paths[1], make_records(5, 9), "variable")
    paths[2].write_bytes(b"no shard")
    with pytest.raises(SystemExit, match="4 differences, told above; nothing was imported") as ended:
        run_stage("import_records")
    assert ended.value.code
    told = capsys.readouterr().err.splitlines()
    expected = [
        f"{paths[1].name} has md5 of input_ids {published(9)}, the list {published(1)}",
        "has no input_ids to compare",
        "part_7.hdf5 is not on the list",
        f"{paths[0].name} is missing",
    ]
    assert [text in line for text, line in zip(expected, told, strict=True)] == [True] * 4
    assert not (tmp_path / "out").exists()
    (tmp_path / "shards" / "part_7.hdf5").rename(paths[0])
    write_nvidia(paths[1], make_records(5, 1), "variable")
    write_nvidia(paths[2], make_records(5, 2), "variable")
    run_stage("import_records")
    assert "3 files as " in capsys.readouterr().err
    assert len(list((tmp_path / "out").iterdir())) == 3
