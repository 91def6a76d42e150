"""The logs and the system description name one category."""

from __future__ import annotations

import json

import pytest

from review.logs.output import WARNING
from review.results.score import load_results
from review.verdict.checking import own_findings
from review.verdict.submission_rules import categories


@pytest.mark.parametrize(("status", "logged"), [
    ("Available on-premise", {"onprem"}),
    ("available on premise", {"onprem"}),
    ("onprem", {"onprem"}),
    ("Available cloud", {"cloud"}),
    ("cloud", {"cloud"}),
    ("available", {"onprem", "cloud"}),
    ("Preview", {"preview"}),
    ("Research, Development, or Internal (RDI)", {"research"}),
    ("research", {"research"}),
    ("banana", set()),
    (None, set()),
])  # fmt: skip
def test_every_spelling_of_a_category_is_known(status, logged):
    assert categories(status) == logged


@pytest.mark.parametrize(("status", "logged", "says"), [
    ("Preview", "onprem", "is 'Preview', in the logs 'onprem'"),
    ("Available on-premise", "preview", "is 'Available on-premise', in the logs 'preview'"),
    ("Available cloud", "research", "is 'Available cloud', in the logs 'research'"),
    ("Research, Development, or Internal (RDI)", "cloud", "in the logs 'cloud'"),
    ("Preview", "preview", None),
    ("Available cloud", "cloud", None),
])  # fmt: skip
def test_a_description_of_another_category_than_the_logs_is_a_warning(
    status, logged, says, submission
):
    system = submission.parents[2] / "systems" / "dgx.json"
    system.write_text(json.dumps({**json.loads(system.read_text()), "status": status}))
    for path in submission.glob("result_*.txt"):
        path.write_text(
            path.read_text().replace('"value": "onprem"', f'"value": "{logged}"')
        )
    (result,) = load_results(submission)
    found = [
        f.message
        for f in own_findings(result)
        if f.key == "status" and f.severity == WARNING
    ]
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
