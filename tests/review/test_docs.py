"""The command line has its options, exclusions and required arguments; docs/review.md documents every command, and
shows what the commands print; rules.yaml has exactly the rules that the code uses.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from review.__main__ import parser
from review.logs.output import SEVERITIES, counted, pick
from review.rulebook.rules import _rules, finding_ids, markdown
from review.verdict.checking import OFFICIAL

from .verdict.damage import duplicate


@pytest.mark.parametrize("line", [
    "", "shwo x", "show", "rcp", "compare x y --csv", "show x --json --csv",
])  # fmt: skip
def test_a_wrong_command_line_is_wrong_usage(line, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(line.split())
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "options"), [
    ("show a b --rcp-bert-train-samples --csv", {
        "target": [Path("a"), Path("b")], "train_samples": True, "csv": True, "json": False, "ruleset": "5.0.0",
    }),
    ("watch a --interval 2.5 --once", {"interval": 2.5, "once": True, "all": False}),
    ("rcp 768", {"batch_size": 768}),
])  # fmt: skip
def test_options_have_their_kinds_and_defaults(line, options):
    found = vars(parser().parse_args(line.split()))
    assert {name: found[name] for name in options} == options


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "review.md").read_text(encoding="utf-8")


def test_every_command_and_option_is_documented(page):
    (commands,) = parser()._subparsers._group_actions
    for name, command in commands.choices.items():
        assert re.search(rf"^## .*`{name}`", page, re.MULTILINE), name
        for action in command._actions:
            options = {*action.option_strings} - {"-h", "--help"}
            found = [re.search(rf"(?<![\w-]){option}\b", page) for option in options]
            assert any(found) or not options, f"{name} {options}"


def squeezed(line: str) -> str:
    """A line without the padding that depends on the width."""
    return " ".join(line.split())


def test_the_output_shown_is_printed(
    page, real_folders, tmp_path, monkeypatch, command
):
    duplicate(real_folders[0].parents[3], tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = []
    for block in re.findall(
        r"```console\n\$ python -m review (.*?)```", page, re.DOTALL
    ):
        words, *lines = block.splitlines()
        shown.append(words.split()[0])
        status, printed, _ = command(*words.split())
        assert status == 0
        expected = [*map(squeezed, printed.splitlines())]
        for line in lines:
            if line.startswith(" result_"):
                assert {*line.split()} <= {*printed.split()}
            elif line not in ("", "...") and not line.startswith((" run", " ─")):
                assert squeezed(line) in expected, words
    assert shown == ["show", "check", "compare", "rcp"]


def test_every_finding_and_source_of_findings_is_explained(page):
    """The table of findings is made by `python -m review.rulebook.rules`."""
    assert page.endswith(markdown())
    for source in (*OFFICIAL, "rules"):
        assert re.search(rf"^\| [\w, ]*\b{source}\b", page, re.MULTILINE), source


NOTES = {"overlap", "rcp_scaled", "round", "ten_runs_to_submit", "bypass", "customary"}
NOTES |= {"results_of_system", "field_asked", "official_says"}


def test_every_rule_is_used_and_every_one_that_is_used_is_there(repository):
    paths = (repository / "review").rglob("*.py")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    rules = {*finding_ids()}
    assert [name for name in rules if f'"{name}"' not in sources] == []
    used = re.findall(r'\b(?:_?broken|say)\(\s*"(\w+)"', sources)
    assert {*used} - rules == set()


def test_a_rule_says_what_it_asks_and_what_to_do_and_how_bad_it_is():
    others = ("official", "tables")
    rules = {name: rule for name, rule in _rules().items() if name not in others}
    assert all(rule["rule"] and rule["hint"] for rule in rules.values())
    found = {name: rule.get("severity", "error") for name, rule in rules.items()}
    assert {*found.values()} == {*SEVERITIES[:3]}
    assert {name for name, severity in found.items() if severity == "note"} == NOTES


def test_picked_attributes_of_a_missing_part_are_null():
    value = SimpleNamespace(name="x", part=None, whole=SimpleNamespace(size=0))
    picked = pick(value, "name half=part.size size=whole.size")
    assert picked == {"name": "x", "half": None, "size": 0}


def test_one_is_no_plural():
    assert counted(1, "accelerator") == "1 accelerator"
    assert counted(8.0, "accelerator") == "8 accelerators"
    assert counted(2, "process") == "2 processes"
