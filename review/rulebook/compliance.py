"""The compliance rules of a ruleset, applied to one log in milliseconds.

The rules are YAML files of the mlperf_logging package, with snippets of Python. The official
checker parses the YAML and compiles every snippet again for each line; here both happen once. The
semantics are the official ones, including quirks: rules of a later file replace the findings of an
earlier one for the same key, a key required once may be repeated with the same value,
"submission_*" keys are checked once. A crash of the official checker is a finding here.
"""

import functools
import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from review.logs.mllog import Event, Log, number, text
from review.logs.output import ERROR, WARNING, Finding, ReviewError
from review.rulebook.rules import official

DEFAULT_RULESET = "5.0.0"  # the last with BERT; the tools default to a later one
BENCHMARK = "bert"
_NO_EVENTS = "a log has MLLOG lines"
_ONE_OBJECT = "every line with :::MLLOG is one JSON object"
_KNOWN_RULES = "the division and the benchmark are known"
# Key, BEGIN or END -> name in the YAML file -> snippets of Python.
_Rules = dict[str, dict[str, list[str]]]


def evaluation_interval(batch_size: float) -> int:
    """Samples between evaluations: floor(0.05 (230.23 GBS + 3,000,000) / 25,000) 25,000
    (training_rules).
    """
    return math.floor(0.05 * (230.23 * batch_size + 3_000_000) / 25_000) * 25_000


def package_folder() -> Path:
    """Folder where mlperf_logging is installed, found without importing it. Raises ReviewError."""
    spec = importlib.util.find_spec("mlperf_logging")
    if spec is None or not spec.submodule_search_locations:
        raise ReviewError(
            "mlperf_logging is not installed: pip install mlperf-logging==4.1.68"
        )
    return Path(spec.submodule_search_locations[0])


def rulesets() -> list[str]:
    """Training rulesets with BERT, oldest first."""
    names = []
    # A rule file alone is not enough: 5.1.0 still ships
    # closed_bert.yaml, but no longer allows bert.
    for path in (package_folder() / "compliance_checker").glob(
        "training_*/closed_bert.yaml"
    ):
        common = path.with_name("closed_common.yaml")
        if path.with_name("open_bert.yaml").is_file() and "'bert'" in common.read_text(
            encoding="utf-8"
        ):
            names.append(path.parent.name.removeprefix("training_"))

    def numbers(name: str) -> list[int]:
        # By number: "10.0.0" would come before "2.0.0" as text.
        return [int(part) for part in name.split(".") if part.isdigit()]

    return sorted(names, key=numbers)


@functools.cache
def _rule_file(path: Path) -> _Rules:
    """A YAML file of rules. Raises FileNotFoundError."""
    import yaml  # type: ignore[import-untyped]

    with open(path, encoding="utf-8") as file:
        # Every scalar stays text, as in the official checker: "1.0" is Python to be evaluated.
        entries = yaml.load(file, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    rules: _Rules = {"BEGIN": {}, "END": {}}
    for entry in entries or ():
        kind, rule = next(iter(entry.items()))
        rules[rule["NAME"] if kind == "KEY" else kind] = {
            name: [
                str(part).strip()
                for part in (source if isinstance(source, list) else [source])
            ]
            for name, source in rule.items()
        }
    return rules


@functools.cache
def _code(source: str, mode: str) -> CodeType:
    return compile(source, "<rule>", mode)


def _names(event: Event) -> dict[str, Any]:
    """Variables of a line that snippets use."""
    # Names that the snippets know: `ll` the line, `v` its value and metadata.
    value = {"value": event.value, "metadata": event.metadata}
    location = {
        "full_string": event.text,
        "lineno": event.line,
        "timestamp": event.time_ms,
    }
    return {"ll": SimpleNamespace(key=event.key, value=value, **location), "v": value}


class _Check:
    """State of checking one log. ``by_key``: findings that a later file with rules for their key
    replaces.
    """

    def __init__(self, log: Log, first: str) -> None:
        # Files of rules still to be applied; the rules of the first one add those of the division
        # and of the benchmark to the queue.
        self.log, self.queue = log, [first]
        self.by_key: dict[str, list[Finding]] = {}
        self.general: list[Finding] = []
        self.state: dict[str, Any] = {}

    def say(
        self,
        name: str,
        message: str,
        rule: str,
        key: str | None = None,
        event: Event | None = None,
        **more: Any,
    ) -> None:
        """Adds a finding. ``name``: its id; ``more``: severity, crash."""
        line = event.line if event else None
        location: dict[str, Any] = {"file": self.log.path, "line": line, "key": key}
        hints = (
            hint
            for pattern, hint in official()["hints_by_rule"].items()
            if re.search(pattern, rule)
        )
        # The key's own hint is about its presence, which does not help one whose time is too long.
        by_key = {} if "first_init_start" in rule else official()["hints"]
        hint = by_key.get(key or "") or next(hints, None)
        about = {"rule": rule, "hint": hint, **location}
        finding = Finding(name, ERROR, message, "compliance", **about)
        # Without a key nothing can be replaced later: the official checker keeps these for good.
        (self.general if key is None else self.by_key.setdefault(key, [])).append(
            replace(finding, **more)
        )

    def apply(self, rules: _Rules) -> None:
        """Applies one file of rules to every line."""
        # Fresh for each file: `s`, in which snippets remember lines, does not outlive its file.
        state = self.state = {
            "enqueue_config": self.queue.append,
            "s": {},
            "is_integer": lambda value: abs(round(value) - value) < 0.00001,
            "math": math,
        }
        begin, end = rules["BEGIN"], rules["END"]
        keys = {key: rule for key, rule in rules.items() if key not in ("BEGIN", "END")}
        for source in begin.get("CODE", ()):
            exec(_code(source, "exec"), state, {})
        # As there: what common.yaml found on eval_accuracy goes
        # where closed_bert.yaml has its own rules.
        for key in keys:
            self.by_key.pop(key, None)
        reported: dict[str, list[Event]] = {key: [] for key in keys}
        for event in self.log.events:
            # Unknown keys are allowed, and keys that are no text
            # skipped, as in the official checker.
            if not isinstance(event.key, str) or event.key not in keys:
                continue
            repeated = bool(reported[event.key])
            names = _names(event)
            reported[event.key].append(event)
            # Only "submission_*" is checked once; all others at each occurrence.
            kinds = (
                ()
                if repeated and "submission_" in event.key
                else ("PRE", "CHECK", "POST")
            )
            for kind in kinds if repeated else (*kinds, "FIRST_CHECK"):
                for source in keys[event.key].get(kind, ()):
                    self._check_line(event, kind, source, names)
        for key, rule in keys.items():
            for source in rule.get("ATLEAST_ONE_CHECK", ()) if reported[key] else ():
                self._check_at_least_one(key, source, reported[key])
        for key, rule in keys.items():
            self._check_occurrences(key, "".join(rule.get("REQ", ())), reported)
        # In the state itself, without locals: the checks after it read what this assigns.
        for source in end.get("PRE", ()):
            exec(_code(source, "exec"), state)
        for source in end.get("CHECK", ()):
            if not self._true(source, {}):
                self.say("log_rule", "the log as a whole breaks a rule", source)

    def _true(self, source: str, names: dict[str, Any]) -> bool:
        """A rule that cannot be evaluated, for example because an entry is missing, is broken."""
        try:
            return bool(eval(_code(source, "eval"), self.state, names))
        except Exception:
            # The official checker has a bare except here, and its verdict is the same.
            return False

    def _check_line(
        self, event: Event, kind: str, source: str, names: dict[str, Any]
    ) -> None:
        if not kind.endswith("CHECK"):
            try:
                exec(_code(source, "exec"), self.state, names)
            except Exception as error:
                why = f"cannot be evaluated: {error}"
                self.say("rule_crash", why, source, event.key, event)
        elif not self._true(source, names):
            name, message = _describe_failure(event, source, self.state["s"])
            self.say(name, message, source, event.key, event)

    def _check_at_least_one(self, key: str, source: str, events: list[Event]) -> None:
        passed = False
        for event in events:
            try:
                passed = (
                    bool(eval(_code(source, "eval"), self.state, _names(event)))
                    or passed
                )
            except Exception as error:
                # Unlike other rules, this one is evaluated without a
                # guard there: an exception ends the checker.
                why = f"cannot be evaluated: {error}"
                self.say("rule_crash", why, source, event=event, crash=True)
        if not passed:
            # The best accuracy is the line that the reader wants to see.
            best = max(
                (e for e in events if number(e.value) is not None),
                key=lambda e: e.value,
                default=None,
            )
            # In full: rounded, 0.71999999999 would seem to reach the target.
            highest = "" if best is None else f"; the highest is {best.value!r}"
            message = f"no {key} satisfies the target{highest}"
            self.say("target_missed", message, source, event=best)

    def _check_occurrences(
        self, key: str, required: str, reported: dict[str, list[Event]]
    ) -> None:
        values = [event.value for event in reported[key]]
        if required == "EXACTLY_ONE" and len(values) > 1:
            same = all(value == values[0] for value in values)
            how = "the same value, once is required" if same else "different values"
            message = f"is logged {len(values)} times with {how}"
            severity = WARNING if same else ERROR
            again = reported[key][1]
            self.say("key_repeated", message, required, key, again, severity=severity)
        elif required in ("EXACTLY_ONE", "AT_LEAST_ONE"):
            if not values:
                self.say("key_missing", "is missing", required, key)
        elif required.startswith("AT_LEAST("):
            least = int(required.removeprefix("AT_LEAST(").removesuffix(")"))
            if len(values) < least:
                message = f"is logged {len(values)} times, at least {least} required"
                self.say("key_missing", message, required, key)
        elif required.startswith("AT_LEAST_ONE_OR"):
            others = (
                required.removeprefix("AT_LEAST_ONE_OR(").removesuffix(")").split(",")
            )
            choice = sorted({key, *(other.strip() for other in others)})
            message = f"one of {' or '.join(choice)} is required, none is logged"
            if not any(map(reported.get, choice)) and all(
                message != finding.message for finding in self.general
            ):
                # Every one of the keys has this rule: report it once.
                self.say("key_missing", message, required)


def check_compliance(log: Log, ruleset: str = DEFAULT_RULESET) -> list[Finding]:
    """Findings on one log; the official verdict is a failure if any of them is an error. Raises
    ReviewError.
    """
    folder = package_folder() / "compliance_checker"
    check = _Check(log, f"training_{ruleset}/common.yaml")
    if not (folder / check.queue[0]).is_file():
        raise ReviewError(f"no ruleset {ruleset}: choose {', '.join(rulesets())}")
    hint = (
        "keep other output off the line, or remove the truncated line of a killed run"
    )
    for error in log.errors:
        name = "endless_line" if error.endless else "broken_line"
        location = (log.path, error.line, None, _ONE_OBJECT, hint, error.fatal)
        message = f"the line {error.reason}"
        check.general.append(Finding(name, ERROR, message, "compliance", *location))
    # The official checker goes on to list every key as missing; one reason says it better.
    if not log.events:
        message = "no MLLOG lines: it is empty, or no log"
        check.say("no_events", message, _NO_EVENTS)
        return check.general
    benchmark = log.first("submission_benchmark")
    # The queue would continue with the other benchmark's rules, and report what BERT never logs.
    if (
        benchmark is not None
        and isinstance(benchmark.value, str)
        and benchmark.value != BENCHMARK
    ):
        message = (
            f"is {text(benchmark.value)!r}: not a log of BERT, not checked further"
        )
        rule, key = "submission_benchmark is bert", benchmark.key
        check.say("other_benchmark", message, rule, key, benchmark)
        return [*check.by_key[benchmark.key], *check.general]
    while check.queue:
        name = check.queue.pop(0)
        try:
            rules = _rule_file(folder / name)
        except (OSError, ValueError):
            message = f"asks for rules that ruleset {ruleset} does not have: {name}"
            check.say("no_rules", message, _KNOWN_RULES, crash=True)
            break
        check.apply(rules)

    def weight(finding: Finding) -> int:
        """Sorts first what explains the others: an unreadable log, a run that died, a missed
        target.
        """
        if finding.id in ("no_events", "broken_line", "endless_line"):
            return 0
        return 1 if finding.key == "run_stop" else 2 if finding.key is None else 3

    # The sort is stable: within a weight, findings stay in the order of the rules.
    by_key = [finding for findings in check.by_key.values() for finding in findings]
    return sorted([*by_key, *check.general], key=weight)


def _describe_failure(
    event: Event, rule: str, state: dict[str, Any]
) -> tuple[str, str]:
    """Id and message for a rule that an event breaks."""
    if rule in official()["words"]:
        return "key_order", official()["words"][rule]
    if "first_init_start" in rule:
        start = number(state.get("first_init_start"))
        limit = number(state.get("compile_time_mins")) or 30
        if start is not None and start < 9e99:
            took = (event.time_ms - start) / 60_000
            limits = f"{took:.1f} minutes, the limit is {limit:g}"
            return "init_time", f"initialisation took {limits}"
        return "key_order", "comes before any init_start"
    choice = re.fullmatch(r"v\['value'\] in \[(.*)\]", rule)
    if choice:
        return "key_value", f"is {text(event.value)}, must be one of {choice[1]}"
    names = re.findall(r"'(\w+)' in v\['metadata'\]", rule)
    if names and "if" not in rule.split():
        return "key_value", f"lacks metadata {' or '.join(names)}"
    broken = f"breaks the rule {rule} with value {text(event.value)[:80]}"
    return "key_value", broken
