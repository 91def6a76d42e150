"""Pauses processes under test at a chosen moment, so that a test acts on them neither early nor
late.

A process stops itself (SIGSTOP) as soon as a file of a given name exists, checked whenever it
opens, renames or lists a file. It can then be killed, or continued by SIGCONT.
"""

import glob
import os
import signal
import sys
import threading
from pathlib import Path


def stand_still(pattern: str, once: str = "") -> None:
    """Stops this process when a file matches ``pattern``; with ``once`` (a file) only the first that would."""
    looking, done = threading.local(), []

    def look(event: str, _: object) -> None:
        looks = event == "open" or event.startswith("os.")
        if done or getattr(looking, "now", False) or not looks:
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
    """A folder for PYTHONPATH with which every Python process does so, or only the first to get there."""
    folder.mkdir()
    own = Path(__file__).read_text(encoding="utf-8")
    (folder / "sitecustomize.py").write_text(
        f"{own}\n\nstand_still({pattern!r}, {str(folder / 'stood')!r})\n"
    )
    return folder
