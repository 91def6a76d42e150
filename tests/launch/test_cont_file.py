"""CONT_FILE: a registry's image is imported once, completely, and every job uses the same file."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from ..waiting import wait_until

IMAGE = "nvcr.io#nvidia/pytorch:25.04-py3"
# Writes the image in two pieces, and waits in between until the file HELD is removed; with CUT it
# ends there.
ENROOT = """while [[ $1 != docker://* ]]; do if [[ $1 == --output ]]; then file=$2; fi; shift; done
printf 'hsqs%s' "$1" >"$file"
[[ ! ${CUT:-} ]] || { echo "[ERROR] curl: (6) Could not resolve host: nvcr.io" >&2; exit 1; }
while [[ -e ${HELD:-} ]]; do sleep 0.02; done; printf end >>"$file" """


@pytest.fixture
def enroot(checkout):
    checkout.stand_in("enroot", ENROOT)
    checkout.stand_in("sync", "")
    return checkout


def start(enroot, image: str = IMAGE, **env: str) -> subprocess.Popen[str]:
    command = ["./launch/container/import_image.sh", image, str(file_of(enroot))]
    return subprocess.Popen(
        command,
        cwd=enroot.root,
        env=enroot.env | env,
        stderr=subprocess.PIPE,
        text=True,
    )


def file_of(enroot) -> Path:
    return enroot.root.parent / "pytorch.sqsh"


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors.strip()


def test_an_image_is_imported_once_with_its_checksum(enroot):
    for _ in range(2):
        assert finish(start(enroot)) == (0, "")
    assert len(enroot.calls("enroot")) == 1
    assert file_of(enroot).read_text() == f"hsqsdocker://{IMAGE}end"
    digest = hashlib.sha256(file_of(enroot).read_bytes()).hexdigest()
    assert Path(f"{file_of(enroot)}.sha256").read_text() == f"{digest} {IMAGE}\n"


def test_concurrent_jobs_wait_for_the_one_that_imports(enroot):
    held = enroot.root.parent / "held"
    held.touch()
    first = start(enroot, HELD=str(held))
    wait_until(lambda: enroot.calls("enroot"))
    second = start(enroot)
    assert (
        second.stderr.readline()
        == f"CONT_FILE={file_of(enroot)}: another job is importing it; waiting\n"
    )
    held.unlink()
    assert finish(second) == (0, "")
    assert finish(first) == (0, "")
    assert len(enroot.calls("enroot")) == 1


def test_an_import_that_fails_leaves_no_file_and_says_why(enroot):
    status, errors = finish(start(enroot, CUT="1"))
    assert status != 0
    assert errors.endswith("curl: (6) Could not resolve host: nvcr.io")
    assert not file_of(enroot).exists()
    assert finish(start(enroot)) == (0, ""), "the next job imports it"


def test_a_file_that_changed_is_imported_again(enroot):
    finish(start(enroot))
    file_of(enroot).write_text("hsqs cut short")
    assert finish(start(enroot)) == (
        0,
        f"CONT_FILE={file_of(enroot)}: its checksum is wrong: importing it again",
    )
    assert file_of(enroot).read_text().endswith("end")


def test_a_file_of_another_image_or_origin_is_refused(enroot):
    finish(start(enroot))
    status, errors = finish(start(enroot, "other:1"))
    assert status == 1
    assert f"holds {IMAGE}, not CONT=other:1" in errors
    Path(f"{file_of(enroot)}.sha256").unlink()
    assert "was not imported by a run" in finish(start(enroot))[1]
