"""What the official tools let through of a submission's folders: names, scripts, stray files, stale scores.

The tree is ORG/systems/SYSTEM.json, ORG/results/SYSTEM/bert/result_0..9.txt and
ORG/benchmarks/bert/implementations/NAME/ (submission_rules, "Directory structure").
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import ERROR, NOTE, WARNING, Finding, ReviewError
from review.results.run import Run
from review.results.score import Result
from review.rulebook import official
from review.rulebook.compliance import BENCHMARK
from review.rulebook.description import FIELDS, STATUSES, check_description

SCRIPTS = ("README.md", "setup.sh", "init_datasets.sh", "verify_dataset.sh", "run_and_time.sh")
PARAMETERS = "package_checker_params"
_CATEGORIES = (  # how descriptions spell the category, and what logs of such a system say
    (r"(available )?on ?prem(ises?)?", frozenset({"onprem"})),
    (r"(available )?cloud", frozenset({"cloud"})),
    (r"available", frozenset({"onprem", "cloud"})),
    (r"preview", frozenset({"preview"})),
    (r"research.*|rdi", frozenset({"research"})),
)
_BYPASSES = ("rcp-bypass", "seed-checker-bypass")


def _finding(
    severity: str, message: str, file: Path, rule: str, hint: str, key: str | None = None, source: str = "rules"
) -> Finding:
    return Finding(severity, message, source, file, key=key, rule=rule, hint=hint)


def check_folder(result: Result) -> list[Finding]:
    """The folder of a result within its submission."""
    folder, found = result.folder, []
    name = folder.resolve().name
    if name != BENCHMARK:
        rule = f"results lie in results/SYSTEM/{BENCHMARK}; the official tools skip other names and still say success"
        found.append(_finding(ERROR, f"is named {name!r}", folder, rule, f"rename it to {BENCHMARK}"))
    try:
        expected = {path.name for path in tree.result_files(folder)} | {"scaling.json", PARAMETERS, tree.POWER}
        strays = sorted(name for name in os.listdir(folder) if name not in expected and not name.startswith("."))
    except OSError as error:
        raise ReviewError(f"{folder}: {error.strerror}") from None
    if strays:
        shown = ", ".join(strays[:5]) + (f" and {len(strays) - 5} more" if len(strays) > 5 else "")
        rule = "a result folder holds result_*.txt, scaling.json and power/"
        hint = "move them out, or rename logs to result_N.txt"
        found.append(_finding(WARNING, f"also holds {shown}", folder, rule, hint))
    found += _check_parameters(folder / PARAMETERS) + _check_parameters(folder.parent / PARAMETERS)
    scaling = folder / "scaling.json"
    factor = number((tree.read_json(scaling) or {}).get("scaling_factor"))
    if os.path.lexists(scaling) and (factor is None or not math.isclose(factor, result.scaling_factor, rel_tol=1e-9)):
        says = "" if factor is None else f"says {factor:.6f}, these runs give {result.scaling_factor:.6f}"
        message, hint = (
            says or "has no scaling_factor that is a number",
            "delete it; the package checker writes it again",
        )
        rule = "the official summarizer multiplies the time by what it finds here"
        found.append(_finding(WARNING if says else ERROR, message, scaling, rule, hint, "scaling_factor"))
    root, own = tree.organization(folder), folder.resolve().parent
    for path in (path for path in (undescribed(root) if root else ()) if path != own):  # whose file is checked
        rule = (
            "each folder of results/ that holds folders has a description with a division; the package checker crashes"
        )
        message, hint = "has no such description", f"write systems/{path.name}.json, or remove the folder"
        found.append(_finding(ERROR, message, path, rule, hint, source="package"))
    for path in descriptions(root) if root else ():  # one that is refused takes the others with it
        if path.stem != own.name:
            found += [one for one in check_description(path, result.ruleset) if one.severity == ERROR]
    return [*found, *_check_power_folder(result), *_check_against_logs(result)]


def descriptions(root: Path) -> list[Path]:
    """The system descriptions that the official checkers read."""
    return sorted(path for path in (root / "systems").glob("*.json") if not path.name.startswith("."))


def undescribed(root: Path) -> Iterator[Path]:
    """Folders and links of results/ that stop the package checker for want of a description."""
    for path in sorted((root / "results").iterdir()):
        try:
            described = tree.read_json(root / "systems" / f"{path.name}.json") or {}
            if "division" not in described and path.is_dir() and any(one.is_dir() for one in path.iterdir()):
                yield path
        except OSError:
            yield path


def _check_power_folder(result: Result) -> Iterator[Finding]:
    """What the official checker of power folders fails or crashes on, which costs the time as well."""
    folder = result.folder / tree.POWER
    if folder.exists():
        rejected, crash = official.check_power(folder, [run.path for run in result.runs], result.ruleset)
        failing = rejected | {run.path.stem for run in result.runs if not run.compliant}
        message = (
            f"stops the official power checker: {crash}"
            if crash
            else f"counts as missing for {', '.join(sorted(rejected))}"
        )
        if crash or (rejected and len(failing) > 1):
            rule = f"{tree.POWER}/ is a folder that holds one of node_N.txt and sw_N.txt for each log, or there is none"
            hint = f"correct the names, or remove {tree.POWER}"
            yield _finding(ERROR, message, folder, rule, hint, source="package")


def _check_parameters(path: Path) -> list[Finding]:
    if not path.exists():
        return []
    try:
        if not path.is_file():
            raise OSError("it is not a regular file")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        rule = "the package checker reads it as text, and crashes where it cannot"
        return [_finding(ERROR, f"cannot be read: {error}", path, rule, "remove it", source="package")]
    found = []
    for line in lines:
        name = line.strip()
        if name in _BYPASSES and line != name:
            rule = "the official package checker compares whole lines, newline included"
            hint = f"write it without a newline: printf %s {name}"
            found.append(_finding(WARNING, f"asks for {name} without effect", path, rule, hint))
        elif name in _BYPASSES:
            rule = "a bypass passes the upload; the review committee still has to accept the result"
            found.append(_finding(NOTE, f"asks for {name}", path, rule, "have the reason ready"))
    return found


def categories(status: object) -> frozenset[str]:
    """What submission_status a log of a system of this status may have; none where the status is none of the rules'.

    The status is spelt in several ways over the rounds; bare "available" does not say where.
    """
    words = re.sub(r"[^a-z]+", " ", str(status).casefold()).strip()
    return next((logged for pattern, logged in _CATEGORIES if re.fullmatch(pattern, words)), frozenset())


def _check_against_logs(result: Result) -> Iterator[Finding]:
    """Division, category, number of accelerators and submitter, in the description and in the logs."""
    system = tree.system_file(result.folder)
    content = tree.read_json(system) if system else None
    if system is None or content is None:
        return

    def differs(key: str, message: str, rule: str) -> Finding:
        return _finding(WARNING, message, system, rule, "correct the wrong one", key)

    def logged(key: str, runs: Sequence[Run]) -> set[str]:
        return {text(run.log.value(key)) for run in runs} - {"null"}

    divisions = logged("submission_division", result.runs)
    if content.get("division") in ("closed", "open") and divisions and divisions != {content["division"]}:
        rule = "the logs and the system description name one division; the official checkers go by the description"
        message = f"is {content['division']!r}, in the logs {' and '.join(map(repr, sorted(divisions)))}"
        yield differs("division", message, rule)
    statuses = logged("submission_status", [run for run in result.runs if run.log.events]) - {""}
    wanted = categories(content.get("status"))
    if statuses and wanted and not statuses <= wanted:
        rule = "the logs and the system description name one category: available (on-premise, cloud), preview, research"
        message = f"is {content.get('status')!r}, in the logs {' and '.join(map(repr, sorted(statuses)))}"
        yield differs("status", message, rule)
    accelerators = tree.count_accelerators(result.folder, 0)
    ranks = {len(run.log.all("init_start")) for run in result.runs if run.log.events}
    if accelerators and len(ranks) == 1 and (count := ranks.pop()) > 1 and count != accelerators:
        message = f"makes {accelerators} accelerators in all, {count} ranks log init_start"
        yield differs("accelerators_per_node", message, "one rank for each accelerator logs init_start")
    submitter, organization = content.get("submitter"), result.organization or ""
    if isinstance(submitter, str) and organization.casefold() not in ("", submitter.casefold()):
        message = f"is {submitter!r}, in the logs {organization!r}"
        yield differs("submitter", message, "the logs and the system description name one submitter")


def check_organization(root: Path) -> list[Finding]:
    """What a submission has beside its results."""
    found = []
    rule = "a submission brings its code and how to run it"
    for name in ("README.md", "LICENSE.md"):
        if not (root / name).is_file() and not (root / name.removesuffix(".md")).is_file():
            found.append(_finding(NOTE, "is missing", root / name, "customary in every submission", "add it"))
    implementations = root / "benchmarks" / BENCHMARK / "implementations"
    folders = sorted(path for path in implementations.glob("*") if path.is_dir())
    if not folders:
        hint = "put the code there, or build the submission with `python -m review package`"
        found.append(_finding(WARNING, "holds no implementation", implementations, rule, hint))
    for folder in folders:
        for name in SCRIPTS:
            if not (folder / name).is_file():
                hint = "add it, or build the submission with `python -m review package`"
                found.append(_finding(WARNING, "is missing", folder / name, rule, hint))
    for path in sorted((root / "systems").glob("*.json")):
        if not (root / "results" / path.stem).is_dir():
            hint = "add the results, or remove the description"
            found.append(_finding(NOTE, "describes a system without results", path, "each system has results", hint))
    return found


def stage(result: Result, root: Path | None, into: Path) -> Path:
    """One result by links, as a submission of its own, for the official checkers to write into.

    Without a tree around it (root None) the result gets a description that says only its division.
    What the checkers open is as they would find it: files, folders, links to nowhere; for a pipe, which would keep them
    waiting, a folder. Returns the ORG folder. Raises OSError.
    """
    source = result.folder.resolve()
    organization = into / (root.name if root else "organization")
    system = source.parent.name if root else "system"
    target = organization / "results" / system / (source.name if root else BENCHMARK)
    target.mkdir(parents=True)
    (organization / "systems").mkdir()
    opened = {PARAMETERS, tree.POWER} if root else {tree.POWER}  # but for the logs, whatever they are
    for path in source.iterdir():
        if path.name in opened or tree.RESULT_NAME.fullmatch(path.name):
            _link(target / path.name, path)
    if (source / "scaling.json").is_dir():  # which the checker would write
        (target / "scaling.json").mkdir()
    if root is None:
        fields = blank_description(result.division or "closed")
        (organization / "systems" / f"{system}.json").write_text(json.dumps(fields), encoding="utf-8")
        return organization
    for path in undescribed(root):  # their logs are another result's; that they stop the checker is everybody's
        (organization / "results" / path.name / "other").mkdir(parents=True, exist_ok=True)
    for path in (source.parent / PARAMETERS, *descriptions(root)):
        if os.path.lexists(path):
            _link(organization / path.relative_to(root), path)
    return organization


def _link(link: Path, path: Path) -> None:
    link.symlink_to(path if path.is_file() or path.is_dir() else "." if path.exists() else "nowhere")


def blank_description(division: str) -> dict[str, str]:
    """A system description that passes and says nothing but the division."""
    return {**dict.fromkeys(FIELDS, ""), "division": division, "status": STATUSES[0]}
