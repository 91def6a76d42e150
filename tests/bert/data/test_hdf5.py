"""A damaged HDF5 file is named, whatever the library does as it reads it, and the next one is read."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from bert.data import hdf5
from bert.data.format import open_records, verify_records, write_records
from bert.data.records import DataError

from ...waiting import running, wait_until
from .samples import METADATA, assert_equal, make_records

# Bits of the file below (byte, bit) that crash HDF5 1.14 or keep it in an endless loop; other
# versions may refuse them.
CRASH, LOOP = (5481, 2), (6409, 0)
MORE = (5761, 3), (5841, 1), (1993, 3)


@pytest.mark.parametrize(("at", "bit"), [CRASH, LOOP, *MORE])
def test_a_flipped_bit_in_a_header_costs_no_more_than_its_file(tmp_path, at, bit):
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


def reader():
    assert hdf5._helper.process
    return hdf5._helper.process


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGSEGV, "ended with SIGSEGV"), (signal.SIGXCPU, "found no end of it")],
)
def test_a_reader_that_dies_names_the_file_and_is_replaced(tmp_path, number, how):
    write_records(tmp_path / "a.hdf5", make_records(3), METADATA)
    os.mkfifo(tmp_path / "waits.hdf5")  # nobody writes to it: the reader waits
    open_records(tmp_path / "a.hdf5")
    first = reader()
    threading.Timer(0.2, first.send_signal, [number]).start()
    with pytest.raises(DataError, match=rf"waits\.hdf5 .*the reader {how}"):
        hdf5.open_hdf5(tmp_path / "waits.hdf5")
    assert open_records(tmp_path / "a.hdf5")[0].num_sequences == 3
    assert reader().pid != first.pid


def test_one_reader_serves_many_files_and_threads(tmp_path):
    for number in range(8):
        write_records(tmp_path / f"{number}.hdf5", make_records(number + 1), METADATA)
    count = lambda number: open_records(tmp_path / f"{number}.hdf5")[0].num_sequences  # noqa: E731
    count(0)
    pid = reader().pid
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(count, [*range(8)] * 20)] == [*range(1, 9)] * 20
    assert reader().pid == pid


def test_an_interrupted_question_is_not_answered_to_the_next(tmp_path, monkeypatch):
    for number in (3, 5):
        write_records(tmp_path / f"{number}.hdf5", make_records(number), METADATA)

    with monkeypatch.context() as patch:
        patch.setattr(hdf5.pickle, "load", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            open_records(tmp_path / "3.hdf5")
    assert open_records(tmp_path / "5.hdf5")[0].num_sequences == 5


def test_a_forked_process_has_its_own_reader_and_none_is_left_behind(tmp_path):
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


def test_the_reader_is_found_from_any_folder(tmp_path):
    write_records(tmp_path / "a.hdf5", make_records(3), METADATA)
    code = f"import sys; sys.path[:] = {sys.path!r}\n"
    code += "from bert.data.format import open_records\n"
    code += "print(open_records('a.hdf5')[0].num_sequences)"
    line = [sys.executable, "-W", "error", "-c", code]
    said = subprocess.check_output(line, cwd=tmp_path, stderr=subprocess.STDOUT)
    assert said == b"3\n"
