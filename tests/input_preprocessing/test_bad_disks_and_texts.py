"""Full disks, read-only folders and odd texts: a clear line or the documented behaviour, and
nothing lost.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bert.data import hdf5
from bert.data.format import multiset_digest, open_records
from bert.data.records import DataError
from input_preprocessing.checkpoints.convert import convert
from input_preprocessing.dataset import prepare
from input_preprocessing.stage.manifest import STAGE_FILE
from input_preprocessing.verify import verdict as verify

from .. import disks, forked
from ..refused import refused
from .conftest import all_records, prepare_options, prepared_digests
from .test_crash_points import CHECKPOINT, STAGES, contents, make_source
from .test_crash_points import small_download as small_download

LIMIT = 1500  # bytes a file may have; every stage writes more


def in_a_process(
    limit: Callable[[], object], stage: Callable[[Path], object], folder: Path
) -> str:
    """What the stage says when it fails in a process with a limit; '' when it does not fail."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            limit()
            stage(folder)
        except (DataError, OSError) as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        message = pipe.read()
    os.waitpid(pid, 0)
    return message


@pytest.mark.parametrize("name", [name for name in STAGES if name != "download"])
def test_a_write_that_fails_is_reported_and_leaves_no_file(tmp_path, name):
    make, run = STAGES[name]
    folder, whole = tmp_path / "folder", tmp_path / "whole"
    folder.mkdir()
    make(folder)
    shutil.copytree(folder, whole)
    run(whole)
    before = contents(folder)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))  # noqa: E731
    message = in_a_process(limit, run, folder)
    assert message.startswith("DataError: cannot write "), message
    assert "\n" not in message
    assert "check space and permissions, run again" in message
    kept = {STAGE_FILE, "out/CoLA.zip"}  # what was begun, and what was fetched whole
    left = contents(folder).items()
    assert {n: md5 for n, md5 in left if not {n, Path(n).name} & kept} == before
    run(folder)
    assert contents(folder) == contents(whole)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 kB; skips if none can be mounted."""
    with disks.small_disk(tmp_path / "small", 409_600):
        yield tmp_path / "small"


def test_a_full_disk_is_reported_and_leaves_no_partial_file(small_disk, tmp_path):
    make, run = STAGES["shuffle"]
    make(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 40_960))
    with refused(r"cannot write .*(No space left|space and permissions)") as caught:
        run(small_disk)
    assert "\n" not in str(caught.value)
    assert not list(small_disk.rglob("*.partial"))
    filler.unlink()
    run(small_disk)
    whole = tmp_path / "whole"
    whole.mkdir()
    make_source(whole)
    run(whole)
    assert contents(small_disk) == contents(whole)


def test_a_preparation_stops_on_a_small_disk_before_it_starts(small_disk, downloaded):
    line = ["--outputdir", small_disk / "data", "--skip-download", "--packed-data"]
    line += ["--downloaddir", downloaded / "download"]
    done = forked.run("input_preprocessing", "prepare", *line)
    assert done.returncode == 1
    told, refused = done.stderr.splitlines()
    assert "of disk (409.6 kB free)" in told
    assert "make room or choose another --outputdir" in refused
    assert [path.name for path in (small_disk / "data").iterdir()] == [".lock"]


@pytest.fixture
def public_folder():
    """A folder that any user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["instances", "evalset", "convert_checkpoint"])
def test_a_read_only_folder_is_reported(public_folder, name):
    make, run = STAGES[name]
    # Nobody could not keep what is compiled.
    with tempfile.TemporaryDirectory() as other:
        make(Path(other))
        run(Path(other))
    make(public_folder)
    if name == "convert_checkpoint":  # nobody may not reach the checkout
        shutil.copytree(CHECKPOINT.parent, public_folder / "tf1_checkpoint")
        checkpoint = public_folder / "tf1_checkpoint" / CHECKPOINT.name

        def run(folder: Path) -> object:
            return convert(checkpoint, folder / "out.safetensors", "huggingface")

    public_folder.chmod(0o555)
    before = contents(public_folder)

    def become_nobody() -> None:  # root writes anywhere
        if os.geteuid() == 0:
            hdf5._helper.process = hdf5._start()  # nobody may not reach this Python
            os.setresuid(65534, 65534, 65534)

    message = in_a_process(become_nobody, run, public_folder)
    assert message.startswith("DataError: cannot write "), message
    assert "Permission denied" in message
    assert contents(public_folder) == before


def test_a_preparation_in_a_read_only_folder_is_refused(public_folder, downloaded):
    public_folder.chmod(0o555)

    def stage(folder: Path) -> None:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        prepare.main(prepare_options(folder / "data", "--packed-data"))

    message = in_a_process(lambda: None, stage, public_folder)
    assert f"cannot write to {public_folder}/data: Permission denied" in message


def test_blank_crlf_and_blankless_parts_are_prepared_with_the_others(fresh):
    texts = sorted((fresh / "download" / "results4").glob("part-*"))
    texts[0].write_bytes(b"\n")
    texts[1].write_bytes(texts[1].read_bytes().replace(b"\n", b"\r\n"))
    lines = texts[2].read_bytes().split(b"\n")
    texts[2].write_bytes(b"\n".join(line for line in lines if line))
    prepare.main(prepare_options(fresh, "--packed-data", "--shards", "2"))
    assert not verify.failures(verify.verify(fresh, jobs=1))


def test_text_files_that_were_swapped_are_made_again(
    fresh, downloaded, tmp_path, monkeypatch
):
    """The names decide the order, so that finished instances of a swapped file are not taken for
    its own.
    """
    texts = sorted((fresh / "download" / "results4").glob("part-*"))
    with monkeypatch.context() as patched:
        patched.setattr(prepare.steps, "make_evaluation_set", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare.main(prepare_options(fresh, "--packed-data", "--shards", "4"))
    texts[0].rename(tmp_path / "x")
    texts[1].rename(texts[0])
    (tmp_path / "x").rename(texts[1])
    other = tmp_path / "other"
    shutil.copytree(fresh / "download", other / "download")
    for folder in (fresh, other):
        prepare.main(prepare_options(folder, "--packed-data", "--shards", "4"))
    assert prepared_digests(fresh) == prepared_digests(other)
    shutil.copytree(downloaded, tmp_path / "straight")
    straight = prepare_options(tmp_path / "straight", "--packed-data", "--shards", "4")
    prepare.main(straight)
    same = multiset_digest(all_records(fresh / "packed_data"))
    assert same == multiset_digest(all_records(tmp_path / "straight" / "packed_data"))


@pytest.mark.slow
def test_a_line_of_100_mb_takes_less_than_3_gb(tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nsat\n"
    )
    with open(tmp_path / "text", "w") as file:
        for _ in range(100):
            file.write("the cat sat café " * 58_824)
        file.write("\n\nthe cat\nsat\n")
    line = [sys.executable, "-m", "input_preprocessing", "instances", "--input-file", tmp_path / "text", "--vocab-file",
            tmp_path / "vocab.txt", "--output-file", tmp_path / "out.hdf5", "--dupe-factor", "2"]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    subprocess.run(list(map(str, line)), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after < max(3_000_000, before + 1)
    records, _ = open_records(tmp_path / "out.hdf5")
    assert records.sequence_lengths.max() == 512
