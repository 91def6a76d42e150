"""`package`: the submission tree, checked by the official tools, as a folder and a tar file.

ORG/results/SYSTEM/bert/result_0..9.txt, ORG/systems/SYSTEM.json and
ORG/benchmarks/bert/implementations/NAME/ with the code of the commit that ran (submission_rules,
"Directory structure"). Appears whole or not at all.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import Finding, ReviewError, pick
from review.logs.tree import copy_runs, read_json, read_object, run
from review.results.score import Result, load_results
from review.rulebook.compliance import BENCHMARK
from review.verdict.checking import Verdict, check
from review.verdict.submission_rules import SCRIPTS

# Its commits are the code that ran.
REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT = 120  # seconds per git command
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Package:
    """Outcome: the checks, and the files written if all passed."""

    checked: tuple[Verdict, ...]
    files: tuple[Path, ...]
    digest: str | None

    @property
    def passed(self) -> bool:
        return all(result.passed() for result in self.checked)

    def as_dict(self) -> dict[str, Any]:
        return pick(self, "passed files sha256=digest checked")


def package(request: argparse.Namespace) -> Package:
    """Builds, checks and writes the package; writes nothing if a check fails. ``request``: options
    of the command.

    Raises ReviewError.
    """
    organization = request.org
    output = request.output.resolve()  # results are found by their resolved paths
    _check_names(request, output)
    result = _result(request)
    description = _description(request)
    code = find_code(result.folder, request.commit, request.config)
    try:
        # A rename works within one file system only, and what is refused makes no folder.
        beside = next((one for one in output.parents if one.exists()), output)
        with tempfile.TemporaryDirectory(
            dir=beside, prefix=f".{output.name}."
        ) as folder:
            whole = Path(folder) / "whole"
            root = whole / organization
            if request.add:
                shutil.copytree(output / organization, root, symlinks=True)
            _build(request, result, description, code, root)
            checked = _verify(request, root, output / organization)
            if not all(result.passed() for result in checked):
                return Package(checked, (), None)
            archive = whole / f"{organization}.tar.gz"
            _archive(root, archive)
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            # As sha256sum -c reads it.
            _write(
                archive.with_name(f"{archive.name}.sha256"),
                f"{digest}  {archive.name}\n",
            )
            os.chmod(whole, 0o755)
            output.parent.mkdir(parents=True, exist_ok=True)
            if output.exists():  # replaced at the last moment
                # A rename does not replace a folder that holds something.
                os.rename(output, Path(folder) / "old")
            os.rename(whole, output)
    except OSError as error:
        raise ReviewError(f"{error.filename or output}: {error.strerror}") from None
    names = (organization, archive.name, f"{archive.name}.sha256")
    return Package(checked, tuple(output / name for name in names), digest)


def _check_names(request: argparse.Namespace, output: Path) -> None:
    for option in ("org", "system", "implementation"):
        name = getattr(request, option)
        if not _NAME.fullmatch(name):
            why = "only letters, digits and ._+- are allowed in a folder name"
            raise ReviewError(f"--{option} {name!r}: {why}")
    if output.exists() and not request.add:
        how = "use --add to add this system, or give another folder"
        raise ReviewError(f"{request.output} exists: {how}")
    if request.add and not (output / request.org).is_dir():
        why = f"no package of {request.org} to add to; omit --add"
        raise ReviewError(f"{request.output}: {why}")


def _result(request: argparse.Namespace) -> Result:
    results = load_results(request.runs, train_samples=request.train_samples)
    if len(results) != 1 or request.runs.is_file():
        wanted = f"the one folder that holds the result_*.txt of {request.system}"
        raise ReviewError(f"{request.runs}: give {wanted}")
    result = results[0]
    if not result.runs:
        raise ReviewError(f"{request.runs}: no result_*.txt, only trials that failed")
    return result


def _description(request: argparse.Namespace) -> dict[str, Any]:
    path = request.description or Path("systems", f"{request.system}.json")
    if not path.exists():
        how = f"write it on that system: python -m review system -o {path}"
        raise ReviewError(f"{path}: no such file; {how}")
    description = read_object(path)
    submitter = text(description.get("submitter", ""))
    if submitter != request.org:
        both = f"submitter is {submitter!r}, --org {request.org!r}"
        raise ReviewError(f"{path}: {both}: correct the wrong one")
    return description


def _build(
    request: argparse.Namespace,
    result: Result,
    description: dict[str, Any],
    code: Code,
    root: Path,
) -> None:
    """Writes the tree. Raises ReviewError, OSError."""
    results = root / "results" / request.system / BENCHMARK
    if results.exists():
        raise ReviewError(
            f"{request.output} already holds results of {request.system}: name another --system"
        )
    results.mkdir(parents=True)
    copy_runs((run.path for run in result.runs), results)
    implementation = (
        root / "benchmarks" / BENCHMARK / "implementations" / request.implementation
    )
    name = f"{request.system}_{request.implementation}.json"
    # Systems share an implementation only if the same commit ran on them.
    for path in sorted(implementation.glob(f"*_{request.implementation}.json")):
        commit = read_json(path).get("commit")
        if commit != code.commit:
            there = (
                f"{request.implementation} in {request.output} is commit {text(commit)}"
            )
            raise ReviewError(
                f"{there}, this result ran {code.commit}: give it another --implementation name"
            )
    if not implementation.exists():
        code.extract(implementation)
    facts = {
        "system": request.system,
        "implementation": request.implementation,
        "commit": code.commit,
        "config": code.config,
        "environment": read_json(result.folder / "environment.json") or None,
        "settings": read_json(result.folder / "config.json") or None,
    }
    _write(implementation / name, json.dumps(facts, indent=2) + "\n")
    readme = _system_readme(request, result, code)
    _write(implementation / f"README-{request.system}.md", readme)
    _write(
        root / "systems" / f"{request.system}.json",
        json.dumps(description, indent=2) + "\n",
    )
    _write(root / "README.md", _organization_readme(request, root))
    if (implementation / "LICENSE").is_file():
        shutil.copyfile(implementation / "LICENSE", root / "LICENSE.md")


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _verify(
    request: argparse.Namespace, root: Path, target: Path
) -> tuple[Verdict, ...]:
    """Writes scaling.json like the official package checker, and checks everything; reports paths
    in ``place``.
    """
    folder = root / "results" / request.system / BENCHMARK
    for result in load_results(folder, train_samples=request.train_samples):
        if result.scaling_factor != 1:
            factor = {"scaling_factor": result.scaling_factor}
            _write(folder / "scaling.json", json.dumps(factor))

    def moved(path: Path) -> Path:
        return target / path.relative_to(root) if path.is_relative_to(root) else path

    def renamed(finding: Finding) -> Finding:
        message = finding.message.replace(str(root), str(target))
        return replace(
            finding, message=message, file=moved(finding.file) if finding.file else None
        )

    checked = check(root, train_samples=request.train_samples)
    as_given = []
    for verdict in checked:
        findings = tuple(map(renamed, verdict.findings))
        as_given.append(replace(verdict, path=moved(verdict.path), findings=findings))
    return tuple(as_given)


def _archive(root: Path, path: Path) -> None:
    """Writes a reproducible archive."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        # The same tree gives the same archive, whoever packs it and when.
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = "root"
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        # rglob has the order of the file system.
        for member in [root, *sorted(root.rglob("*"))]:
            tar.add(
                member, member.relative_to(root.parent), recursive=False, filter=plain
            )
    # gzip would store the time as well.
    path.write_bytes(gzip.compress(buffer.getvalue(), compresslevel=9, mtime=0))


def _system_readme(request: argparse.Namespace, result: Result, code: Code) -> str:
    """README-SYSTEM.md. Raises ReviewError."""
    energy = result.energy.joules if result.energy else None
    facts = {
        "division": result.division,
        "samples of the RCP test": "train_samples (--rcp-bert-train-samples)"
        if result.train_samples
        else None,
        "score": result.score and f"{result.score:.4f} minutes",
        "energy": energy and f"{energy:,.2f} J",
        **{
            f"`{name}`": value for name, value in result.runs[0].hyperparameters.items()
        },
    }
    rows = [
        f"| {name} | {_cell(value)} |"
        for name, value in facts.items()
        if value is not None
    ]
    config = _git("show", f"{code.commit}:{code.config}").decode("utf-8", "replace")
    return _filled(
        "system",
        system=request.system,
        organization=request.org,
        commit=code.commit,
        config=code.config,
        config_text=config.strip(),
        facts="\n".join(rows),
    )


def _organization_readme(request: argparse.Namespace, root: Path) -> str:
    """README.md of the submission, one row per system. Raises ReviewError."""
    rows = []
    for path in sorted((root / "systems").glob("*.json")):
        system = path.stem
        implementations = root.glob(
            f"benchmarks/bert/implementations/*/README-{system}.md"
        )
        names = [path.relative_to(root).as_posix() for path in sorted(implementations)]
        folder = root / "results" / system / BENCHMARK
        for result in load_results(folder, train_samples=request.train_samples):
            score = "" if result.score is None else f"{result.score:.4f}"
            about = f"{result.accelerators or ''} | {score} | {len(result.runs)}"
            rows.append(f"| {system} | {about} | {', '.join(names)} |")
    return _filled("organization", organization=request.org, rows="\n".join(rows))


def _filled(template: str, **values: str) -> str:
    path = Path(__file__).with_name("templates") / f"{template}.md"
    return path.read_text(encoding="utf-8").format(**values).strip() + "\n"


def _cell(value: Any) -> str:
    return text(value).replace("|", "\\|")


@dataclass(frozen=True)
class Code:
    """A commit, and the path of the config that ran."""

    commit: str
    config: str

    def extract(self, folder: Path) -> None:
        """Writes the files of the commit, except dot files, which the official checker rejects.

        Raises ReviewError for a commit without the scripts that the rules require, and OSError.
        """
        data = _git("archive", "--format=tar", self.commit)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = [
                member
                for member in tar.getmembers()
                if not re.search(r"(^|/)\.", member.name)
            ]
            # The rules name these files, at the top of the implementation.
            missing = sorted(set(SCRIPTS) - {member.name for member in members})
            if missing:
                names = ", ".join(missing)
                raise ReviewError(
                    f"commit {self.commit} lacks {names}, required in a submission"
                )
            for member in members:
                # Independent of git's tar.umask.
                member.mode = 0o755 if member.mode & 0o100 else 0o644
            # Missing in Debian 12's Python.
            safe: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
            tar.extractall(folder, members, **safe)


def find_code(runs: Path, commit: str | None, config: str | None) -> Code:
    """The code of a run.

    Args: runs: its folder, with environment.json and config.json. commit, config: override what
    these say. Raises ReviewError if the commit or config is not recorded, or not in the repository.
    """
    wanted = commit or _recorded_commit(runs)
    try:
        # ^{commit} follows a tag to its commit, and refuses files and trees.
        full_hash = _git("rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}")
    except ReviewError:
        hint = "fetch it, or give another with --commit"
        raise ReviewError(
            f"{REPOSITORY} has no commit {text(wanted)}: {hint}"
        ) from None
    full = full_hash.decode().strip()
    # With -z, as git quotes unusual names otherwise.
    listed = _git("ls-tree", "-r", "--name-only", "-z", full)
    files = listed.decode("utf-8", "replace").split("\0")
    if config is not None:
        name = config if config in files else f"configs/{Path(config).name}"
        if name not in files:
            raise ReviewError(
                f"--config {config}: the commit that ran has no such file"
            )
    else:  # that of the system in config.json
        system = read_json(runs / "config.json", "mlperf").get("system")
        name = f"configs/config_{system}.sh"
        if name not in files:
            hint = "give it with --config, such as configs/FILE.sh"
            raise ReviewError(
                f"{runs / 'config.json'} does not record which config ran: {hint}"
            )
    return Code(full, name)


def _recorded_commit(runs: Path) -> str:
    record = runs / "environment.json"
    commit = read_json(record).get("git_commit")
    if not isinstance(commit, str) or not commit:
        raise ReviewError(f"{record} records no commit: give it with --commit")
    if commit.endswith("-dirty"):
        how = (
            "commit it and run again, or give the commit that contains it with --commit"
        )
        raise ReviewError(f"the code that ran is {text(commit)}, not committed: {how}")
    # Output of `git describe --always`: the commit, possibly after the last tag, or a tag alone.
    described = re.fullmatch(r"(?:.+-\d+-g)?([0-9a-f]{7,64})", commit)
    if described:
        return described[1]
    if commit not in _git("tag", "--list").decode("utf-8", "replace").split("\n"):
        raise ReviewError(
            f"{record}: {text(commit)!r} is not a commit: give it with --commit"
        )
    # In full, since a branch may have the same name.
    return f"refs/tags/{commit}"


def _git(*arguments: str) -> bytes:
    failure = f"git {arguments[0]} in {REPOSITORY}"
    return run(["git", "-C", str(REPOSITORY), *arguments], failure, _TIMEOUT)
