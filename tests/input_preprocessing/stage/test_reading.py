"""Text in another encoding is reported or refused; nothing is dropped silently."""

import hashlib
import os
import threading

import pytest

from input_preprocessing.stage import reading
from input_preprocessing.stage.reading import open_text, read_text

from ...refused import refused

GOOD = ("The cat – an old one – sat.\n" * 200).encode()


@pytest.mark.parametrize(("data", "expected"), [
    (GOOD, 0),
    ("𝒳 ü 中\n".encode(), 0),
    (GOOD + b"\xfc", 1),
    (b"\xe4\xf6 \xff" + GOOD[:-1], 3),
    (GOOD[:20] + "é".encode()[:1], 2 if GOOD[:20].endswith(b"\xe2") else 1),
    (b"a\0b\0", 0),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_bytes_of_no_text_are_told(
    tmp_path, monkeypatch, capsys, data, expected, chunk
):
    monkeypatch.setattr(reading, "MOST_UNDECODABLE", 1.0)
    monkeypatch.setattr(reading, "CHUNK", chunk)
    (tmp_path / "text").write_bytes(data)
    file, md5 = open_text(tmp_path / "text", "--input")
    told = capsys.readouterr().err
    counted = f": {expected} of {len(data):,} bytes are not UTF-8"
    assert (counted in told) is bool(expected)
    assert (file.read(), md5) == (data, hashlib.md5(data).hexdigest())
    assert read_text(tmp_path / "text", "--input") == (data, md5)
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(("text", "note"), [
    (GOOD, ""),
    (GOOD + b"\xfc\xfd\n", "2 of {size:,} bytes are not UTF-8 and are dropped"),
    (GOOD + b"\0", "1 of {size:,} bytes are NUL and are dropped"),
    ("The cat.\n".encode("utf-16-be"), "9 of {size:,} bytes are NUL and are dropped; is it UTF-16?"),
])  # fmt: skip
def test_a_few_wrong_bytes_are_told_and_the_rest_read(tmp_path, capsys, text, note):
    path = tmp_path / "text"
    path.write_bytes(text)
    assert read_text(path, "--input")[0] == text
    told = f"warning: {path}: {note.format(size=len(text))}\n" if note else ""
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(("data", "message"), [
    (b"The cat sat.\n" * 70 + b"\xfc" * 2, "2 of 912 bytes are not UTF-8; too few to tell"),
    ("Größe über alles. ".encode("l1") * 9, "27 of 162 bytes are not UTF-8; it may be .*'Größe'.* iconv -f CP125"),
    ("Привет, это русский текст. ".encode("koi8_r") * 9, "it may be KOI8-R, if 'Привет,' is one"),
    ("The cat sat.\n".encode("utf-16"), "not text but UTF-16"),
    ("Größe\n".encode("utf-16-be"), "2 of 12 bytes are not UTF-8"),
    (bytes(range(256)) * 4, "not UTF-8; it is in no encoding"),
])  # fmt: skip
def test_text_of_another_encoding_is_refused(tmp_path, data, message):
    (tmp_path / "text").write_bytes(data)
    with refused(message):
        read_text(tmp_path / "text", "--input")


def test_a_pipe_is_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(GOOD,))
    writer.start()
    assert read_text(tmp_path / "pipe", "--input")[0] == GOOD
    writer.join()
