"""A fast part of `python -m tests.input_preprocessing.mutations`."""

from __future__ import annotations

import shutil

from .mutations import CHANGES, mutate


def test_no_damage_of_any_kind_is_taken_for_prepared_data(packed, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(packed, folder, ignore=shutil.ignore_patterns("download"))
    found = mutate(folder, 8 * len(CHANGES), seed=2)
    assert found["ACCEPTED"] == found["not named"] == 0
    assert found["refused"] > 6 * len(CHANGES)
