"""`system`: writes systems/NAME.json, the description of the system that every result needs.

A field's value comes from the first of: --set FIELD=VALUE, the answers file, the file that is updated, the files of a
run (--run), this machine, and, on a terminal, the user. Unknown fields stay blank where the
rules allow it, and are named; counts never do, since the official tools crash on them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ERROR, ReviewError, write_whole
from review.logs.tree import read_json
from review.rulebook import official
from review.rulebook.compliance import DEFAULT_RULESET
from review.rulebook.description import ASKED, COUNTS, DIVISIONS, FIELDS, TABLE, check_description
from review.submission.system_probe import Machine, probe

_DEFAULTS = {name: field["default"] for name, field in TABLE.items() if "default" in field}


@dataclass(frozen=True)
class Description:
    """The fields of a system, and where each value comes from."""

    fields: dict[str, Any]
    sources: dict[str, str]

    @property
    def blanks(self) -> list[str]:
        """The fields without a value that the submission rules want one for."""
        return [name for name, wanted in FIELDS.items() if wanted and self.fields[name] in ("", {})]


def describe(
    given: Sequence[tuple[str, Mapping[str, Any]]], machine: Machine, ask: Callable[[str, str, str], str] | None = None
) -> Description:
    """Fills in the description.

    Args: given: (source, fields); the first source that has a field counts. machine: probed for the rest.
    ask: asks the user for (field, question, default); None if nobody is there.
    """
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def add(source: str, values: Mapping[str, Any]) -> None:
        for name in (*FIELDS, *ASKED):
            if name not in fields and values.get(name) not in (None, "", {}):
                fields[name], sources[name] = _value(name, values[name]), source

    layers = [*given, ("this machine", probe(machine))]
    for source, values in layers:
        add(source, values)
    for name, field in TABLE.items():
        if ask and "question" in field and name not in fields:  # what no probe can know
            add("asked", {name: ask(name, field["question"], field.get("suggested", field.get("default", "")))})
    add("default", _DEFAULTS)
    if fields["accelerators_per_node"] == "0":
        add("no accelerator", {name: "N/A" for name in FIELDS if name.startswith("accelerator_")})
    if isinstance(fields.get("other_software_stack"), dict):  # of every source: the first that has a version counts
        stacks = [stack for _, values in layers if isinstance(stack := values.get("other_software_stack"), Mapping)]
        merged = {name: version for stack in reversed(stacks) for name, version in stack.items()}
        fields["other_software_stack"] = _value("other_software_stack", merged)
    own = {name: value for _, values in reversed(given) for name, value in values.items() if name not in FIELDS}
    own |= {name: fields[name] for name in ASKED if name in fields}
    known = {name: sources[name] for name in (*FIELDS, *ASKED) if name in sources}
    return Description({name: fields.get(name, "") for name in FIELDS} | own, known)


def _value(name: str, value: Any) -> Any:
    """A value as the description has it: strings, but for the software stack, which may be an object of strings."""
    if name == "other_software_stack" and isinstance(value, Mapping):
        return {text(key): text(entry) for key, entry in value.items() if entry not in (None, "")}
    return value if isinstance(value, str) else text(value)


def from_run(folder: Path) -> dict[str, Any]:
    """What environment.json and config.json of a run say. Raises ReviewError."""
    environment, mlperf = read_json(folder / "environment.json"), read_json(folder / "config.json", "mlperf")
    if not environment:
        raise ReviewError(f"{folder / 'environment.json'}: no such file, or not JSON; name a folder of results/")
    packages, gpus = read_json(folder / "environment.json", "packages"), environment.get("gpus")
    stack = {f"{name}_version": environment.get(name) for name in ("cuda", "cudnn", "nccl", "python")}
    stack |= {f"{name}_version": packages[name] for name in packages if name != "torch"}
    stack["kernel_version"] = environment.get("platform")
    found: dict[str, Any] = {
        "submitter": None if mlperf.get("organization") == "unknown" else mlperf.get("organization"),
        "division": mlperf.get("division"),
        "number_of_nodes": mlperf.get("num_nodes"),
        "framework": f"PyTorch {packages['torch']}" if packages.get("torch") else None,
        "other_software_stack": {name: value for name, value in stack.items() if value},
    }
    if isinstance(gpus, list) and gpus:
        found |= {"accelerators_per_node": str(len(gpus)), "accelerator_model_name": text(gpus[0])}
    return found


def known(fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The fields, if every one is known. Raises ReviewError."""
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ReviewError(f"{where}: no field {text(unknown[0])!r}; the fields are {', '.join(FIELDS)}")
    return dict(fields)


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """FIELD=VALUE arguments. Raises ReviewError."""
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ReviewError(f"--set {setting}: expected FIELD=VALUE, such as --set cooling=air")
        pairs[name.strip()] = value.strip()
    return known(pairs, "--set")


def ask_user(name: str, question: str, default: str) -> str:
    """Asks on the terminal, on stderr, so that stdout stays JSON."""
    print(f"{name}: {question}{f' [{default}]' if default else ''}", file=sys.stderr)
    print("> ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    return answer.strip() or default


def write(description: Description, path: Path, ruleset: str = DEFAULT_RULESET) -> None:
    """Writes the file, once our rules and the official checker accept it. Raises ReviewError."""
    if path.suffix != ".json":
        raise ReviewError(f"{path}: the name ends in .json, such as systems/DGXH100.json")
    if any(character.isspace() for character in path.name) or path.name.startswith("."):
        raise ReviewError(f"{path}: the official checkers want no space in the name and no dot before it")
    for count in COUNTS:
        if not str(description.fields[count]).isdigit():
            raise ReviewError(f"{count} is {description.fields[count]!r}: write an integer, such as 8")
    if description.fields["division"] not in DIVISIONS:
        raise ReviewError(f"division is {description.fields['division']!r}: write {' or '.join(DIVISIONS)}")
    content = json.dumps(description.fields, indent=2) + "\n"
    with tempfile.TemporaryDirectory(prefix="review-system-") as folder:
        draft = Path(folder) / path.name
        draft.write_text(content, encoding="utf-8")
        error = next((one for one in check_description(draft, ruleset) if one.severity == ERROR), None)
        if error:
            raise ReviewError(f"{error.key} {error.message}: {error.hint}")
        outcome = official.check_system(draft, ruleset)
        if not outcome.passed:
            raise ReviewError(f"the official checker rejects it: {outcome.crash or '; '.join(outcome.messages)}")
    write_whole(path, content)
