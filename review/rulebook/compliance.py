"""The compliance rules of a ruleset, applied to one log in milliseconds.

The rules are data of the mlperf_logging package: YAML files whose snippets of Python are the rules themselves. The
official checker parses the YAML and compiles each snippet again for every line; here both happen once. The semantics
are the official ones, quirks included: rules of a later file replace the findings of an earlier one for the same key,
repeats with one value are allowed where one is required, "submission_*" keys are checked once. Where the official
checker would crash, that is a finding.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from review.logs.mllog import Event, Log, number, text
from review.logs.output import ERROR, WARNING, Finding, ReviewError
from review.rulebook.hints import KNOWN_RULES, describe_end, describe_failure, hint

DEFAULT_RULESET = "5.0.0"  # the last with BERT; the tools' own default is a later one
_BENCHMARK = "bert"
_NO_EVENTS = "a log has MLLOG lines"
_ONE_OBJECT = "every line with :::MLLOG is one JSON object"


@dataclass(frozen=True, slots=True)
class Snippet:
    """A rule's Python, compiled."""

    source: str
    code: CodeType


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """The rules of one key."""

    required: str
    before: Snippet | None
    checks: tuple[Snippet, ...]
    after: Snippet | None
    first_checks: tuple[Snippet, ...]
    at_least_one: Snippet | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleFile:
    """One YAML file of rules."""

    begin: Snippet | None
    end_before: Snippet | None
    end_checks: tuple[Snippet, ...]
    keys: dict[str, KeyRule]


def package_folder() -> Path:
    """Where mlperf_logging is installed, without importing it. Raises ReviewError."""
    spec = importlib.util.find_spec("mlperf_logging")
    if spec is None or not spec.submodule_search_locations:
        raise ReviewError("mlperf_logging is not installed: pip install mlperf-logging==4.1.68")
    return Path(spec.submodule_search_locations[0])


def rulesets() -> list[str]:
    """The training rulesets that have BERT."""
    folder = package_folder() / "compliance_checker"
    found = [path.parent.name.removeprefix("training_") for path in folder.glob("training_*/closed_bert.yaml")]
    return sorted((name for name in found if _allows_bert(folder / f"training_{name}")), key=_version)


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _allows_bert(folder: Path) -> bool:
    if not (folder / "open_bert.yaml").is_file():
        return False
    return "'bert'" in (folder / "closed_common.yaml").read_text(encoding="utf-8")


def _snippet(source: Any, mode: str) -> Snippet:
    stripped = str(source).strip()
    return Snippet(stripped, compile(stripped, "<rule>", mode))


def _optional(source: Any, mode: str) -> Snippet | None:
    return None if source is None else _snippet(source, mode)


def _snippets(source: Any) -> tuple[Snippet, ...]:
    sources = source if isinstance(source, list) else [] if source is None else [source]
    return tuple(_snippet(one, "eval") for one in sources)


@functools.cache
def _rule_file(path: Path) -> RuleFile | None:
    """The rules of a YAML file; None for an empty one. Raises FileNotFoundError."""
    import yaml  # type: ignore[import-untyped]

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    with open(path, encoding="utf-8") as file:
        entries = yaml.load(file, Loader=loader)
    if entries is None:
        return None
    blocks: dict[str, Any] = {}
    keys = {}
    for entry in entries:
        kind = next(iter(entry))
        if kind != "KEY":
            blocks[kind] = entry[kind]
            continue
        rule = entry["KEY"]
        keys[rule["NAME"]] = KeyRule(
            required=rule.get("REQ", ""),
            before=_optional(rule.get("PRE"), "exec"),
            checks=_snippets(rule.get("CHECK")),
            after=_optional(rule.get("POST"), "exec"),
            first_checks=_snippets(rule.get("FIRST_CHECK")),
            at_least_one=_optional(rule.get("ATLEAST_ONE_CHECK"), "eval"),
        )
    end = blocks.get("END", {})
    return RuleFile(
        begin=_optional(blocks.get("BEGIN", {}).get("CODE"), "exec"),
        end_before=_optional(end.get("PRE"), "exec"),
        end_checks=_snippets(end.get("CHECK")),
        keys=keys,
    )


class _Line:
    """What snippets know as ``ll``."""

    __slots__ = ("full_string", "key", "lineno", "timestamp", "value")

    def __init__(self, event: Event) -> None:
        self.full_string = event.text
        self.key = event.key
        self.lineno = event.line
        self.timestamp = event.time_ms
        self.value = {"value": event.value, "metadata": event.metadata}


@dataclass
class _Check:
    """The state of checking one log."""

    log: Log
    queue: list[str]
    by_key: dict[str, list[Finding]] = field(default_factory=dict)
    general: list[Finding] = field(default_factory=list)

    def say(
        self,
        message: str,
        rule: str,
        key: str | None = None,
        event: Event | None = None,
        severity: str = ERROR,
        crash: bool = False,
    ) -> None:
        """Keeps a finding; one with a key is replaced when a later file has rules for that key."""
        finding = Finding(
            severity=severity,
            message=message,
            source="compliance",
            file=self.log.path,
            line=event.line if event else None,
            key=key,
            rule=rule,
            hint=hint(key, rule),
            crash=crash,
        )
        if key is None:
            self.general.append(finding)
        else:
            self.by_key.setdefault(key, []).append(finding)

    def apply(self, rules: RuleFile) -> None:
        """Applies one file of rules to every line."""
        shared: dict[str, Any] = {}
        state: dict[str, Any] = {
            "enqueue_config": self.queue.append,
            "s": shared,
            "is_integer": _is_integer,
            "math": math,
        }
        if rules.begin:
            exec(rules.begin.code, state, {})
        for key in rules.keys:
            self.by_key.pop(key, None)
        events = [event for event in self.log.events if isinstance(event.key, str) and event.key in rules.keys]
        reported: dict[str, list[Event]] = {key: [] for key in rules.keys}
        for event in events:
            rule = rules.keys[event.key]
            repeated = bool(reported[event.key])
            reported[event.key].append(event)
            self._check_line(event, rule, state, repeated)
        for key, rule in rules.keys.items():
            if rule.at_least_one and reported[key]:
                self._check_at_least_one(key, rule.at_least_one, reported[key], state)
        self._check_occurrences(rules, reported)
        if rules.end_before:
            exec(rules.end_before.code, state)
        for snippet in rules.end_checks:
            if not _true(snippet, state, {}):
                self.say(describe_end(snippet.source, state["s"]), snippet.source)

    def _check_line(self, event: Event, rule: KeyRule, state: dict[str, Any], repeated: bool) -> None:
        line = _Line(event)
        names = {"ll": line, "v": line.value}
        if not (repeated and "submission_" in event.key):
            if rule.before:
                self._execute(event, rule.before, state, names)
            for snippet in rule.checks:
                self._evaluate(event, snippet, state, names)
            if rule.after:
                self._execute(event, rule.after, state, names)
        for snippet in rule.first_checks if not repeated else ():
            self._evaluate(event, snippet, state, names)

    def _execute(self, event: Event, snippet: Snippet, state: dict[str, Any], names: dict[str, Any]) -> None:
        try:
            exec(snippet.code, state, names)
        except Exception as error:
            self.say(f"cannot be evaluated: {error}", snippet.source, event.key, event)

    def _evaluate(self, event: Event, snippet: Snippet, state: dict[str, Any], names: dict[str, Any]) -> None:
        if not _true(snippet, state, names):
            self.say(describe_failure(event, snippet.source, state["s"]), snippet.source, event.key, event)

    def _check_at_least_one(self, key: str, snippet: Snippet, events: list[Event], state: dict[str, Any]) -> None:
        passed = False
        for event in events:
            line = _Line(event)
            try:
                passed = bool(eval(snippet.code, state, {"ll": line, "v": line.value})) or passed
            except Exception as error:
                self.say(f"cannot be evaluated: {error}", snippet.source, event=event, crash=True)
        if not passed:
            best = max((e for e in events if number(e.value) is not None), key=lambda e: e.value, default=None)
            highest = "" if best is None else f"; the highest is {best.value:.6g}"
            self.say(f"no {key} satisfies the target{highest}", snippet.source, event=best)

    def _check_occurrences(self, rules: RuleFile, reported: dict[str, list[Event]]) -> None:
        for key, rule in rules.keys.items():
            values = [event.value for event in reported[key]]
            if rule.required == "EXACTLY_ONE" and len(values) != 1:
                if not values:
                    self.say("is missing", "EXACTLY_ONE", key)
                elif all(value == values[0] for value in values):
                    message = f"is logged {len(values)} times with the same value, once is required"
                    self.say(message, "EXACTLY_ONE", key, reported[key][1], WARNING)
                else:
                    message = f"is logged {len(values)} times with different values"
                    self.say(message, "EXACTLY_ONE", key, reported[key][1])
            elif rule.required == "AT_LEAST_ONE" and not values:
                self.say("is missing", "AT_LEAST_ONE", key)
            elif rule.required.startswith("AT_LEAST("):
                least = int(rule.required.removeprefix("AT_LEAST(").removesuffix(")"))
                if len(values) < least:
                    self.say(f"is logged {len(values)} times, at least {least} required", rule.required, key)
            elif rule.required.startswith("AT_LEAST_ONE_OR"):
                others = rule.required.removeprefix("AT_LEAST_ONE_OR(").removesuffix(")").split(",")
                choice = sorted({key, *(other.strip() for other in others)})
                message = f"one of {' or '.join(choice)} is required, none is logged"
                if not any(map(reported.get, choice)) and all(message != one.message for one in self.general):
                    self.say(message, rule.required)  # each of the keys has this rule


def _true(snippet: Snippet, state: dict[str, Any], names: dict[str, Any]) -> bool:
    """A rule that cannot be evaluated, say for a missing entry, is broken."""
    try:
        return bool(eval(snippet.code, state, names))
    except Exception:
        return False


def _is_integer(value: float) -> bool:
    return abs(round(value) - value) < 0.00001


def check_compliance(log: Log, ruleset: str = DEFAULT_RULESET) -> list[Finding]:
    """The official verdict on one log is a failure where any finding is an error. Raises ReviewError."""
    folder = package_folder() / "compliance_checker"
    check = _Check(log, [f"training_{ruleset}/common.yaml"])
    if not (folder / check.queue[0]).is_file():
        raise ReviewError(f"no ruleset {ruleset}: there are {', '.join(rulesets())}")
    for error in log.errors:
        check.general.append(
            Finding(
                severity=ERROR,
                message=f"the line {error.reason}",
                source="compliance",
                file=log.path,
                line=error.line,
                rule=_ONE_OBJECT,
                crash=error.fatal,
                hint="keep other output off the line, or remove a cut-off line of a killed run",
            )
        )
    if not log.events:
        check.say(f"no MLLOG lines{log.kind and ': it is '}{log.kind}", _NO_EVENTS)
        return check.general
    benchmark = log.first("submission_benchmark")
    if benchmark is not None and isinstance(benchmark.value, str) and benchmark.value != _BENCHMARK:
        message = f"is {text(benchmark.value)!r}: this log is not of BERT, and is not checked further"
        check.say(message, "results of BERT say so", benchmark.key, benchmark)
        return [*check.by_key[benchmark.key], *check.general]
    while check.queue:
        name = check.queue.pop(0)
        try:
            rules = _rule_file(folder / name)
        except (OSError, ValueError):
            message = f"asks for rules that ruleset {ruleset} does not have: {name}"
            check.say(message, KNOWN_RULES, crash=True)
            break
        if rules is not None:
            check.apply(rules)
    found = [finding for findings in check.by_key.values() for finding in findings] + check.general
    return sorted(found, key=_weight)


def _weight(finding: Finding) -> int:
    """Puts first what explains the others: an unreadable log, a run that died, a target not reached."""
    if finding.rule in (_NO_EVENTS, _ONE_OBJECT):
        return 0
    return 1 if finding.key == "run_stop" else 2 if finding.key is None else 3
