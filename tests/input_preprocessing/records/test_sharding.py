"""Shards hold exactly the sequences of their source, or are not considered finished."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bert.data.format import write_records
from bert.data.records import DataError, Records
from input_preprocessing.records import bins, sharding, shuffle

from ...bert.data.samples import METADATA, make_records


@pytest.mark.parametrize(
    "make", [shuffle.shuffle_records, bins.bin_records], ids=["shuffle", "bins"]
)
def test_a_sequence_lost_and_one_doubled_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make
) -> None:  # type: ignore[no-untyped-def]
    def careless(seed: int, records: Records, group: int) -> tuple[np.ndarray, None]:
        order = np.arange(records.num_sequences)
        order[0] = order[-1]
        return order, None

    (tmp_path / "source").mkdir()
    write_records(
        tmp_path / "source" / "part-0.hdf5", make_records(300, seed=0), METADATA
    )
    given = {"shards": 1, "seed": 1, "jobs": 1}
    make(tmp_path / "source", tmp_path / "right", **given)
    monkeypatch.setattr(sharding, "in_random_order", careless)
    with pytest.raises(DataError, match="hold exactly the sequences of"):
        make(tmp_path / "source", tmp_path / "wrong", **given)
