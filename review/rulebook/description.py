"""The system description, systems/SYSTEM.json: its fields, and what is wrong with one.

The official checker only asks for the fields and for a known status. The submission rules want a meaningful response in
most of them, and the official summarizer crashes on counts that are not integers.
"""

from __future__ import annotations

import json
import locale
import re
from pathlib import Path

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
_BLANK: tuple[object, ...] = (None, "", {}, [])
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
    found: list[Finding] = []
    content = ""

    def say(severity: str, source: str, message: str, rule: str, hint: str, key: str | None = None) -> None:
        match = re.search(rf'"{re.escape(key)}"\s*:', content) if key else None
        line = content.count("\n", 0, match.start()) + 1 if match else None
        found.append(Finding(severity, message, source, path, line, key, rule, hint))

    rule = "every system with results has systems/SYSTEM.json"
    if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
        say(ERROR, "system", "is not a regular file", rule, "write it with `python -m review system`")
        return found
    try:
        content = path.read_text(locale.getpreferredencoding(False))  # which the official checker takes as well
        fields = json.loads(content)
    except FileNotFoundError:
        say(ERROR, "system", "is missing", rule, "write it with `python -m review system`")
        return found
    except OSError as error:
        say(ERROR, "system", f"cannot be read: {error.strerror}", rule, "make it readable")
        return found
    except (ValueError, RecursionError) as error:
        say(ERROR, "system", f"is not JSON: {error}", rule, "correct it there, or write it anew")
        return found
    if not isinstance(fields, dict):
        say(ERROR, "system", "is not a JSON object", rule, "write one object of field names and values")
        return found
    rule = "the 33 fields of a system description are there, empty or not"
    hint = "add it; an empty string will do where nothing is known"
    for key in FIELDS:
        if key not in fields:
            say(ERROR, "system", "is missing", rule, hint, key)
    for key in _STRINGS:
        if key in fields and not isinstance(fields[key], str):
            rule = "values are strings, the official checker crashes on others"
            say(ERROR, "system", "is not a string", rule, 'put it into quotes, such as "8"', key)
    status, division, major = fields.get("status", STATUSES[0]), fields.get("division", "closed"), ruleset.split(".")[0]
    if status not in STATUSES and major.isdigit() and int(major) >= 4:
        rule = f"status is one of {', '.join(STATUSES)}"
        say(ERROR, "system", f"is {status!r}", rule, "choose one of them", "status")
    if division not in DIVISIONS:
        rule = "with anything but closed, in lower case, the official checkers skip seeds and RCP"
        say(ERROR, "rules", f"is {division!r}", rule, "write closed or open", "division")
    for key in _COUNTS:
        value = fields.get(key)
        if isinstance(value, str) and value.strip() and not value.strip().isdigit():
            rule = "the official summarizer reads it as an integer and crashes on others"
            say(ERROR, "rules", f"is {value!r}", rule, 'write a number, such as "8"', key)
    for key in ASKED:
        if fields.get(key) in _BLANK:
            rule = "the form of the submission rules has this field"
            say(NOTE, "rules", "is blank", rule, "`python -m review system --update` fills it in", key)
    for key, filled in FIELDS.items():
        if key in _COUNTS and fields.get(key, 0) in _BLANK:
            rule = "the official summarizer reads it as an integer and crashes on a blank"
            say(ERROR, "rules", "is blank", rule, 'write a number; "0" accelerators for none', key)
        elif filled and fields.get(key, 0) in _BLANK:
            hint = 'fill it in, or write "N/A" with a reason in a note'
            say(WARNING, "rules", "is blank", "the submission rules want a meaningful response", hint, key)
    return found
