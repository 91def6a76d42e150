"""Exit statuses of commands."""

import sys

import pytest

from common.process import status_of


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (2, 2), ("cp: no such file", 1)]
)
def test_the_status_of_a_command_that_exits_is_that_of_python(
    code: int | str | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(lambda: sys.exit(code)) == status
    assert capsys.readouterr().err == (f"{code}\n" if isinstance(code, str) else "")
