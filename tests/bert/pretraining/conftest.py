"""Runs of one trial, in one folder of results and one of checkpoints."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ..conftest import NOTHING
from ..states import UNTIMED


@pytest.fixture
def train(
    prepared: dict[str, str], run_bert: Callable[..., object], tmp_path: Path
) -> Callable[..., object]:
    """train(arguments, ranks, odd, status, **settings): a run of eight steps into the folders
    ``run`` and ``c``; status: what it is to end with.
    """
    folders = {"CHECKPOINT_DIR": str(tmp_path / "c"), "RUN_DIR": str(tmp_path / "run")}

    def run(
        arguments: tuple[str, ...] = (),
        ranks: int = 1,
        odd: Mapping[str, str] = NOTHING,
        status: int = 0,
        **settings: object,
    ) -> object:
        given = prepared | UNTIMED | folders
        return run_bert(given, ranks, arguments, odd, status, **settings)

    return run
