"""The disk that a preparation needs is printed before it starts; too little stops it."""

from __future__ import annotations

import shutil

import pytest

from input_preprocessing.dataset import prepare
from input_preprocessing.dataset.steps import check_disk
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.stage.cli import parser_of

from ...refused import refused
from ..conftest import prepare_options


def free(monkeypatch: pytest.MonkeyPatch, disk: float) -> None:
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda _: shutil._ntuple_diskusage(int(disk), 0, int(disk)),
    )


def test_files_made_earlier_count_as_room(tmp_path, monkeypatch):
    # 0.9 bytes of records for each of ten passes over a byte, twice; and 10 MB.
    free(monkeypatch, 28_000_000 - 5_000)
    with refused("make room"):
        check_disk(tmp_path, 1_000_000, SamplingConfig())
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "instances").write_bytes(bytes(5_000))
    check_disk(tmp_path, 1_000_000, SamplingConfig())


def test_the_need_is_reported_and_checked_before_anything_is_downloaded(
    tmp_path, monkeypatch, capsys
):
    free(monkeypatch, 200e9)
    monkeypatch.setattr(
        prepare.download, "download", lambda *_: pytest.fail("it downloads")
    )
    options = prepare_options(tmp_path / "data", "--packed-data", "--dupe-factor", "10")
    options.skip_download = False
    with refused(r"200\.0 GB free"):
        prepare.main(options)
    told = capsys.readouterr().err
    assert "13.2 GB of text: about 261.7 GB of disk (200.0 GB free)" in told


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--outputdir", "", "the name is empty; is a variable unset"),
    ("--shards", "x", "'x': expected a positive integer"),
    ("--jobs", "0", "'0': expected a positive integer"),
])  # fmt: skip
def test_a_wrong_value_is_reported_with_the_option(capsys, option, value, message):
    with pytest.raises(SystemExit):
        parser_of("prepare").parse_args(["--outputdir", "data", option, value])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in last
    assert message in last
