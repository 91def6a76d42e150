"""Errors in a submission's folders that the official tools miss: names, scripts, stray files, stale
scores.

The tree is ORG/systems/SYSTEM.json, ORG/results/SYSTEM/bert/result_0..9.txt and
ORG/benchmarks/bert/implementations/NAME/ (submission_rules, "Directory structure").
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from review.logs import tree
from review.logs.mllog import number, text
from review.logs.output import ERROR, WARNING, Finding, counted
from review.results.run import Run
from review.results.score import Result
from review.rulebook import official
from review.rulebook.compliance import BENCHMARK
from review.rulebook.description import FIELDS, STATUSES, check_description
from review.rulebook.rules import broken, table

# Of each implementation, by the submission rules ("Directory structure"); no tool asks for them.
SCRIPTS = (
    "README.md",
    "setup.sh",
    "init_datasets.sh",
    "verify_dataset.sh",
    "run_and_time.sh",
)
PARAMETERS = "package_checker_params"
_BYPASSES = ("rcp-bypass", "seed-checker-bypass")


def check_folder(result: Result) -> list[Finding]:
    """Checks a result folder within its submission."""
    folder = result.folder
    findings = [
        *_check_names(folder),
        *_check_parameters(folder / PARAMETERS),
        *_check_parameters(folder.parent / PARAMETERS),
        *_check_scaling(result),
    ]
    root = tree.organization(folder)
    system = folder.resolve().parent
    # The system's own description is checked elsewhere.
    for path in undescribed(root) if root else ():
        if path != system:
            message = "has no such description"
            findings.append(broken("described", message, path, system=path.name))
    for path in descriptions(root) if root else ():  # a rejected one fails all results
        if path.stem != system.name:
            about = check_description(path, result.ruleset)
            findings += [finding for finding in about if finding.severity == ERROR]
    return [*findings, *_check_power_folder(result), *_check_against_logs(result)]


def _check_names(folder: Path) -> Iterator[Finding]:
    """The folder's own name, and files that do not belong there. Raises OSError."""
    name = folder.resolve().name
    if name != BENCHMARK:
        yield broken("folder_name", f"is named {name!r}", folder, name=BENCHMARK)
    expected = {path.name for path in tree.result_files(folder)}
    expected |= {"scaling.json", PARAMETERS, tree.POWER}
    # Hidden files are left to the repository checker, which rejects them.
    strays = sorted(
        name
        for name in os.listdir(folder)
        if name not in expected and not name.startswith(".")
    )
    if strays:
        more = f" and {len(strays) - 5} more" if len(strays) > 5 else ""
        shown = ", ".join(strays[:5]) + more
        yield broken("strays", f"also holds {shown}", folder)


def _check_scaling(result: Result) -> Iterator[Finding]:
    """The committed factor is that of these runs. A stale one is a warning, as the package checker
    writes the file anew.
    """
    path = result.folder / "scaling.json"
    factor = number(tree.read_json(path).get("scaling_factor"))
    if not os.path.lexists(path):
        return
    if factor is None:
        message, severity = "has no scaling_factor that is a number", ERROR
    elif not math.isclose(factor, result.scaling_factor, rel_tol=1e-9):
        message = f"says {factor:.6f}, these runs give {result.scaling_factor:.6f}"
        severity = WARNING
    else:
        return
    yield broken("scaling", message, path, key="scaling_factor", severity=severity)


def descriptions(root: Path) -> list[Path]:
    """The system descriptions that the official checkers read."""
    return sorted(
        path
        for path in (root / "systems").glob("*.json")
        if not path.name.startswith(".")
    )


def undescribed(root: Path) -> Iterator[Path]:
    """Folders and links in results/ without a description, on which the package checker crashes."""
    for path in sorted((root / "results").iterdir()):
        try:
            # The checker opens the description for each benchmark
            # folder: without one it never looks.
            described = tree.read_json(root / "systems" / f"{path.name}.json")
            if (
                "division" not in described
                and path.is_dir()
                and any(child.is_dir() for child in path.iterdir())
            ):
                yield path
        # A folder that cannot be listed stops the checker as well.
        except OSError:
            yield path


def _check_power_folder(result: Result) -> Iterator[Finding]:
    """What the official power checker fails or crashes on, which also invalidates the time."""
    folder = result.folder / tree.POWER
    if folder.exists():
        rejected, crash = official.check_power(
            folder, [run.path for run in result.runs], result.ruleset
        )
        # There, runs rejected for power and for compliance are one set, of which one may fail.
        failing = rejected | {run.path.stem for run in result.runs if not run.compliant}
        message = f"counts as missing for {', '.join(sorted(rejected))}"
        if crash or (rejected and len(failing) > 1):
            yield broken(
                "power_folder",
                f"stops the official power checker: {crash}" if crash else message,
                folder,
            )


def _check_parameters(path: Path) -> Iterator[Finding]:
    if not path.exists():
        return
    try:
        # With the ends of lines: the checker compares whole
        # lines, so that a newline disables an option.
        lines = tree.read_text(path).splitlines(keepends=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        yield broken("parameters", f"cannot be read: {why}", path)
        return
    for line in lines:
        name = line.strip()
        if name in _BYPASSES and line != name:
            yield broken(
                "bypass_newline", f"asks for {name} without effect", path, name=name
            )
        elif name in _BYPASSES:
            yield broken("bypass", f"asks for {name}", path)


def categories(status: object) -> frozenset[str]:
    """The submission_status that logs may have for a described status; empty if that is unknown.

    The spelling varied over the rounds; bare "available" does not say whether on-premise or in the
    cloud.
    """
    words = re.sub(r"[^a-z]+", " ", str(status).casefold()).strip()
    for pattern, logged in table("categories").items():
        if re.fullmatch(pattern, words):
            return frozenset(logged)
    return frozenset()


def _check_against_logs(result: Result) -> Iterator[Finding]:
    """Compares division, category, number of accelerators and submitter of the description with the
    logs.
    """
    system = tree.system_file(result.folder)
    content = tree.description(result.folder)
    if not content:
        return

    def logged(key: str, runs: Sequence[Run]) -> set[str]:
        # text() of a missing value is "null".
        return {text(run.log.value(key)) for run in runs} - {"null"}

    divisions = logged("submission_division", result.runs)
    # A description of neither division is an error of its own (check_description).
    if (
        content.get("division") in ("closed", "open")
        and divisions
        and divisions != {content["division"]}
    ):
        message = f"is {content['division']!r}, in the logs {' and '.join(map(repr, sorted(divisions)))}"
        yield broken("same_division", message, system, key="division")
    # An empty log has no status; that it is empty is said elsewhere.
    whole = [run for run in result.runs if run.log.events]
    statuses = logged("submission_status", whole) - {""}
    wanted = categories(content.get("status"))
    if statuses and wanted and not statuses <= wanted:
        message = f"is {content.get('status')!r}, in the logs {' and '.join(map(repr, sorted(statuses)))}"
        yield broken("same_category", message, system, key="status")
    # From the description alone: 0 starts rule out a guess from the logs it is compared with.
    accelerators = tree.count_accelerators(result.folder, 0)
    ranks = {len(run.log.all("init_start")) for run in whole}
    # One init_start a log is rank 0's, and says nothing about the number of ranks.
    count = max(ranks, default=0) if len(ranks) == 1 else 0
    if accelerators and count > 1 and count != accelerators:
        message = f"makes {counted(accelerators, 'accelerator')} in all, {count} ranks log init_start"
        yield broken("same_accelerators", message, system, key="accelerators_per_node")
    submitter, organization = content.get("submitter"), result.organization or ""
    if isinstance(submitter, str) and organization.casefold() not in (
        "",
        submitter.casefold(),
    ):
        message = f"is {submitter!r}, in the logs {organization!r}"
        yield broken("same_submitter", message, system, key="submitter")


def check_organization(root: Path) -> list[Finding]:
    """Checks a submission's README, code and descriptions."""
    findings = []
    for name in ("README.md", "LICENSE.md"):
        # "Customary" in the rules, with or without the ending.
        forms = (root / name, root / name.removesuffix(".md"))
        if not any(path.is_file() for path in forms):
            findings.append(broken("customary", "is missing", root / name))
    implementations = root / "benchmarks" / BENCHMARK / "implementations"
    folders = sorted(path for path in implementations.glob("*") if path.is_dir())
    if not folders:
        findings.append(
            broken("implementation", "holds no implementation", implementations)
        )
    for script in (folder / name for folder in folders for name in SCRIPTS):
        if not script.is_file():
            findings.append(broken("scripts", "is missing", script))
    for path in sorted((root / "systems").glob("*.json")):
        if not (root / "results" / path.stem).is_dir():
            message = "describes a system without results"
            findings.append(broken("results_of_system", message, path))
    return findings


def stage(result: Result, root: Path | None, into: Path) -> Path:
    """Links one result into a submission of its own, for the official checkers to write to. Returns
    its ORG folder.

    Without a submission around it (root None), the result gets a description with nothing but the
    division. Whatever the checkers open looks the same to them (files, folders, dangling links),
    but a pipe, on which they would wait, becomes a folder. Raises OSError.
    """
    # Resolved, or links in the copy would point to nowhere.
    source = result.folder.resolve()
    organization = into / (root.name if root else "organization")
    system = source.parent.name if root else "system"
    target = organization / "results" / system / (source.name if root else BENCHMARK)
    target.mkdir(parents=True)
    (organization / "systems").mkdir()
    opened = {PARAMETERS, tree.POWER} if root else {tree.POWER}  # besides the logs
    # Links, not copies: logs of thousands of ranks are large, and the checkers only read them.
    for path in source.iterdir():
        if path.name in opened or tree.RESULT_NAME.fullmatch(path.name):
            _link(target / path.name, path)
    # A file of this name is written by the checker.
    if (source / "scaling.json").is_dir():
        (target / "scaling.json").mkdir()
    if root is None:
        fields = {
            **dict.fromkeys(FIELDS, ""),
            "division": result.division or "closed",
            "status": STATUSES[0],
        }
        (organization / "systems" / f"{system}.json").write_text(
            json.dumps(fields), encoding="utf-8"
        )
        return organization
    # Without their logs, but the checker has to crash on them.
    for path in undescribed(root):
        (organization / "results" / path.name / "other").mkdir(
            parents=True, exist_ok=True
        )
    for path in (source.parent / PARAMETERS, *descriptions(root)):
        if os.path.lexists(path):
            _link(organization / path.relative_to(root), path)
    return organization


def _link(link: Path, path: Path) -> None:
    link.symlink_to(
        path if path.is_file() or path.is_dir() else "." if path.exists() else "nowhere"
    )
