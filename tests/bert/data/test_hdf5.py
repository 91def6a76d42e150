"""A damaged HDF5 file is named, whatever the library does as it reads it, and the next one is
read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

from bert.data import hdf5
from bert.data.format import open_records, verify_records, write_records
from bert.data.records import DataError

from ...waiting import running, wait_until
from .samples import METADATA, assert_equal, make_records

# Bits of the file below (byte, bit) that crash HDF5 1.14 or keep it in an endless loop; other
# versions may refuse them.
CRASH, LOOP = (5481, 2), (6409, 0)
MORE = [(5761, 3), (5841, 1), (1993, 3), (6360, 4)]


@pytest.mark.parametrize(
    ("at", "bit"),
    [CRASH, LOOP, *(pytest.param(*place, marks=pytest.mark.slow) for place in MORE)],
)
def test_a_flipped_bit_in_a_header_costs_no_more_than_its_file(
    tmp_path: Path, at: int, bit: int
) -> None:
    records = make_records(9)
    for name in ("damaged.hdf5", "sound.hdf5"):
        write_records(tmp_path / name, records, METADATA)
    data = bytearray((tmp_path / "damaged.hdf5").read_bytes())
    data[at] ^= 1 << bit
    (tmp_path / "damaged.hdf5").write_bytes(data)
    with pytest.raises(DataError, match=r"damaged\.hdf5") as caught:
        verify_records(tmp_path / "damaged.hdf5")
    assert "\n" not in str(caught.value)
    assert_equal(verify_records(tmp_path / "sound.hdf5")[0], records)


def reader() -> subprocess.Popen[bytes]:
    process = hdf5._helper.process
    assert process
    return process


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGSEGV, "ended with SIGSEGV"), (signal.SIGXCPU, "found no end of it")],
)
def test_a_reader_that_dies_names_the_file_and_is_replaced(
    tmp_path: Path, number: signal.Signals, how: str
) -> None:
    write_records(tmp_path / "a.hdf5", make_records(3), METADATA)
    os.mkfifo(tmp_path / "waits.hdf5")  # nobody writes to it: the reader waits
    open_records(tmp_path / "a.hdf5")
    first = reader()
    threading.Timer(0.2, first.send_signal, [number]).start()
    with pytest.raises(DataError, match=rf"waits\.hdf5 .*the reader {how}"):
        hdf5.open_hdf5(tmp_path / "waits.hdf5")
    assert open_records(tmp_path / "a.hdf5")[0].num_sequences == 3
    assert reader().pid != first.pid


def test_one_reader_serves_many_files_and_threads(tmp_path: Path) -> None:
    for number in range(8):
        write_records(tmp_path / f"{number}.hdf5", make_records(number + 1), METADATA)
    open_records(tmp_path / "0.hdf5")
    pid, found = reader().pid, {}

    def count(number: int) -> None:
        for _ in range(20):
            found[number] = open_records(tmp_path / f"{number}.hdf5")[0].num_sequences

    threads = [threading.Thread(target=count, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number + 1 for number in range(8)}
    assert reader().pid == pid


def test_an_interrupted_question_is_not_answered_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (3, 5):
        write_records(tmp_path / f"{number}.hdf5", make_records(number), METADATA)

    def interrupt(file: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hdf5.pickle, "load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_records(tmp_path / "3.hdf5")
    assert open_records(tmp_path / "5.hdf5")[0].num_sequences == 5


def test_a_forked_process_has_its_own_reader_and_none_is_left_behind(
    tmp_path: Path,
) -> None:
    write_records(tmp_path / "a.hdf5", make_records(3), METADATA)
    open_records(tmp_path / "a.hdf5")
    pid = reader().pid
    if (child := os.fork()) == 0:
        open_records(tmp_path / "a.hdf5")
        (tmp_path / "pid").write_text(str(reader().pid))
        os._exit(0)  # without exit handlers, like kill -9
    assert os.waitpid(child, 0)[1] == 0
    own = int((tmp_path / "pid").read_text())
    assert own != pid
    wait_until(lambda: not running(own))
    assert open_records(tmp_path / "a.hdf5")[0].num_sequences == 3
    assert reader().pid == pid


def test_values_of_variable_length_come_flat_with_their_lengths(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", (3,), h5py.vlen_dtype(np.int16))
        file["x"][0], file["x"][2] = [1, 2], [3]
        file["y"] = np.arange(6).reshape(2, 3)
        file.create_group("z")
    found = hdf5.open_hdf5(tmp_path / "a")
    kinds = {name: each.is_ragged for name, each in found.datasets.items()}
    assert kinds == {"x": True, "y": False}
    values, lengths = found.read("x")
    assert (values.tolist(), lengths.tolist()) == ([1, 2, 3], [2, 0, 1])
    assert found.read("y")[0].shape == (2, 3)


def test_the_reader_is_found_from_any_folder(tmp_path: Path) -> None:
    write_records(tmp_path / "a.hdf5", make_records(3), METADATA)
    code = f"import sys; sys.path[:] = {sys.path!r}\n"
    code += "from bert.data.format import open_records\n"
    code += "print(open_records('a.hdf5')[0].num_sequences)"
    line = [sys.executable, "-W", "error", "-c", code]
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(line, **options)
    assert (done.stdout, done.stderr) == ("3\n", "")
