"""docs/review.md documents every command, and shows what the commands print."""

from __future__ import annotations

import re

import pytest

from review.__main__ import main, parser
from review.rulebook.rules import markdown


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "review.md").read_text(encoding="utf-8")


def test_every_command_and_option_is_documented(page):
    (commands,) = parser()._subparsers._group_actions
    for name, command in commands.choices.items():
        assert re.search(rf"^## .*`{name}`", page, re.MULTILINE), name
        for action in command._actions:
            options = [
                option
                for option in action.option_strings
                if option not in ("-h", "--help")
            ]
            if options:
                assert any(
                    re.search(rf"(?<![\w-]){option}\b", page) for option in options
                ), f"{name} {options}"


def blocks(page):
    """(command, lines printed) of every console block."""
    return [
        (
            block.splitlines()[0].removeprefix("$ python -m review "),
            block.splitlines()[1:],
        )
        for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    ]


def test_the_output_shown_is_what_the_commands_print_on_published_results(
    page, shared, tmp_path, monkeypatch, capsys
):
    published = shared / "real_results"
    if not published.is_dir():
        pytest.skip(f"no published results in {shared}")
    for path in [path for path in published.rglob("*") if path.is_file()]:
        copy = tmp_path / path.relative_to(published)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    shown = blocks(page)
    assert [command.split()[0] for command, _ in shown] == [
        "show",
        "check",
        "compare",
        "rcp",
    ]
    for command, lines in shown:
        assert main(command.split()) == 0
        expected = [squeezed(line) for line in capsys.readouterr().out.splitlines()]
        for line in lines:
            if (
                line
                and line != "..."
                and not line.startswith((" run", " ─", " result_"))
            ):
                assert squeezed(line) in expected, command
        rows = [line.split() for line in lines if line.startswith(" result_")]
        assert all(set(row) <= set(" ".join(expected).split()) for row in rows)


def squeezed(line: str) -> str:
    """A line without the padding that depends on the width."""
    return " ".join(line.split())


def test_every_source_of_findings_is_explained(page):
    from review.verdict.checking import OFFICIAL

    for source in (*OFFICIAL, "rules"):
        assert re.search(rf"^\| [\w, ]*\b{source}\b", page, re.MULTILINE), source


def test_every_finding_has_its_row_in_the_table(page):
    """Its text made by `python -m review.rulebook.rules`."""
    assert page.endswith(markdown())
