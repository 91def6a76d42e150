"""rules.yaml has exactly the rules that the code uses, with the intended severities."""

from __future__ import annotations

import re

from review.logs.output import SEVERITIES
from review.rulebook.rules import _rules, finding_ids

NOTES = {"overlap", "rcp_scaled", "round", "ten_runs_to_submit", "bypass", "customary"}
NOTES |= {"results_of_system", "field_asked", "official_says"}


def test_every_rule_is_used_and_every_one_that_is_used_is_there(repository):
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (repository / "review").rglob("*.py")
    )
    rules = set(finding_ids())
    assert [name for name in sorted(rules) if f'"{name}"' not in sources] == []
    used = set(re.findall(r'\b_?broken\(\s*"(\w+)"', sources)) | set(
        re.findall(r'\bsay\(\s*"(\w+)"', sources)
    )
    assert used - rules == set()


def test_a_rule_says_what_it_asks_and_what_to_do_and_how_bad_it_is():
    rules = {
        name: rule
        for name, rule in _rules().items()
        if name not in ("official", "tables")
    }
    assert all(rule["rule"] and rule["hint"] for rule in rules.values())
    assert {rule.get("severity", "error") for rule in rules.values()} == set(
        SEVERITIES[:3]
    )
    assert {
        name for name, rule in rules.items() if rule.get("severity") == "note"
    } == NOTES
