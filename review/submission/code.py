"""The code that a result ran: the commit that the run's environment.json names, out of its repository."""

from __future__ import annotations

import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ReviewError
from review.logs.tree import read_json, run
from review.verdict.submission_rules import SCRIPTS

_TIMEOUT = 120  # seconds for one git command


@dataclass(frozen=True)
class Code:
    """A commit of a repository, and the path of the system's config in it."""

    repository: Path
    commit: str
    config: str

    def read(self, path: str) -> str:
        """A file of the commit. Raises ReviewError."""
        return _git(self.repository, "show", f"{self.commit}:{path}").decode("utf-8", "replace")

    def has(self, path: str) -> bool:
        """Whether the commit has this file. Raises ReviewError."""
        return bool(_git(self.repository, "ls-tree", "--name-only", self.commit, "--", path).strip())

    def extract(self, folder: Path) -> None:
        """Writes the files of the commit, but those whose name starts with a dot: the official checker wants none.

        Raises ReviewError for a commit without the scripts that the rules ask for, and OSError.
        """
        data = _git(self.repository, "archive", "--format=tar", self.commit)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = [member for member in tar.getmembers() if not re.search(r"(^|/)\.", member.name)]
            missing = sorted(set(SCRIPTS) - {member.name for member in members})
            if missing:
                raise ReviewError(f"commit {self.commit} lacks {', '.join(missing)}, which a submission brings along")
            for member in members:
                member.mode = 0o755 if member.mode & 0o100 else 0o644  # whatever git's tar.umask
            safe: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}  # Debian 12's Python has none
            tar.extractall(folder, members, **safe)


def find_code(repository: Path, runs: Path, commit: str | None, config: str | None) -> Code:
    """The code of a run.

    Args: runs: its folder, with environment.json and config.json. commit, config: instead of what they say.
    Raises ReviewError where they do not say it, or the repository does not have it.
    """
    wanted = commit or _recorded_commit(repository, runs)
    try:
        full = _git(repository, "rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}").decode().strip()
    except ReviewError:
        what = "fetch it, or name another with --commit"
        raise ReviewError(f"{repository} has no commit {text(wanted)}: {what}") from None
    files = _git(repository, "ls-tree", "-r", "--name-only", "-z", full).decode("utf-8", "replace").split("\0")
    return Code(repository, full, _config(files, runs, config))


def _recorded_commit(repository: Path, runs: Path) -> str:
    commit = read_json(runs / "environment.json").get("git_commit")
    if not isinstance(commit, str) or not commit:
        raise ReviewError(f"{runs / 'environment.json'} names no commit that ran: name it with --commit")
    if commit.endswith("-dirty"):
        what = "commit it and run again, or name with --commit the one that holds it"
        raise ReviewError(f"the code that ran is {text(commit)}, in no commit: {what}")
    # As `git describe --always` writes it: the commit, behind the last tag where there is one, or a tag alone.
    described = re.fullmatch(r"(?:.+-\d+-g)?([0-9a-f]{7,64})", commit)
    if described:
        return described[1]
    if commit not in _git(repository, "tag", "--list").decode("utf-8", "replace").split("\n"):
        raise ReviewError(
            f"{runs / 'environment.json'}: git_commit {text(commit)!r} is not a commit: name it with --commit"
        )
    return f"refs/tags/{commit}"


def _config(files: list[str], runs: Path, config: str | None) -> str:
    """configs/config_SYSTEM.sh: by name, or by the system that the run's config.json names."""
    if config is not None:
        name = config if config in files else f"configs/{Path(config).name}"
        if name not in files:
            raise ReviewError(f"--config {config}: the commit that ran has no such file")
        return name
    system = read_json(runs / "config.json", "mlperf").get("system")
    name = f"configs/config_{system}.sh"
    if not isinstance(system, str) or name not in files:
        what = "name it with --config, such as configs/FILE.sh"
        raise ReviewError(f"{runs / 'config.json'} does not say which config ran: {what}")
    return name


def _git(repository: Path, *arguments: str) -> bytes:
    return run(["git", "-C", str(repository), *arguments], f"git {arguments[0]} in {repository}", _TIMEOUT)
