"""The archive of a package is readable by its recipient alone, and no passphrase stands on a command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from review.logs.output import ReviewError
from review.submission.package import Encryption

CONTENT = b"ten logs and the code that ran\n"


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "EXAMPLE.tar.gz"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def gpg(tmp_path_factory, monkeypatch):
    """gpg with a key ring of its own, and its agent ended afterwards."""
    if shutil.which("gpg") is None or shutil.which("gpgconf") is None:
        pytest.skip("no gpg on this machine")
    home = tmp_path_factory.mktemp("g", numbered=True)
    home.chmod(0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))

    def run(*arguments):
        command = ["gpg", "--batch", "--no-tty", "--pinentry-mode", "loopback", *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=240).stdout

    yield run
    subprocess.run(["gpgconf", "--kill", "all"], check=False, timeout=240, capture_output=True)


def test_gpg_encrypts_for_a_key_and_by_a_passphrase(gpg, archive, tmp_path):
    gpg("--passphrase", "", "--quick-gen-key", "chair@example.com", "future-default", "default", "never")
    for_key = Encryption(recipients=("chair@example.com",))
    for_key.check()
    encrypted = for_key.encrypt(archive)
    assert encrypted.name == "EXAMPLE.tar.gz.gpg"
    assert CONTENT not in encrypted.read_bytes()
    assert gpg("--decrypt", str(encrypted)) == CONTENT

    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    by_passphrase = Encryption(passphrase_file=secret)
    by_passphrase.check()
    encrypted = by_passphrase.encrypt(archive)
    assert gpg("--passphrase-file", str(secret), "--decrypt", str(encrypted)) == CONTENT

    with pytest.raises(ReviewError, match="gpg knows no such key"):
        Encryption(recipients=("nobody@example.com",)).check()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """age and gpg that write down how they are called, and copy their input."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("age", "gpg"):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >>"{tmp_path}/calls"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda: (tmp_path / "calls").read_text().splitlines()


@pytest.mark.skipif(shutil.which("age-keygen") is None, reason="age is not installed: apt-get install age")
def test_the_recipient_decrypts_what_age_encrypted_and_nobody_else(archive, tmp_path):
    keys = []
    for name in ("mine", "others"):
        made = run("age-keygen", "-o", str(tmp_path / name))
        assert made.returncode == 0
        keys.append(re.search(r"public key: (age1\w+)", (tmp_path / name).read_text())[1])
    encryption = Encryption(recipients=(keys[0],))
    encryption.check()
    encrypted = encryption.encrypt(archive)
    assert CONTENT not in encrypted.read_bytes()
    assert run("age", "--decrypt", "-i", str(tmp_path / "mine"), str(encrypted)).stdout == CONTENT
    assert run("age", "--decrypt", "-i", str(tmp_path / "others"), str(encrypted)).returncode != 0
    with pytest.raises(ReviewError, match="age cannot encrypt the archive"):
        Encryption(recipients=("age1notakey",)).encrypt(archive)


def run(*command):
    """A command that ends by itself."""
    return subprocess.run(command, capture_output=True, timeout=240, check=False, stdin=subprocess.DEVNULL)


def test_keys_of_age_are_given_to_age(commands, archive):
    encryption = Encryption(recipients=("age1abc", "ssh-ed25519 AAAA me"))
    encryption.check()
    assert encryption.encrypt(archive).name == "EXAMPLE.tar.gz.age"
    assert commands() == [f"age --encrypt -r age1abc -r ssh-ed25519 AAAA me -o {archive}.age {archive}"]


def test_a_passphrase_is_on_no_command_line(commands, archive, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    Encryption(passphrase_file=secret).encrypt(archive)
    assert "correct horse" not in "".join(commands())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recipients": ("age1abc", "me@example.com")}, "keys of age and of gpg in one archive"),
        ({"recipients": ("age1abc",), "passphrase_file": "secret"}, "exclude each other"),
        ({"passphrase_file": "nowhere"}, "cannot be read"),
        ({"passphrase_file": "empty"}, "its first line is empty"),
    ],
)
def test_what_cannot_be_encrypted_for_is_said_before(fields, says, commands, tmp_path):
    (tmp_path / "secret").write_text("x\n")
    (tmp_path / "empty").write_text("\n")
    if "passphrase_file" in fields:
        fields = {**fields, "passphrase_file": tmp_path / fields["passphrase_file"]}
    with pytest.raises(ReviewError, match=says):
        Encryption(**fields).check()


def test_a_tool_that_is_missing_is_said_before(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReviewError, match="age is not installed"):
        Encryption(recipients=("age1abc",)).check()
