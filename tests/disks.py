"""File systems that are really full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of so many bytes at ``folder``, which is made; skips the test where none can be mounted."""
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"a file system of its own needs CAP_SYS_ADMIN: {done.stderr.strip()}")  # fmt: skip
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=240)


def enlarge(folder: Path, num_bytes: int) -> None:
    """Gives a small disk more room."""
    command = ["mount", "-o", f"remount,size={num_bytes}", str(folder)]
    subprocess.run(command, check=True, timeout=240)
