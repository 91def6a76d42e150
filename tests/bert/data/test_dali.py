"""DATA_LOADER=dali gives the batches of our loader: with DALI itself if it is installed, and with a
stand-in.

The stand-in does what the adapter relies on: it asks for iterations ahead, ends with StopIteration
once those that it holds are given out, and lends its buffers until the next run only.
"""

import importlib.machinery
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch

from bert.core.dist import World
from bert.data import dali
from bert.data.dali import DaliLoader
from bert.data.loader import LoaderConfig
from bert.data.records import DataError
from bert.pretraining import train
from bert.pretraining.config import PretrainingConfig
from bert.training.mlperf import MlperfLog
from common.env import ConfigError, from_env

from ..plain import CPU
from ..states import newest, same
from .samples import Files, fails_at, loader_of


class _Pipeline:
    def __init__(self, source, depth):
        self.source, self.depth = source, depth
        self.ready, self.ended, self.lent = [], False, []

    def build(self):
        pass

    def run(self):
        for values in self.lent:
            values.fill(-1)
        while not self.ended and len(self.ready) <= self.depth:
            try:
                samples = self.source()
            except StopIteration:
                self.ended = True
            else:
                self.ready.append([[*map(np.array, field)] for field in samples])
        if not self.ready:
            raise StopIteration
        outputs = self.ready.pop(0)
        self.lent = [values for field in outputs for values in field]
        return outputs


def _stand_in(monkeypatch):
    def external_source(source, num_outputs, batch):
        assert batch
        return [source] * num_outputs

    def pipeline_def(batch_size, num_threads, device_id, prefetch_queue_depth):
        assert device_id is None
        return lambda build: lambda: _Pipeline(build()[0], prefetch_queue_depth)

    def feed_ndarray(output, tensor, cuda_stream=None):
        tensor.copy_(torch.from_numpy(output))

    fn = types.SimpleNamespace(external_source=external_source)
    modules = {"nvidia": {}, "nvidia.dali": {"fn": fn, "pipeline_def": pipeline_def}}
    modules["nvidia.dali.plugin"] = {}
    modules["nvidia.dali.plugin.pytorch"] = {"feed_ndarray": feed_ndarray}
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=["stand-in", "DALI"])
def pipelines(request, monkeypatch):
    if request.param == "stand-in":
        _stand_in(monkeypatch)
    else:
        try:
            dali.check()
        except ConfigError:
            pytest.skip("NVIDIA DALI is not installed: requirements/dali.txt")


@pytest.fixture
def data(make_records):
    """Our loader, with two micro-batches per step, that fails at the batch of that number."""
    rows = Files([make_records(25, True, seed) for seed in range(3)])
    settings = {"packed": True, "batch_size": 3, "gradient_steps": 2}
    return lambda first_step=1, bad_batch=None: loader_of(
        rows, fails_at(bad_batch, []), first_step=first_step, **settings
    )


def _same(left, right):
    ours, theirs = ([(type(one), vars(one)) for one in step] for step in (left, right))
    assert [kind for kind, _ in ours] == [kind for kind, _ in theirs]
    assert same([fields for _, fields in ours], [fields for _, fields in theirs])


@pytest.mark.parametrize("first_step", [1, 4])
def test_batches_are_our_loaders_from_any_step_on(pipelines, data, first_step):
    ours, other = (data(first_step=first_step) for _ in range(2))
    theirs = DaliLoader(other, CPU, 2)
    kept = []
    for _ in range(7):
        left, right = ours.next_step(), theirs.next_step()
        _same(left, right)
        kept.append((left, right))
    for left, right in kept:  # nothing that was given out is written over later
        _same(left, right)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("bad_batch", [1, 2, 3, 8])
def test_an_error_of_the_loader_comes_at_its_step_and_stays(pipelines, data, bad_batch):
    ours, theirs = data(), DaliLoader(data(bad_batch=bad_batch), CPU, 2)
    for _ in range((bad_batch - 1) // 2):
        _same(ours.next_step(), theirs.next_step())
    for _ in range(2):
        with pytest.raises(DataError, match=r"^a damaged file$"):
            theirs.next_step()
    ours.close()
    theirs.close()


def test_the_end_of_the_data_comes_after_the_last_step(pipelines, data):
    ours, three = data(), data()
    steps = iter([three.next_step() for _ in range(3)])
    ended = types.SimpleNamespace(next_step=lambda: next(steps), close=three.close)
    theirs = DaliLoader(ended, CPU, 2)
    for _ in range(3):
        _same(ours.next_step(), theirs.next_step())
    with pytest.raises(StopIteration):
        theirs.next_step()
    ours.close()
    theirs.close()


def test_a_resumed_run_by_dali_trains_alike(pipelines, prepared, monkeypatch, tmp_path):
    def run(number, saved, **settings):
        folder = tmp_path / f"run_{number}"
        folder.mkdir()
        place = {"RUN_DIR": str(folder), "CHECKPOINT_DIR": str(tmp_path / saved)}
        config = from_env(PretrainingConfig, prepared | place | settings)
        log = MlperfLog(config.mlperf, True, folder / "result_0.txt")
        with World(config.dist) as world:
            return train.pretrain(config, world, log).step

    loaders = mock.Mock(wraps=train.DaliLoader)
    monkeypatch.setattr(train, "DaliLoader", loaders)
    assert run(0, "whole") == 8
    assert not loaders.called
    assert run(1, "parts", DATA_LOADER="dali", STEPS_THIS_RUN="3") == 3
    assert run(2, "parts", DATA_LOADER="dali", RESUME="1") == 8
    assert loaders.call_count == 2
    whole, parts = (newest(tmp_path / name)["model"] for name in ("whole", "parts"))
    assert same(whole, parts)


def test_without_dali_the_setting_is_an_error_in_one_line(monkeypatch):
    monkeypatch.setattr(dali.importlib.util, "find_spec", lambda name: None)
    cure = r"^DATA_LOADER=dali: .* pip install -r requirements/dali\.txt, or unset DATA_LOADER$"
    for asked, said in (("dali", cure), ("dally", "DATA_LOADER='dally'")):
        with pytest.raises(ConfigError, match=said):
            from_env(LoaderConfig, {"BATCHSIZE": "1", "DATA_LOADER": asked})
    assert from_env(LoaderConfig, {"BATCHSIZE": "1"}).loader == "thread"
