"""The system and software sections of the page: from systems/NAME.json and from the run's own files."""

from __future__ import annotations

from typing import Any

from review.logs.mllog import text
from review.logs.tree import read_json, system_file
from review.results.score import Result
from review.rulebook.description import listed

_SOFTWARE = ("framework", "framework_name", "other_software_stack", "operating_system", "sw_notes")
_GROUPS = (("Host", "host_"), ("Accelerators", "accelerator"))


def facts(result: Result) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(key, heading, groups of facts) of the sections that have anything to say."""
    path = system_file(result.folder)
    system = (read_json(path) if path else None) or {}
    environment = read_json(result.folder / "environment.json") or {}
    config = read_json(result.folder / "config.json") or {}
    made = [
        ("system", "System", _system(system) or _machine(environment)),
        ("software", "Software", _software(system, environment)),
        ("settings", "Settings", _settings(config)),
    ]
    return [(key, heading, groups) for key, heading, groups in made if groups]


def _group(title: str, pairs: list[tuple[str, str]], note: str = "") -> list[dict[str, Any]]:
    return [{"title": title, "facts": pairs, "note": note}] if pairs or note else []


def _label(name: str, prefix: str = "") -> str:
    words = name.removeprefix(prefix).removeprefix("_").removeprefix("s_").replace("_", " ").strip() or name
    return words[0].upper() + words[1:]


def _pairs(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    return [(_label(text(name), prefix), listed(value)) for name, value in values.items() if _given(value)]


def _given(value: Any) -> bool:
    return value not in (None, "", [], {})


def _system(system: dict[str, Any]) -> list[dict[str, Any]]:
    rest = {name: value for name, value in system.items() if name not in _SOFTWARE}
    groups: list[dict[str, Any]] = []
    for title, prefix in _GROUPS:
        own = {name: rest.pop(name) for name in list(rest) if name.startswith(prefix)}
        groups += _group(title, _pairs(own, prefix))
    blank = [text(name).replace("_", " ") for name, value in system.items() if not _given(value)]
    note = f"Left blank in the system description: {', '.join(blank)}." if blank else ""
    return [*_group("", _pairs(rest)), *groups, *_group("", [], note)]


def _machine(environment: dict[str, Any]) -> list[dict[str, Any]]:
    """What a run says of its machine, where there is no system description."""
    known = {name: environment.get(name) for name in ("host", "platform", "cpus", "gpus")}
    return _group("", _pairs(known))


def _software(system: dict[str, Any], environment: dict[str, Any]) -> list[dict[str, Any]]:
    described: dict[str, Any] = {}
    for name in _SOFTWARE:
        value = system.get(name)
        described |= value if isinstance(value, dict) else {name: value}
    packages = environment.get("packages")
    logged = {name: environment.get(name) for name in ("python", "cuda", "cudnn", "nccl", "git_commit")}
    logged |= packages if isinstance(packages, dict) else {}
    return [
        *_group("As described" if any(map(_given, logged.values())) else "", _pairs(described)),
        *_group(
            "As logged by the last run" if described and any(map(_given, described.values())) else "", _pairs(logged)
        ),
    ]


def _settings(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every setting of a run of this repository, by component."""
    groups: list[dict[str, Any]] = []
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    groups += _group("", _pairs(plain))
    for name, value in config.items():
        if isinstance(value, dict):
            groups += _group(_label(text(name)), _pairs(_flat(value)))
    return groups


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and len(prefix) < 200:
            flat |= _flat(value, f"{prefix}{name} ")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
