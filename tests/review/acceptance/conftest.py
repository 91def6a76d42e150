"""An acceptance test's folder, judged by the command that users type."""

from collections.abc import Callable
from pathlib import Path

import pytest

from review.__main__ import main
from review.acceptance.records import Records

from .made_up import write


@pytest.fixture
def certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Exit status and words of ``review certify``, of these records with these settings, or of what
    the folder has already.
    """

    def run(records: Records | None = None, *options: str, **config) -> tuple[int, str]:
        if records is not None:
            write(tmp_path, records, **config)
        status = main(["certify", str(tmp_path), *options])
        shown = capsys.readouterr()
        return status, shown.out + shown.err

    return run
