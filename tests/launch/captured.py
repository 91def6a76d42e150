"""A command's exit status, what it prints, and the last line of it, which by contract has the result."""

from __future__ import annotations

import subprocess
from typing import Any


class Done(subprocess.CompletedProcess[str]):
    @property
    def last_line(self) -> str:
        return self.stderr.strip().splitlines()[-1]

    def asked(self, status: int | None) -> Done:
        """Fails if another exit status was asked for."""
        assert status in (None, self.returncode), self.stdout + self.stderr
        return self


def captured(command: Any, status: int | None = None, **how: Any) -> Done:
    """Runs it, to that exit status; None: to any."""
    how = {"check": False, "timeout": 240} | how
    done = subprocess.run(command, capture_output=True, text=True, **how)
    return Done(command, done.returncode, done.stdout, done.stderr).asked(status)
