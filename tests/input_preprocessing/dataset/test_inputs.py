"""The needs of a preparation are printed before it starts; too little disk stops it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bert.data.records import DataError
from input_preprocessing.dataset import prepare
from input_preprocessing.dataset.steps import PUBLIC_BYTES, PUBLIC_SIZES, check_needs, needs_of
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.stage.cli import parser_of

from ..conftest import prepare_options


def test_the_real_corpus_fits_300_gb_and_2_gb_a_worker() -> None:
    needs = needs_of(PUBLIC_SIZES, SamplingConfig(), 64, download=PUBLIC_BYTES)
    assert 220e9 < needs.disk < 300e9
    assert needs.memory < 64 * 2e9
    assert needs.seconds < 45 * 60


def test_more_nodes_take_less_time_each() -> None:
    one, four = (needs_of([27_000_000] * 500, SamplingConfig(), 64, nodes) for nodes in (1, 4))
    assert (one.workers, four.workers) == (64, 64)
    assert four.seconds < one.seconds / 3


def free(monkeypatch: pytest.MonkeyPatch, disk: float) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(int(disk), 0, int(disk))
    )


def test_files_made_earlier_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = needs_of([1_000_000], SamplingConfig(), 1)
    free(monkeypatch, needs.disk - 5_000)
    with pytest.raises(DataError, match="make room"):
        check_needs(needs, tmp_path, "work")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "instances").write_bytes(bytes(5_000))
    check_needs(needs, tmp_path, "work")


def test_the_need_is_reported_and_checked_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 200e9)
    monkeypatch.setattr(prepare.download, "download", lambda *_: pytest.fail("it downloads"))
    options = prepare_options(tmp_path / "data", "--packed-data", "--dupe-factor", "10")
    options.skip_download = False
    with pytest.raises(DataError, match=r"200\.0 GB free"):
        prepare.main(options)
    told = capsys.readouterr().err
    assert "13.2 GB of text in 501 files" in told
    assert "after a download of 24.1 GB" in told


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--outputdir", "", "the name is empty; is a variable unset"),
        ("--shards", "x", "'x': expected a positive integer"),
        ("--jobs", "0", "'0': expected a positive integer"),
        ("--part", "3/3", "'3/3' is not a part"),
        ("--part", "1", "'1' is not a part"),
        ("--edges", "abc", "is not a list of ascending lengths"),
    ],
)
def test_a_wrong_value_is_reported_with_the_option(
    capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        parser_of("prepare").parse_args(["--outputdir", "data", option, value])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: " in last
    assert message in last
