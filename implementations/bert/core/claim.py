"""One live writer of a folder: a file that it creates, beats in while it lives, and removes at its
end.

A claim is never left to a clock of another machine. On the machine of its maker the process is
looked up; from elsewhere the beats are watched, which works on any file system that nodes share. A
claim whose maker is dead does not block: it is taken over.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.env import ConfigError
from common.files import text_of
from common.process import say

BEAT_SECONDS = 5.0
SILENT_BEATS = 4  # without a beat for so long the writer is dead
# An earlier attempt of the job, on a node that Slurm has lost, ends when it misses the others; the
# other ranks of this one wait longer than this for rank 0 (DIST_TIMEOUT).
PATIENCE_SECONDS = 500.0
# The file begins with the beat as so many digits, then the maker as JSON: of fixed width, so that a
# beat overwrites the last one and nothing else.
_DIGITS = 20


_held: list[Claim] = []  # by this process


def check_held() -> None:
    """Raises TakenOverError if a claim of this process was taken over. Before a checkpoint is
    written.
    """
    for claim in _held:
        claim.check()


class OccupiedError(ConfigError):
    """Another process writes to the folder. Nothing may be written to it, not even this error."""

    def __init__(self, reason: str, folder: Path) -> None:
        super().__init__(reason)
        self.folder = folder


class TakenOverError(RuntimeError):
    """Another process took this one for dead, and writes to the folder now."""

    exit_status = 1


class Claim:
    """Held while entered. Raises OccupiedError, naming host, job and process, if another holds
    it.
    """

    def __init__(self, path: Path, setting: str, job: str = "") -> None:
        """path: the claim's file; setting: NAME=folder, for messages; job: Slurm's number, if
        any.
        """
        self.path, self.setting = path, setting
        self.maker = {
            "host": platform.node(),
            "job": job,
            "token": uuid.uuid4().hex,
            **_process(),
        }
        self._ended = threading.Event()
        self._file = -1
        self._until = time.monotonic() + PATIENCE_SECONDS

    def __enter__(self) -> Claim:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._file < 0:
            # O_EXCL is the lock: of several newcomers only one creates the file.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            try:
                self._file = os.open(self.path, flags, 0o644)
            except FileExistsError:
                self._take_over()
        # The maker before the first beat: who reads in between finds none, and watches.
        os.pwrite(self._file, json.dumps(self.maker).encode(), _DIGITS)
        self._beat(0)
        # A daemon: a process that ends without leaving must fall silent, not live on.
        threading.Thread(target=self._beats, name="claim", daemon=True).start()
        _held.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        _held.remove(self)
        # Another writer's claim may stand there by now, and is not ours to remove.
        if self.is_held():
            self._remove(self.maker)
        os.close(self._file)

    def is_held(self) -> bool:
        """Whether the file is still this process's: another may have taken it for dead."""
        return _maker(_read(self.path)).get("token") == self.maker["token"]

    def check(self) -> None:
        """Raises TakenOverError if another writer has taken over, as after this machine stood
        still.
        """
        if not self.is_held():
            raise TakenOverError(
                f"{self.setting} was taken over by {_who(_maker(_read(self.path)))}, "
                "as this process gave no sign of life: it ends here"
            )

    def _beat(self, number: int) -> None:
        # Into the open file, not by its name: that may be another writer's by now.
        os.pwrite(self._file, f"{number:0{_DIGITS}}".encode(), 0)

    def _beats(self) -> None:
        number = 0
        while not self._ended.wait(BEAT_SECONDS):
            number += 1
            with suppress(OSError):  # a file system that is away for a moment
                self._beat(number)

    def _take_over(self) -> None:
        """Removes a dead maker's claim. Raises OccupiedError for a live one, of this job at last."""
        content = _read(self.path)
        if _lives(self.path, content):
            job = _maker(content).get("job")
            if job and job == self.maker["job"] and time.monotonic() < self._until:
                time.sleep(BEAT_SECONDS)
                return
            raise OccupiedError(
                f"{self.setting}: {_who(_maker(content))} writes to it: wait for it, end it, or give another",
                self.path.parent,
            )
        self._remove(_maker(content))

    def _remove(self, maker: dict[str, Any]) -> None:
        """Removes the claim of this maker, who was read there; another's stays."""
        removed = self.path.with_name(f"{self.path.name}.{self.maker['token']}")
        with suppress(FileNotFoundError):  # another newcomer was faster
            # Moved aside first, under a name of our own: since it was read, a newcomer may have
            # replaced it, and an unlink would destroy that one's claim unseen.
            os.rename(self.path, removed)
            if _maker(_read(removed)) != maker:  # and has claimed it: give that back
                with suppress(OSError):
                    # A link, as it fails where a third has claimed the folder meanwhile; a rename
                    # would replace it.
                    os.link(removed, self.path)
            removed.unlink()


def _process() -> dict[str, Any]:
    """What identifies this process on its machine: pid and start, boot and namespace of pids."""
    # A pid means something within one namespace of one boot only: containers of a machine have
    # their own. Elsewhere, also after a restart of the machine, the beats must tell.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    pid = os.getpid()
    return {
        "pid": pid,
        "start": _start(pid),
        "pids": f"{boot} {os.readlink('/proc/self/ns/pid')}",
    }


def _start(pid: int) -> str:
    """Start of a process in ticks since boot; empty if there is none, or it is dead but not waited
    for.
    """
    # The state (zombie, dead) and field 22, the start: pid and name are cut off.
    fields = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return "" if not fields or fields[0] in "ZX" else fields[19]


def _read(path: Path) -> bytes:
    """The claim's content, empty if there is none. Opened anew each time: NFS then asks the
    server.
    """
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _maker(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        maker = json.loads(content[_DIGITS:])
        return maker if isinstance(maker, dict) else {}
    return {}


def _who(maker: dict[str, Any]) -> str:
    job = f", job {maker['job']}" if maker.get("job") else ""
    return f"process {maker.get('pid', '?')} on {maker.get('host', 'an unknown host')}{job}"


def _lives(path: Path, content: bytes) -> bool:
    """Whether the maker of a claim lives: by its process if that can be seen here, else by its
    beats.
    """
    maker = _maker(content)
    if maker.get("pids") == _process()["pids"]:
        # A pid is given again; together with its start it is one process.
        return bool(_start(maker["pid"])) and _start(maker["pid"]) == maker["start"]
    seconds = BEAT_SECONDS * SILENT_BEATS
    waits = f"bert: {path.parent} is claimed by {_who(maker)}: is it alive? up to {seconds:.0f} s"
    say(waits)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 10)
        if (now := _read(path)) != content:
            # Changed: a beat, or a successor. Empty: the maker has left, and does not live.
            return bool(now)
    return False
