"""Every stage killed (kill -9) before each of its changes to the disk, and within writes, ends in
the same files; full disks and read-only folders are told in a line, and nothing is lost.

The stage runs in a forked process. An audit hook counts what Python is about to do to the disk and
kills the process at the chosen one; a limit on the size of files kills it in the middle of a write,
HDF5's own writes included.
"""

import functools
import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert.data import hdf5
from bert.data.records import DataError
from input_preprocessing.checkpoints.convert import convert
from input_preprocessing.dataset import download, finetuning, prepare
from input_preprocessing.instances import sampling as instances
from input_preprocessing.instances.options import SamplingConfig
from input_preprocessing.records import bins, evalset, pack, shuffle, tfrecord_nvidia
from input_preprocessing.stage.manifest import STAGE_FILE
from input_preprocessing.text import vocabulary

from .. import disks, forked
from ..bert.data.samples import make_records, source_of
from ..refused import refused
from .conftest import contents, prepare_options
from .dataset.test_download import make_archive, zip_of

CHECKPOINT = Path(__file__).parent / "checkpoints/tf1_checkpoint/model.ckpt-28252"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")  # fmt: skip
ENDED, FAILED = -1, -2
Run = Callable[[Path], object]
Stage = tuple[Run, Run]


def run_and_kill(stage: Run, folder: Path, at: int, size: int | None = None) -> int:
    """Runs the stage on a folder in a forked process, killed before its `at`-th change of the
    folder (0: never).

    With `size`, the process is killed at the first write beyond so many bytes of a file. Returns
    the number of changes, or ENDED if the process was not killed, or FAILED.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            changes = event in CHANGES
            if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
                # A finished partial file is opened for reading to be synced; the folder after it
                # was renamed.
                is_partial = os.fsdecode(arguments[0]).endswith(".partial")
                synced = is_partial or arguments[1] is None
                changes = bool(arguments[2] & WRITES) or synced
            if changes and os.fsdecode(arguments[0]).startswith(str(folder)):
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if size is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            sys.addaudithook(hook)
            stage(folder)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ)
        return at
    return ENDED if os.WEXITSTATUS(status) == 0 else FAILED


def make_source(folder: Path) -> None:
    """Record files of 5 to 64 tokens."""
    source_of(folder / "source", *(make_records(150, seed) for seed in range(3)))


def make_text(folder: Path) -> None:
    words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nsat\n"
    (folder / "vocab.txt").write_text(words)
    (folder / "text").write_text("the cat sat\nthe cat the\n\ncat cat sat the\n" * 30)


def make_mirror(folder: Path) -> None:
    (mirror := folder / "mirror").mkdir()
    names = "part-00000-of-00002", "part-00001-of-00002", "eval.txt"
    texts = {name: name.encode().ljust(5000) for name in names}
    make_archive(mirror / "results_text.tar.gz", texts)
    (mirror / "vocab.txt").write_bytes(b"x" * 9000)


def make_glue(folder: Path) -> None:
    (mirror := folder / "mirror").mkdir()
    # Small beside its tables, of which the last is the larger one: a write of 7,000 bytes ends
    # within that.
    rows = [f"gj04\t1\t\tThe cat sat {i}.\n" for i in range(300)]
    packed = zip_of("CoLA", train="".join(rows[:200]), dev="".join(rows))
    (mirror / "CoLA.zip").write_bytes(packed)
    pairs = (f"1\t{i}\t{i + 1}\tOne cat sat {i}.\tA cat sat.\r\n" for i in range(300))
    table = "".join(["Quality\t#1 ID\t#2 ID\tA\tB\r\n", *pairs])
    (mirror / "msr_paraphrase_train.txt").write_text(table)
    ids = "".join(f"{i}\t{i + 1}\n" for i in range(0, 300, 4))
    (mirror / "mrpc_dev_ids.tsv").write_text(ids)


@pytest.fixture(autouse=True)
def small_download(monkeypatch):
    """The public files as `make_mirror` has them."""
    digest = f"md5 {hashlib.md5(b'x' * 9000).hexdigest()}"
    files = (download.PublicFile("vocab.txt", digest, 9000, "", ""),
             download.PublicFile("results_text.tar.gz", "", 0, "", ""))  # fmt: skip
    for name, value in (("FILES", files), ("NUM_PARTS", 2), ("TEXT_MD5", {})):
        monkeypatch.setattr(download, name, value)
    files_of = finetuning.SOURCES.items()
    sources = {
        task: [file._replace(digest="") for file in files] for task, files in files_of
    }
    monkeypatch.setattr(finetuning, "SOURCES", sources)


def run_instances(folder: Path) -> None:
    words, out = vocabulary.load(folder / "vocab.txt"), folder / "out.hdf5"
    instances.write_instances(folder / "text", out, words, SamplingConfig())


def run_import(folder: Path) -> None:
    for source, target in tfrecord_nvidia.plan_files(folder / "source", folder / "out"):
        target.parent.mkdir(exist_ok=True)
        tfrecord_nvidia.import_file(None, (source, target))


def run_export(kind: str) -> Run:
    given = {"format": kind, "unpack": False, "max_predictions_per_seq": 12, "jobs": 1}
    export = tfrecord_nvidia.export_folder
    return lambda folder: export(folder / "source", folder / "out", **given)


def run_finetuning(task: str) -> Run:
    return lambda folder: finetuning.fetch(task, folder / "out", str(folder / "mirror"))


def dealt(stage: Callable[..., object], **options: Any) -> Run:
    return lambda folder: stage(
        folder / "source", folder / "out", shards=3, seed=1, jobs=1, **options
    )


STAGES: dict[str, Stage] = {
    "download": (make_mirror, lambda d: download.download(d / "download", str(d / "mirror"))),
    "finetuning of an archive": (make_glue, run_finetuning("CoLA")),
    "finetuning of MRPC": (make_glue, run_finetuning("MRPC")),
    "instances": (make_text, run_instances),
    "evalset": (make_source, lambda d: evalset.pick_samples(d / "source" / "part_0.hdf5", d / "out.hdf5", 40)),
    "shuffle": (make_source, dealt(shuffle.shuffle_records)),
    "pack": (make_source, dealt(pack.pack_records, max_sequences_per_row=3)),
    "bins": (make_source, dealt(bins.bin_records)),
    "import_records": (make_source, run_import),
    "export_records": (make_source, run_export("tfrecord")),
    "export_records to NVIDIA's layout": (make_source, run_export("nvidia")),
    "convert_checkpoint": (lambda d: None, lambda d: convert(CHECKPOINT, d / "out.safetensors", "huggingface")),
    "convert_checkpoint to .pt": (lambda d: None, lambda d: convert(CHECKPOINT, d / "out.pt", "mlperf")),
}  # fmt: skip


def check(make: Run, run: Run, tmp_path: Path, step: int) -> int:
    """Kills the stage at every `step`-th change and in writes of several sizes; the number of kills."""
    start, whole, folder = tmp_path / "start", tmp_path / "whole", tmp_path / "folder"
    start.mkdir()
    make(start)
    shutil.copytree(start, whole)
    # Here, so that the forked processes find all modules loaded and all functions compiled.
    run(whole)
    expected = contents(whole)
    assert len(expected) > len(contents(start))
    kills = 0
    for at in range(1, 1000, step):
        shutil.copytree(start, folder)
        ended = run_and_kill(run, folder, at)
        assert ended != FAILED
        if ended == ENDED:
            break
        kills += 1
        assert run_and_kill(run, folder, 0) == ENDED, f"killed at change {at}"
        assert contents(folder) == expected, f"killed at change {at}"
        shutil.rmtree(folder)
    for size in (1, 2500, 7000) if step == 1 else (2500, 7000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        kills += run_and_kill(run, folder, 0, size) != ENDED
        assert run_and_kill(run, folder, 0) == ENDED, f"killed at byte {size}"
        assert contents(folder) == expected, f"killed at byte {size}"
    return kills


# In their own code much like another one; all are killed at any change among the slow tests.
ALIKE = {
    "finetuning of MRPC", "shuffle", "bins", "export_records to NVIDIA's layout",
    "convert_checkpoint to .pt",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in STAGES if name not in ALIKE])
def test_a_stage_killed_at_some_changes_of_the_disk_ends_the_same(tmp_path, name):
    few_changes = name.startswith("finetuning")
    assert check(*STAGES[name], tmp_path, step=1 if few_changes else 23) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_killed_at_any_change_of_the_disk_ends_the_same(tmp_path, name):
    assert check(*STAGES[name], tmp_path, step=1) >= 4


def whole_preparation(downloaded: Path, *options: str) -> Stage:
    return (
        lambda folder: shutil.copytree(downloaded, folder, dirs_exist_ok=True),
        lambda folder: prepare.main(prepare_options(folder, "--shards", "4", *options)),
    )


def test_a_preparation_killed_now_and_then_ends_the_same(downloaded, tmp_path):
    stage = whole_preparation(downloaded, "--packed-data")
    assert check(*stage, tmp_path, step=30) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "--packed-data", "--binned-data --shards 1", "--max-sequences-per-row=3",
])  # fmt: skip
def test_a_preparation_killed_at_any_change_of_the_disk_ends_the_same(
    downloaded, tmp_path, two_bins, line
):
    stage = whole_preparation(downloaded, *line.split())
    assert check(*stage, tmp_path, step=1) >= 30


LIMIT = 1500  # bytes a file may have; every stage writes more


def in_a_process(limit: Callable[[], object], stage: Run, folder: Path) -> str:
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
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
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
    (whole := tmp_path / "whole").mkdir()
    make(whole)
    run(whole)
    assert contents(small_disk) == contents(whole)


def test_a_preparation_stops_on_a_small_disk_before_it_starts(small_disk, downloaded):
    line = ["--outputdir", small_disk / "data", "--skip-download", "--packed-data"]
    line += ["--downloaddir", downloaded / "download"]
    done = forked.run("input_preprocessing", "prepare", *line)
    assert done.returncode == 1
    told, said = done.stderr.splitlines()
    assert "of disk (409.6 kB free)" in told
    assert "make room or choose another --outputdir" in said
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
        shutil.copytree(CHECKPOINT.parent, public_folder / "tf1")
        copied = public_folder / "tf1" / CHECKPOINT.name
        run = lambda d: convert(copied, d / "out.safetensors", "huggingface")  # noqa: E731
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
