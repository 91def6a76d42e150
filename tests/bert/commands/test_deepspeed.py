"""``python -m bert deepspeed-config``: the launcher's file."""

from __future__ import annotations

import pytest

from bert.__main__ import main


def test_the_environment_is_what_is_set_but_for_the_place_of_a_rank(capsys):
    environ = {"BATCHSIZE": "4", "LR": " 1e-3", "DATADIR": "/a b", "SEED": ""}
    environ |= {"RUN_DIR": "/results/run", "PATH": "/bin"}
    environ |= {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere"}
    assert main(["deepspeed-config", "--environment"], environ) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["BATCHSIZE=4", "DATADIR=/a b", "LR=1e-3", "RUN_DIR=/results/run"]
    assert main(["deepspeed-config", "--environment"], {}) == 0
    # Not an empty line, on which the launcher would fail.
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("value", "what"),
    [("a\nb", "a line break"), ("$HOME/data", "$"), ("a%nb", "%"), ('a"b', '"')],
)
def test_a_value_that_would_not_arrive_unchanged_is_an_error(capsys, value, what):
    assert main(["deepspeed-config", "--environment"], {"DATADIR": value}) == 2
    assert f"DATADIR has {what} in it" in capsys.readouterr().err
