"""The checkpoint beside prepared data is converted, even if added or replaced later, and refused if
it does not fit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bert.checkpoint import weights
from input_preprocessing.dataset import prepare
from input_preprocessing.verify import verdict as verify
from input_preprocessing.verify.verdict import failures

from ...refused import refused
from ..conftest import prepare_options
from .bundle_writer import write_bert


def options_of(folder: Path) -> object:
    return prepare_options(folder, "--packed-data", "--shards", "2")


def made_at(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("packed_data/*.hdf5")}


@pytest.fixture
def config(fresh):
    """The bert_config.json of `fresh`, made that of a tiny model."""
    path = fresh / "download" / "bert_config.json"
    tiny = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}  # fmt: skip
    merged: dict[str, int] = json.loads(path.read_text()) | tiny
    path.write_text(json.dumps(merged))
    return merged


def test_a_checkpoint_that_comes_late_or_is_replaced_is_converted(fresh, config):
    prepare.main(options_of(fresh))
    shards = made_at(fresh)
    converted = fresh / "phase1" / "model.ckpt-28252.pt"
    assert shards
    assert not converted.exists()
    seen = []
    for number, place in enumerate(("tf1_ckpt", "tf1_ckpt", ".")):
        (fresh / "download" / place).mkdir(exist_ok=True)
        write_bert(fresh / "download" / place / "model.ckpt-28252", config, seed=number)
        prepare.main(options_of(fresh))
        model = torch.load(converted, weights_only=True)["model"]
        seen.append(model["bert.pooler.dense_act.weight"].sum().item())
        noted = json.loads(converted.with_suffix(".json").read_text())
        # As the closed division knows them.
        assert noted["tensors"] == weights.identity(converted)
    assert len(set(seen)) == 3
    assert not failures(verify.verify(fresh, jobs=1))
    stamp = converted.stat().st_mtime_ns
    prepare.main(options_of(fresh))
    assert converted.stat().st_mtime_ns == stamp
    assert shards == made_at(fresh)


def test_a_checkpoint_of_another_model_stops_before_hours_of_work(fresh, config):
    other = config | {"num_hidden_layers": 2}
    write_bert(fresh / "download" / "model.ckpt-28252", other, seed=0)
    with refused("num_hidden_layers 1, not 2"):
        prepare.main(options_of(fresh))
    assert not list(fresh.glob("work/instances/*"))
    assert not (fresh / "phase1" / "model.ckpt-28252.pt").exists()
