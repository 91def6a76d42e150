"""Processes under test that stand still at a chosen moment: what a test does to them then comes neither early nor late.

A process stops itself (SIGSTOP) as soon as a file of a name is there, seen at the next file that it opens, renames or
lists. It can be killed so, or continued by SIGCONT.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import threading
from pathlib import Path


def stand_still(pattern: str, once: str = "") -> None:
    """Has this process stop when a file matches ``pattern``; with ``once``, a file, only the first that would."""
    looking, done = threading.local(), []

    def look(event: str, _: object) -> None:
        if done or getattr(looking, "now", False) or not (event == "open" or event.startswith("os.")):
            return
        looking.now = True
        if glob.glob(pattern):
            done.append(True)
            try:
                if once:
                    os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGSTOP)
        looking.now = False

    sys.addaudithook(look)


def site(folder: Path, pattern: str) -> Path:
    """A folder for PYTHONPATH with which every process of Python does so, and only the first to come so far."""
    folder.mkdir()
    own = Path(__file__).read_text(encoding="utf-8")
    (folder / "sitecustomize.py").write_text(f"{own}\n\nstand_still({pattern!r}, {str(folder / 'stood')!r})\n")
    return folder
