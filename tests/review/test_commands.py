"""commands.yaml defines the command line: options, exclusions and required arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from review.__main__ import parser


@pytest.mark.parametrize(
    "line", ["", "shwo x", "show", "rcp", "compare x y --csv", "show x --json --csv"]
)
def test_a_wrong_command_line_is_wrong_usage(line, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(line.split())
    assert "error:" in capsys.readouterr().err


def test_options_have_their_kinds_and_defaults():
    options = parser().parse_args(
        ["show", "a", "b", "--rcp-bert-train-samples", "--csv"]
    )
    assert options.target == [Path("a"), Path("b")]
    assert (options.train_samples, options.csv, options.json) == (True, True, False)
    assert options.ruleset == "5.0.0"
    options = parser().parse_args(["watch", "a", "--interval", "2.5", "--once"])
    assert (options.interval, options.once, options.all) == (2.5, True, False)
    assert parser().parse_args(["rcp", "768"]).batch_size == 768
