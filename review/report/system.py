"""The system, software and settings sections of the page: from systems/NAME.json and from the run's own files."""

from __future__ import annotations

from typing import Any

from review.logs.mllog import text
from review.logs.tree import read_json, system_file
from review.results.score import Result
from review.rulebook.description import listed

_SOFTWARE = ("framework", "framework_name", "other_software_stack", "operating_system", "sw_notes")
_BLANK: tuple[object, ...] = (None, "", [], {})


def facts(result: Result) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(key, heading, groups of facts) of the sections that have anything to say."""
    path = system_file(result.folder)
    system = (read_json(path) if path else None) or {}
    environment = read_json(result.folder / "environment.json") or {}
    config = read_json(result.folder / "config.json") or {}

    host = {name: value for name, value in system.items() if name.startswith("host_")}
    accelerators = {name: value for name, value in system.items() if name.startswith("accelerator")}
    rest = {name: value for name, value in system.items() if name not in {*_SOFTWARE, *host, *accelerators}}
    machine = [_group("", rest), _group("Host", host, "host_"), _group("Accelerators", accelerators, "accelerator")]
    blank = [text(name).replace("_", " ") for name, value in system.items() if value in _BLANK]
    machine.append({"note": f"Left blank in the system description: {', '.join(blank)}." if blank else ""})
    if not system:  # then what a run says of its machine
        machine = [_group("", {name: environment.get(name) for name in ("host", "platform", "cpus", "gpus")})]

    described: dict[str, Any] = {}
    for name in _SOFTWARE:
        value = system.get(name)
        described |= value if isinstance(value, dict) else {name: value}
    packages = environment.get("packages")
    logged = {name: environment.get(name) for name in ("python", "cuda", "cudnn", "nccl", "git_commit")}
    logged |= packages if isinstance(packages, dict) else {}
    software = [_group("As described", described), _group("As logged by the last run", logged)]

    nested = {name: value for name, value in config.items() if isinstance(value, dict)}
    settings = [_group("", {name: value for name, value in config.items() if name not in nested})]
    settings += [_group(_label(text(name)), _flat(value)) for name, value in nested.items()]
    sections = [("system", "System", machine), ("software", "Software", software), ("settings", "Settings", settings)]
    found = [
        (key, label, [one for one in groups if one.get("facts") or one.get("note")]) for key, label, groups in sections
    ]
    return [section for section in found if section[2]]


def _group(title: str, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    pairs = [(_label(text(name), prefix), listed(value)) for name, value in values.items() if value not in _BLANK]
    return {"title": title, "facts": pairs}


def _label(name: str, prefix: str = "") -> str:
    words = name.removeprefix(prefix).removeprefix("_").removeprefix("s_").replace("_", " ").strip() or name
    return words[0].upper() + words[1:]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and len(prefix) < 200
        flat |= _flat(value, f"{prefix}{name} ") if nested else {f"{prefix}{name}": value}
    return flat
