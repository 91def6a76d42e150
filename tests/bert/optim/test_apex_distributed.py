"""DistributedFusedLAMB behind our interface: against a double, since the real one needs GPUs and NGC's PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from bert import optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.core.env import ConfigError
from bert.kernels.precision import Config as PrecisionConfig
from bert.optim.apex_distributed import joined, part
from bert.training.step import build_step

_spec = importlib.util.spec_from_file_location(
    "apex_distributed_double", Path(__file__).with_name("apex_distributed_double.py")
)
double = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(double)

APEX = "apex_distributed_lamb"


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of one, and the double."""
    double.install(monkeypatch)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield World(DistConfig(device="cpu"))
    distributed.destroy_process_group()


def _step(make_model, tiny, world, name, clip, scale=1024.0):
    model = make_model(tiny, dtype=torch.float32).eval()
    settings = optim.Config(optimizer=name, clip=clip, max_grad_norm=0.5)
    precision = PrecisionConfig(precision="fp16", init_loss_scale=scale).resolve(torch.device("cpu"))
    return model, build_step(model, precision, settings, world, accumulate=False, fused_update=False)


@pytest.mark.parametrize("clip", ["after", "before"])
def test_apex_takes_our_steps_and_skips_an_overflow(clip, alone, make_model, tiny, make_records, batch_of):
    batch, states, starts = batch_of(make_records(3), range(4)), [], []
    for name in ("lamb", APEX):
        model, step = _step(make_model, tiny, alone, name, clip)
        starts.append({n: t.clone() for n, t in step.state_dict()["optimizer"]["masters"].items()})
        assert step([batch], 0.01).finite
        before = [tensor.clone() for tensor in step.state_tensors()]
        poison = model.bert.pooler.dense.weight.register_hook(lambda gradient: gradient * float("inf"))
        assert not step([batch], 0.01).finite
        poison.remove()
        optimizer_state = step.optimizer.state_tensors()
        assert all(torch.equal(a, b) for a, b in zip(before, optimizer_state, strict=False))
        assert float(step.scaler.scale) == 512
        for lr in (0.02, 0.01):
            assert step([batch], lr).finite
        states.append(step.state_dict()["optimizer"])
    ours, theirs = states
    assert theirs["num_steps"] == ours["num_steps"] == 3
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0]), "masters are those before the cast"
    for name in ours["masters"].keys() - {n for n in ours["masters"] if n.endswith("key.bias")}:
        change = ours["masters"][name] - starts[0][name]
        error = (theirs["masters"][name] - ours["masters"][name]).norm() / change.norm()
        assert error < 0.01, (name, float(error))  # gradients in fp16 here and there, the norm of a weight there


def test_checkpoints_go_both_ways(alone, make_model, tiny, make_records, batch_of):
    batch = batch_of(make_records(3), range(4))
    _, apex = _step(make_model, tiny, alone, APEX, "after")
    apex([batch], 0.01)
    saved = apex.state_dict()
    _, ours = _step(make_model, tiny, alone, "lamb", "after")
    ours.load_state_dict(saved)
    model, again = _step(make_model, tiny, alone, APEX, "after")
    again.load_state_dict(ours.state_dict())
    restored = again.state_dict()["optimizer"]
    assert restored["num_steps"] == 1
    for key in ("masters", "first_moments", "second_moments"):
        assert all(torch.equal(value, restored[key][name]) for name, value in saved["optimizer"][key].items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved["optimizer"]["masters"][name].half())


def test_shards_are_the_pieces_of_every_chunk():
    flat, shape = torch.arange(2 * 3 * 4 * 5), (2, 3, 4)
    shards = [part(flat, shape, rank) for rank in range(4)]
    for rank, shard in enumerate(shards):
        starts = [((block * 3 + chunk) * 4 + rank) * 5 for block in range(2) for chunk in range(3)]
        assert shard.tolist() == [start + i for start in starts for i in range(5)]
    assert torch.equal(joined(torch.cat(shards), shape), flat)


def test_what_it_cannot_do_is_refused_in_one_line(monkeypatch):
    double.install(monkeypatch)
    config, cuda = optim.Config(optimizer=APEX), torch.device("cuda")
    with pytest.raises(ConfigError, match="on one, set OPTIMIZER=apex_lamb"):
        config.check(cuda, torch.float16, 1)
    with pytest.raises(ConfigError, match="set PRECISION=fp16"):
        config.check(cuda, torch.bfloat16, 2)
    with pytest.raises(ConfigError, match="no_copy"):
        config.check(cuda, torch.float16, 2)
    monkeypatch.setattr(distributed, "reduce_scatter", lambda output, inputs, no_copy=False: None)
    config.check(cuda, torch.float16, 2)
    assert not config.is_sharded(cuda)
