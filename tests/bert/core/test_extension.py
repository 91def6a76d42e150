"""A module from outside adds its parts: the example of docs/train.md, in a folder of its own."""

import re

import pytest

from ..states import UNTIMED, newest

NAMED = {"OPTIMIZER": "sign", "LR_SCHEDULE": "constant"}
CHOSEN = NAMED | {"ATTENTION": "plain", "METRICS": "csv"}


@pytest.fixture
def train(prepared, run_bert, repository, tmp_path):
    """train(arguments, **settings): the run of the example."""
    page = (repository / "docs" / "train.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(example.splitlines()) <= 40
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine.py").write_text(example)
    shorter = {"MAX_STEPS": "3", "LR": "0.001", "CHECKPOINT_DIR": str(tmp_path / "c")}
    outside = {"PYTHONPATH": str(tmp_path / "outside"), "EXTENSION": "mine"}
    given = prepared | UNTIMED | shorter | outside | CHOSEN
    return lambda status, **changed: run_bert(given | changed, status=status)


@pytest.fixture
def quick(train, tmp_path):
    """The same, but forked from a Python that has imported PyTorch, which cannot follow PYTHONPATH."""
    path = tmp_path / "first.py"
    path.write_text(f"import sys\nsys.path.append({str(tmp_path / 'outside')!r})\n")
    return lambda **changed: train(PYTHONPATH="", FIRST=str(path), **changed)


def test_four_kinds_of_parts_are_registered_and_noted(train, quick, tmp_path):
    train(STEPS_THIS_RUN="2", status=0)
    rows = (tmp_path / "run" / "losses_0.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows][:1] == [["train", "2"]]
    saved = newest(tmp_path / "c")["run"]
    assert NAMED.items() <= saved.items()
    assert re.fullmatch(r"mine [0-9a-f]{16}", saved["EXTENSION"])
    # Its code is the run's, too.
    with (tmp_path / "outside" / "mine.py").open("a") as file:
        file.write("# another\n")
    refused = quick(RESUME="1", status=2)
    assert "is of a run with EXTENSION mine " in refused.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SUBMISSION_DIVISION": "closed"}, "EXTENSION=mine (code of one's own"),
        ({"EXTENSION": "absent"}, "EXTENSION=absent: ModuleNotFoundError: "),
        ({"EXTENSION": ""}, "OPTIMIZER='sign': expected one of lamb, "),
    ],
)
def test_it_is_refused_where_it_may_not_be_or_is_not(quick, changed, said):
    (line,) = quick(**changed, status=2).stderr.splitlines()
    assert said in line
