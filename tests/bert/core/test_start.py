"""Before the clock: ranks begin with the same weights, nothing is done twice, and
no rank touches the data before run_start is written.
"""

import contextlib
import dataclasses
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import certify.load  # noqa: F401 (imports review, as the acceptance test's ranks do)
from bert.checkpoint.weights import checksum_of
from bert.core import dist, rundir, software
from bert.data.format import open_records, write_records
from bert.data.shards import write_index
from bert.pretraining import build
from bert.pretraining.config import PretrainingConfig
from bert.training import evaluate
from bert.training.config import Hardware
from common.env import from_env

from ...structure import PACKAGES
from ..plain import CPU, alone
from ..ranks import run_ranks
from ..states import events, same

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


@pytest.fixture
def first(tmp_path):
    return tmp_path / "first.py"


def test_no_rank_opens_the_data_before_run_start_is_written(prepared, run_bert, first):
    opened = first.with_name("opened")
    opened.mkdir()
    first.write_text(SLOW_START)
    run_bert(prepared, ranks=2, status=3, MAX_STEPS=1, FIRST=first)
    started = [e["time_ms"] for e in events(prepared) if e["key"] == "run_start"]
    times = [int(path.name) for path in opened.iterdir()]
    assert len(times) == 2
    assert [min(times) / 1e6] >= started


def test_a_rank_with_other_weights_is_named_before_the_clock(prepared, run_bert, first):
    first.write_text(ODD_WEIGHTS)
    finished = run_bert(prepared, ranks=3, status=2, FIRST=first)
    named = r"ranks differ: rank 2 on \S+ has weights='.*, and rank 0 '"
    assert re.search(named, finished.stderr.splitlines()[-1])
    assert not Path(prepared["RUN_DIR"], "result_0.txt").exists()


def _odd_data(prepared, tmp_path):
    """A copy of the data folder in which one file has other tokens."""
    paths = sorted(Path(prepared["DATADIR_PHASE2_PACKED"]).iterdir())
    folder = shutil.copytree(paths[0].parent, tmp_path / "other")
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


def _odd_settings(*_):
    odd = {"LR": "0.04", "OPT_LAMB_BETA_1": "0.8", "BATCHSIZE": "2", "CHECKPOINT_DIR": "here"}  # fmt: skip
    told = r"(LR=0.04, and rank 0 0.05|OPT_LAMB_BETA_1=0.8, and rank 0 0.9)"
    return odd, rf"rank 1 on \S+ has {told}.*; and 1 more: give all"


@pytest.mark.parametrize("odd", [_odd_settings, _odd_data, _odd_code])
def test_a_rank_alone_with_other_settings_or_data_is_named_with_what_differs(prepared, run_bert, tmp_path, odd):  # fmt: skip
    odd, told = odd(prepared, tmp_path)
    finished = run_bert(prepared, ranks=2, odd=odd, status=2)
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
def test_each_weight_is_drawn_once_or_none_of_a_checkpoint(shard, prepared, tmp_path):
    config = from_env(PretrainingConfig, prepared | {"SHARD_OPTIMIZER": shard})
    with _Draws() as draws:
        model, step = build.build(config, alone(), 7)
    assert draws.count == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    drawn = step.state_dict()["optimizer"]["masters"]
    weights = {n: t if "pooler" in n else 2 * t for n, t in drawn.items()}
    headless = {name: weights[name] for name in weights if "pooler" not in name}
    for given, count in ((weights, 0), (headless, draws.count)):
        torch.save(given, path := tmp_path / "w.pt")
        start = dataclasses.replace(config.checkpoint, init_checkpoint=path)
        started = dataclasses.replace(config, checkpoint=start)
        with _Draws() as again:
            _, other = build.build(started, alone(), 7)
        assert again.count == count
        assert same(other.state_dict()["optimizer"]["masters"], weights)


def test_models_are_made_where_they_train(prepared, monkeypatch):
    """A device on which nothing can be computed shows any number moved there later."""
    config = from_env(PretrainingConfig, prepared | {"SHARD_OPTIMIZER": "0"})
    world = alone()
    world.device = torch.device("meta")
    fill, ignored = mock.Mock(), mock.Mock(return_value=0)
    monkeypatch.setattr(build, "fill", fill)
    for name in ("checksum_of", "build_step", "resume.check_weights"):
        monkeypatch.setattr(f"bert.pretraining.build.{name}", ignored)
    build.build(config, world, 7)
    (model, _), _ = fill.call_args
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("warm_up", [False, True])
def test_an_evaluation_is_rehearsed_before_the_clock(warm_up, prepared, monkeypatch):
    config = from_env(PretrainingConfig, prepared | {"EVAL_BATCHSIZE": "5"})
    world = alone()
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
    names = ("all_reduce", "broadcast", "barrier", "_REDUCE_SCATTER", "_ALL_GATHER")
    with contextlib.ExitStack() as stack:
        called = {}
        for name in names:
            home = dist if name.startswith("_") else dist.distributed
            noted = mock.patch.object(home, name, wraps=getattr(home, name))
            called[name] = stack.enter_context(noted)
        world.warm_up()
    assert all(noted.called for noted in called.values()), called
    assert "MAX" in str(called["all_reduce"].call_args_list)


def test_every_kind_of_collective_is_used_before_the_clock():
    run_ranks(_warmed, 2)
    alone().warm_up()  # alone there is nobody to connect to


# --- what a run is computed with


def test_the_version_of_torch_names_its_build(monkeypatch):
    # Whose package metadata say 2.13.0.
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    packages = software.environment(CPU)["packages"]
    assert packages["torch"] == "2.13.0+cu130"
    assert packages["numpy"]


@pytest.mark.parametrize("name", ["bert", "certify", "common", "review"])
def test_a_stale_copy_of_a_package_is_other_code(name, monkeypatch, tmp_path):
    before = software.code()
    found = Path(sys.modules[name].__file__).parent
    copy = shutil.copytree(found, tmp_path / name, ignore=lambda _, names: ["tests"])
    monkeypatch.setattr(sys.modules[name], "__path__", [str(copy)])
    assert software.code() == before, "where it lies does not matter"
    last = max(copy.rglob("*.py"))
    last.write_bytes(last.read_bytes() + b"#\n")
    assert software.code() != before
    assert set(software.OURS) == set(PACKAGES)


def test_ranks_on_gpus_compare_the_libraries_that_they_have_loaded(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(Hardware, "device", torch.device("cuda"))
    facts = rundir.shared_facts(Hardware())
    assert (facts["cudnn"], facts["nccl"]) == (91900, "2.27.5")
    assert {"torch", "cuda", "code"} <= facts.keys()
    assert software.libraries(CPU)["nccl"] is None
