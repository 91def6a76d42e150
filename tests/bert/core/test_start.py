"""Before the clock: ranks begin with the same weights, nothing is done twice, and
no rank touches the data before run_start is written.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert.checkpoint.weights import checksum_of
from bert.core import dist
from bert.core.dist import DistConfig, World
from bert.data.format import open_records, write_records
from bert.data.shards import write_index
from bert.pretraining import build
from bert.pretraining.config import PretrainingConfig
from bert.training import evaluate
from common.env import from_env

from ..ranks import run_ranks
from ..states import same

# Rank 0 is slow to write run_start; each rank notes when it first looks at the data.
SLOW_START = """
import os
import time
import sys
from pathlib import Path
from bert.training import mlperf
written, known = mlperf.MlperfLog.run_start, set()
def slow(log):
    if os.environ["RANK"] == "0":
        time.sleep(0.7)
    written(log)
mlperf.MlperfLog.run_start = slow
data = os.environ["DATADIR_PHASE2_PACKED"]
def noted(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and not known and str(arguments[0]).startswith(data):
        known.add(data)
        Path(data, "..", "opened").resolve().joinpath(str(time.time_ns())).touch()
sys.addaudithook(noted)
"""

# One bit of one weight of rank 2 differs.
ODD_WEIGHTS = """
import os
import torch
from bert.pretraining import build
filled = build.fill
def odd(model, chunks):
    filled(model, chunks)
    if os.environ["RANK"] == "2":
        model.bert.pooler.dense.weight.data.view(torch.int32)[3, 5] ^= 1
build.fill = odd
"""


def test_no_rank_opens_the_data_before_run_start_is_written(
    prepared, run_bert, tmp_path
):
    (tmp_path / "opened").mkdir()
    (tmp_path / "first.py").write_text(SLOW_START)
    first = {"FIRST": str(tmp_path / "first.py")}
    finished = run_bert(prepared | {"MAX_STEPS": "1"} | first, ranks=2)
    assert finished.returncode == 3, finished.stderr
    lines = Path(prepared["RUN_DIR"], "result_0.txt").read_text().splitlines()
    events = [json.loads(line[9:]) for line in lines]
    (started,) = [event["time_ms"] for event in events if event["key"] == "run_start"]
    times = [int(path.name) for path in (tmp_path / "opened").iterdir()]
    assert len(times) == 2
    assert min(times) / 1e6 >= started


def test_a_rank_with_other_weights_is_named_before_the_clock(
    prepared, run_bert, tmp_path
):
    (tmp_path / "first.py").write_text(ODD_WEIGHTS)
    finished = run_bert(prepared | {"FIRST": str(tmp_path / "first.py")}, ranks=3)
    assert finished.returncode == 2
    named = r"ranks differ: rank 2 on \S+ has weights='.*, and rank 0 '"
    assert re.search(named, finished.stderr.splitlines()[-1])
    assert not Path(prepared["RUN_DIR"], "result_0.txt").exists()


def _odd_data(prepared, tmp_path):
    """A copy of the data folder in which one file has other tokens."""
    folder = tmp_path / "other"
    folder.mkdir()
    paths = sorted(Path(prepared["DATADIR_PHASE2_PACKED"]).iterdir())
    for path in paths:
        (folder / path.name).write_bytes(path.read_bytes())
    records, metadata = open_records(paths[1])
    ids = np.array(records.input_ids)
    ids[7] ^= 1
    odd = dataclasses.replace(records, input_ids=ids)
    write_records(folder / paths[1].name, odd, metadata)
    for made in (folder, paths[0].parent):
        write_index(made, sorted(made.iterdir()))
    told = rf"rank 1 on \S+ has {paths[1].name}=\(\d+, '\w+'\), and rank 0 \(\d+, '"
    return {"DATADIR_PHASE2_PACKED": str(folder)}, told


def _odd_code(prepared, tmp_path):
    implementations = tmp_path / "implementations"
    shutil.copytree(Path(build.__file__).parents[2], implementations)
    with (implementations / "bert" / "optim" / "lamb.py").open("a") as file:
        file.write("# another line\n")
    odd = {"PYTHONPATH": f"{implementations}:{implementations.parent}"}
    # Compiling the copy takes longer than all else, and nothing that is compiled runs.
    return odd | {"NUMBA_DISABLE_JIT": "1"}, r"rank 1 on \S+ has code='"


ODD_SETTINGS = {"LR": "0.04", "OPT_LAMB_BETA_1": "0.8", "BATCHSIZE": "2"}
ODD_SETTINGS |= {"CHECKPOINT_DIR": "here"}
TOLD = r"(LR=0.04, and rank 0 0.05|OPT_LAMB_BETA_1=0.8, and rank 0 0.9)"


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (ODD_SETTINGS, rf"rank 1 on \S+ has {TOLD}.*; and 1 more: give all"),
        (_odd_data, ""),
        (_odd_code, ""),
    ],
    ids=["settings", "tokens", "code"],
)
def test_a_rank_alone_with_other_settings_or_data_is_named_with_what_differs(
    prepared, run_bert, tmp_path, odd, told
):
    if callable(odd):
        odd, told = odd(prepared, tmp_path)
    finished = run_bert(prepared, ranks=2, odd=odd)
    assert finished.returncode == 2
    assert re.search(f"ranks differ: .*{told}", finished.stderr.splitlines()[-1])
    assert "step " not in finished.stderr, "before the first step"


def test_a_checksum_depends_on_names_and_every_bit():
    low = torch.ones(4, dtype=torch.bfloat16)
    weights = {"a": torch.randn(5, 3), "b": torch.tensor(1.0), "c": low}
    copy = {name: tensor.clone() for name, tensor in weights.items()}
    assert checksum_of(weights) == checksum_of(copy)
    copy["a"].view(torch.int32)[4, 2] ^= 1
    assert checksum_of(weights) != checksum_of(copy)
    renamed = {"x" if name == "a" else name: weights[name] for name in weights}
    assert checksum_of(weights) != checksum_of(renamed)


class _Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn inside."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.count += args[0].numel()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shard", ["0", "1"], ids=["replicated", "sharded"])
def test_each_weight_is_drawn_once_and_none_that_a_checkpoint_brings(
    shard, prepared, tmp_path
):
    config = from_env(PretrainingConfig, prepared | {"SHARD_OPTIMIZER": shard})
    world = World(DistConfig(device="cpu"))
    with _Draws() as draws:
        model, step = build.build(config, world, 7)
    assert draws.count == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    drawn = step.state_dict()["optimizer"]["masters"]
    weights = {n: t if "pooler" in n else 2 * t for n, t in drawn.items()}
    headless = {name: weights[name] for name in weights if "pooler" not in name}
    for given, count in ((weights, 0), (headless, draws.count)):
        torch.save(given, path := tmp_path / "w.pt")
        start = dataclasses.replace(config.checkpoint, init_checkpoint=path)
        started = dataclasses.replace(config, checkpoint=start)
        with _Draws() as again:
            _, other = build.build(started, world, 7)
        assert again.count == count
        found = other.state_dict()["optimizer"]["masters"]
        assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_models_are_made_where_they_train(prepared):
    """A device on which nothing can be computed shows any number moved there later."""
    config = from_env(PretrainingConfig, prepared | {"SHARD_OPTIMIZER": "0"})
    places, world = [], World(DistConfig(device="cpu"))
    world.device = torch.device("meta")
    note = lambda model, _: places.extend(p.device for p in model.parameters())  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "fill", note)
        patch.setattr("bert.pretraining.resume.check_weights", lambda *_: None)
        patch.setattr(build, "checksum_of", lambda _: 0)
        patch.setattr(build, "build_step", lambda *_, **__: None)
        build.build(config, world, 7)
    assert {place.type for place in places} == {"meta"}


@pytest.mark.parametrize("warm_up", [False, True])
def test_an_evaluation_without_a_graph_is_rehearsed_before_the_clock(
    warm_up, prepared, monkeypatch
):
    config = from_env(PretrainingConfig, prepared | {"EVAL_BATCHSIZE": "5"})
    world = World(DistConfig(device="cpu"))
    model, step = build.build(config, world, 7)
    before = [tensor.clone() for tensor in step.state_tensors()]
    random_state = torch.get_rng_state()
    counted, seen = evaluate._count, []

    def count(of, batch):
        seen.append((of.training, torch.is_grad_enabled(), batch.num_sequences))
        return counted(of, batch)

    monkeypatch.setattr(evaluate, "_count", count)
    monkeypatch.setattr(build, "warms_up", lambda device: warm_up)
    build.prepare(config, model, step, world)
    assert seen == ([(False, False, 5)] if warm_up else [])
    assert model.training
    assert same(before, [*step.state_tensors()])
    assert torch.equal(random_state, torch.get_rng_state())


def _warmed(world):
    called = []
    names = ("all_reduce", "broadcast", "barrier", "_REDUCE_SCATTER", "_ALL_GATHER")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            home = dist if name.startswith("_") else dist.distributed
            original = getattr(home, name)

            def noted(*args, _name=name, _original=original, **kwargs):
                called.append((_name, str(kwargs.get("op", ""))))
                return _original(*args, **kwargs)

            patch.setattr(home, name, noted)
        world.warm_up()
    assert {name for name, _ in called} == set(names)
    assert any("MAX" in how for name, how in called if name == "all_reduce")


def test_every_kind_of_collective_is_used_before_the_clock():
    run_ranks(_warmed, 2)
    World(DistConfig(device="cpu")).warm_up()  # alone there is nobody to connect to
