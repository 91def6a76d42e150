"""The system description, systems/SYSTEM.json: its fields, and checks of a file.

The official checker only requires the fields and a known status. The submission rules require a
meaningful response in most fields, and the official summarizer crashes on counts that are not
integers.
"""

import json
import locale
import re
from pathlib import Path
from typing import Any

from review.logs.output import Finding
from review.rulebook.rules import broken

# Each field: who needs it (if nobody, it may be empty), and the question and default of `system`.
TABLE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("fields.json").read_text(encoding="utf-8")
)
# Fields of the submission rules' form that the official checker does not require; most published
# files have them.
ASKED = tuple(
    name for name, field in TABLE.items() if field.get("needed") == "by the form"
)
# Fields that it requires, and whether the submission rules (policies, "System description JSON")
# require an answer.
FIELDS = {name: "needed" in field for name, field in TABLE.items() if name not in ASKED}
STATUSES, DIVISIONS = (tuple(TABLE[name]["values"]) for name in ("status", "division"))
# The official checker joins these into a table row and crashes on values that are not strings.
_STRINGS = tuple(name for name, field in TABLE.items() if "string" in field)
# What counts as no answer; 0 is one, as a system may have no accelerators.
BLANK: tuple[object, ...] = (None, "", {}, [])
COUNTS = tuple(name for name, field in TABLE.items() if "count" in field)


def check_description(path: Path, ruleset: str) -> list[Finding]:
    """Checks a system description: findings of source "system" are official ones, of source "rules"
    ours.
    """
    findings: list[Finding] = []
    try:
        # Opening a pipe would wait for its writer.
        if path.exists() and not path.is_file():
            return [broken("description", "is not a regular file", path)]
        # Like the official checker.
        content = path.read_text(locale.getpreferredencoding(False))
        fields = json.loads(content)
    except FileNotFoundError:
        return [broken("description", "is missing", path)]
    except OSError as error:
        return [
            broken("description_readable", f"cannot be read: {error.strerror}", path)
        ]
    except (ValueError, RecursionError) as error:
        return [broken("description_json", f"is not JSON: {error}", path)]
    if not isinstance(fields, dict):
        return [broken("description_object", "is not a JSON object", path)]

    def say(rule: str, message: str, key: str, **values: str) -> None:
        # JSON has no line numbers once parsed, so the line is looked up by the quoted name.
        match = re.search(rf'"{re.escape(key)}"\s*:', content)
        line = content.count("\n", 0, match.start()) + 1 if match else None
        findings.append(broken(rule, message, path, line, key, **values))

    for key in FIELDS:
        if key not in fields:
            say("field", "is missing", key)
    for key in _STRINGS:
        if key in fields and not isinstance(fields[key], str):
            say("field_string", "is not a string", key)
    status = fields.get("status", STATUSES[0])
    division = fields.get("division", "closed")
    major = ruleset.split(".")[0]
    if status not in STATUSES and major.isdigit() and int(major) >= 4:
        say("field_status", f"is {status!r}", "status", statuses=", ".join(STATUSES))
    if division not in DIVISIONS:
        say("field_division", f"is {division!r}", "division")
    for key in COUNTS:
        value = fields.get(key)
        if isinstance(value, str) and value.strip() and not value.strip().isdigit():
            say("field_count", f"is {value!r}", key)
    for key in ASKED:
        if fields.get(key) in BLANK:
            say("field_asked", "is blank", key)
    # A missing field was reported above: get() with a default that is not blank skips it here.
    for key, required in FIELDS.items():
        if fields.get(key, 0) not in BLANK:
            continue
        if key in COUNTS:
            say("field_count_blank", "is blank", key)
        elif required:
            say("field_blank", "is blank", key)
    return findings
