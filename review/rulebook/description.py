"""The system description, systems/SYSTEM.json: its fields, and what is wrong with one.

The official checker only asks for the fields and for a known status. The submission rules want a meaningful response in
most of them, and the official summarizer crashes on counts that are not integers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from review.logs.mllog import text
from review.logs.output import ERROR, NOTE, WARNING, Finding

# Every field that the official checker requires, and whether the submission rules (policies, "System description
# JSON") want more than an empty string.
FIELDS = {
    "submitter": True,
    "division": True,
    "status": True,
    "system_name": True,
    "number_of_nodes": True,
    "host_processors_per_node": True,
    "host_processor_model_name": True,
    "host_processor_core_count": True,
    "host_processor_vcpu_count": False,
    "host_processor_frequency": False,
    "host_processor_caches": False,
    "host_processor_interconnect": False,
    "host_memory_capacity": True,
    "host_storage_type": True,
    "host_storage_capacity": True,
    "host_networking": True,
    "host_networking_topology": True,
    "host_memory_configuration": True,
    "accelerators_per_node": True,
    "accelerator_model_name": True,
    "accelerator_host_interconnect": True,
    "accelerator_frequency": False,
    "accelerator_on-chip_memories": False,
    "accelerator_memory_configuration": True,
    "accelerator_memory_capacity": True,
    "accelerator_interconnect": True,
    "accelerator_interconnect_topology": False,
    "cooling": True,
    "hw_notes": False,
    "framework": True,
    "other_software_stack": True,
    "operating_system": True,
    "sw_notes": False,
}
# Fields of the submission rules' form that the official checker does not ask for; most published files have them.
ASKED = ("host_network_card_count", "system_type")
STATUSES = (
    "Available on-premise",
    "Available cloud",
    "Research, Development, or Internal (RDI)",
    "Preview",
)
DIVISIONS = ("closed", "open")
# The official checker joins these to a line of a table and crashes on what is not a string.
_STRINGS = (
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerator_model_name",
    "accelerators_per_node",
    "framework",
)
_COUNTS = ("number_of_nodes", "accelerators_per_node")


def listed(value: object) -> str:
    """A value of a description for people: equal entries of a list counted, an object as its names and values."""
    if isinstance(value, dict):
        return ", ".join(f"{text(name)} {listed(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        names = [listed(entry) for entry in value]
        return ", ".join(f"{names.count(n)}x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    return text(value)


def check_description(path: Path, ruleset: str) -> list[Finding]:
    """What is wrong with a system description: source "system" is official, source "rules" is ours."""
    check = _Check(path, ruleset)
    check.run()
    return check.found


class _Check:
    def __init__(self, path: Path, ruleset: str) -> None:
        self.path, self.ruleset, self.found, self.content = path, ruleset, list[Finding](), ""

    def say(self, severity: str, source: str, message: str, rule: str, hint: str, key: str | None = None) -> None:
        match = re.search(rf'"{re.escape(key)}"\s*:', self.content) if key else None
        line = self.content.count("\n", 0, match.start()) + 1 if match else None
        self.found.append(
            Finding(
                severity=severity,
                message=message,
                source=source,
                file=self.path,
                line=line,
                key=key,
                rule=rule,
                hint=hint,
            )
        )

    def run(self) -> None:
        """Checks the file."""
        rule = "every system with results has systems/SYSTEM.json"
        try:
            self.content = self.path.read_text(encoding="utf-8")
            fields = json.loads(self.content)
        except FileNotFoundError:
            self.say(ERROR, "system", "is missing", rule, "write it with `python -m review system`")
            return
        except OSError as error:
            self.say(ERROR, "system", f"cannot be read: {error.strerror}", rule, "make it readable")
            return
        except (ValueError, RecursionError) as error:
            self.say(ERROR, "system", f"is not JSON: {error}", rule, "correct it there, or write it anew")
            return
        if not isinstance(fields, dict):
            self.say(ERROR, "system", "is not a JSON object", rule, "write one object of field names and values")
            return
        self._required(fields)
        self._values(fields)
        self._blanks(fields)

    def _required(self, fields: dict[str, Any]) -> None:
        for key in FIELDS:
            if key not in fields:
                rule = "the 33 fields of a system description are there, empty or not"
                self.say(
                    ERROR, "system", "is missing", rule, "add it; an empty string will do where nothing is known", key
                )
        for key in _STRINGS:
            if key in fields and not isinstance(fields[key], str):
                rule = "values are strings, the official checker crashes on others"
                self.say(ERROR, "system", "is not a string", rule, 'put it into quotes, such as "8"', key)

    def _values(self, fields: dict[str, Any]) -> None:
        major = self.ruleset.split(".")[0]
        if "status" in fields and fields["status"] not in STATUSES and major.isdigit() and int(major) >= 4:
            message = f"is {fields['status']!r}"
            self.say(
                ERROR, "system", message, f"status is one of {', '.join(STATUSES)}", "choose one of them", "status"
            )
        if "division" in fields and fields["division"] not in DIVISIONS:
            rule = "with anything but closed, in lower case, the official checkers skip seeds and RCP"
            self.say(ERROR, "rules", f"is {fields['division']!r}", rule, "write closed or open", "division")
        for key in _COUNTS:
            value = fields.get(key)
            if isinstance(value, str) and value.strip() and not value.strip().isdigit():
                rule = "the official summarizer reads it as an integer and crashes on others"
                self.say(ERROR, "rules", f"is {value!r}", rule, 'write a number, such as "8"', key)

    def _blanks(self, fields: dict[str, Any]) -> None:
        for key in ASKED:
            if fields.get(key) in (None, "", {}, []):
                rule = "the form of the submission rules has this field"
                self.say(NOTE, "rules", "is blank", rule, "`python -m review system --update` fills it in", key)
        for key, filled in FIELDS.items():
            if key in fields and fields[key] in ("", None, {}, []):
                if key in _COUNTS:
                    rule = "the official summarizer reads it as an integer and crashes on a blank"
                    self.say(ERROR, "rules", "is blank", rule, 'write a number; "0" accelerators for none', key)
                elif filled:
                    rule = "the submission rules want a meaningful response"
                    self.say(
                        WARNING, "rules", "is blank", rule, 'fill it in, or write "N/A" with a reason in a note', key
                    )
