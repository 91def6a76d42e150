"""Groups of ranks that share the optimizer's state: the same updates as one group of all, the same
bits in each; what of a slice of the gradient is started when.
"""

import functools
import threading

import numpy as np
import pytest
import torch
import torch.distributed as distributed

from bert import optim
from bert.checkpoint import sharded
from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.optim.gradients import SliceReduction
from bert.optim.mesh import Mesh
from common.env import ConfigError

from ..conftest import LENGTH, SHAPE, VOCABULARY
from ..plain import model_of, step_of
from ..ranks import run_ranks
from ..states import same

WIDE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
MODEL = BertConfig(**SHAPE | WIDE, initializer_range=0.2)
EXACT = Precision(dtype=torch.float32)
# Of the sums' order alone, after two steps in fp64. In bf16 the sums are rounded to 8 bits before
# they are averaged over the groups, and again after.
TOLERANCE = {"fp64": 1e-10, "bf16": 2e-2, "fp8": 2e-2}
CASES = [
    ("fp64", 1, {}),
    ("fp64", 2, {"clip": "before"}),
    ("fp64", 2, {"optimizer": "lans"}),
    ("fp64", 1, {"optimizer": "adamw"}),
    ("bf16", 2, {"allreduce_dtype": "weights"}),
    ("fp8", 1, {"clip": "bucket"}),
]


def _step(world, precision, accumulate, group, **settings):
    exact = precision == "fp64"
    model = model_of(MODEL, dtype=torch.float64 if exact else torch.float32)
    shared = {"sharded": True, "max_grad_norm": 0.5, "shard_group": str(group)}
    numerics = EXACT if exact else precision
    return model, step_of(model, numerics, world, accumulate > 1, **shared, **settings)


@functools.cache
def _batches(accumulate, seed):
    records = synthetic_records(2 * accumulate, LENGTH, VOCABULARY, False, seed)
    rows = [np.arange(2 * n, 2 * n + 2) for n in range(accumulate)]
    return [make_batch(records, row, LENGTH) for row in rows]


def _train(world, step, accumulate, numbers):
    """Steps with dropout. Returns the norms."""
    norms = []
    for number in numbers:
        torch.manual_seed(100 * number + world.rank)
        batches = _batches(accumulate, 10 * number + world.rank)
        norms.append(step(batches, 0.01).norm.double())
    step.optimizer.gather()
    return torch.stack(norms)


def _weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _check_groups(world, group, cases):
    for precision, accumulate, settings in cases:
        found = []
        for size in (world.size, group):
            model, step = _step(world, precision, accumulate, size, **settings)
            norms = _train(world, step, accumulate, range(2))
            found.append((_weights(model).double(), norms))
        (whole, norm), (grouped, norm_in_groups) = found
        tolerance, case = TOLERANCE[precision], (precision, settings)
        assert (whole - grouped).norm() <= tolerance * whole.norm(), case
        if settings.get("clip") != "before":
            torch.testing.assert_close(norm, norm_in_groups, rtol=tolerance, atol=0)
        everyones = [torch.empty_like(grouped) for _ in range(world.size)]
        distributed.all_gather(everyones, grouped)
        assert same(everyones, [grouped] * world.size), case


def _check_checkpoints(world, folder):
    """Moves a state from groups to one group and back, whole and in shards; bit for bit if the layout is the same."""
    _, step = _step(world, "fp64", 2, 2, optimizer="lans")
    _train(world, step, 2, range(2))
    whole = [step.state_dict()]
    distributed.broadcast_object_list(whole, 0)
    shard, index = step.shard_state()
    assert sum(size for *_, size in shard["segments"]) > 0, "each has some"
    shard["parts"] = {name: flat.clone() for name, flat in shard["parts"].items()}
    own = {"rank": world.rank, "num_ranks": world.size}
    part = sharded.Part(**own, token=1, abandoned=threading.Event())
    path = part.write(folder, 2, {"shard": shard, "index": index}, keep=9)
    world.barrier()
    read = sharded.read(path)
    masters = read["optimizer"]["masters"]
    for name, expected in whole[0]["optimizer"]["masters"].items():
        held = sum(len(numbers) for _, _, numbers in masters.of(name))
        assert held == expected.numel(), "every number once"
        assert torch.equal(masters[name], expected)
    weights = {}
    for group in (2, world.size, 1):
        loaded = []
        for state in (whole[0], read):
            model, resumed = _step(world, "fp64", 2, group, optimizer="lans")
            resumed.load_state_dict(state)
            loaded.append([*model.parameters(), *resumed.state_tensors()])
        assert same(*loaded), "whole and in shards"
        _train(world, resumed, 2, range(2, 4))
        weights[group] = _weights(model)
        assert (weights[group] - weights[2]).norm() <= 1e-10 * weights[2].norm()
    _train(world, step, 2, range(2, 4))
    assert torch.equal(_weights(step.model), weights[2])


def _check_four(world, folder):
    values, of_group = torch.tensor([[1.0, world.rank]]), world.rank // 2
    assert Mesh(world, 2).sum(values).tolist() == [[2.0, 4 * of_group + 1]]
    _check_groups(world, 2, CASES)
    _check_groups(world, 1, CASES[:1])
    _check_checkpoints(world, folder)


def test_four_ranks_in_groups_take_the_steps_of_one_and_exchange_checkpoints(tmp_path):
    run_ranks(_check_four, 4, arguments=(tmp_path,))


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 4])
def test_eight_ranks_in_groups_take_the_steps_of_one_group(group):
    run_ranks(_check_groups, 8, arguments=(group, CASES))


@pytest.mark.parametrize(
    ("setting", "ranks", "per_node", "size"),
    [
        (None, 16, 8, 8), (None, 8, 8, 8), (None, 8, 0, 8), (None, 4, 1, 4), (None, 12, 8, 12),
        ("node", 16, 8, 8), ("node", 4, 1, 1), ("all", 16, 8, 16), ("4", 16, 8, 4), ("1", 16, 8, 1),
    ],
)  # fmt: skip
def test_the_size_of_a_group_follows_from_the_layout(setting, ranks, per_node, size):
    config = optim.OptimizerConfig(shard_group=setting)
    assert config.group_size(ranks, per_node) == size


@pytest.mark.parametrize(
    ("setting", "per_node"), [("3", 8), ("0", 8), ("nodes", 8), ("node", 5), ("32", 8)]
)
def test_an_impossible_group_is_refused_in_one_line(setting, per_node):
    with pytest.raises(ConfigError, match=f"SHARD_GROUP={setting} with 16 ranks"):
        optim.OptimizerConfig(shard_group=setting).group_size(16, per_node)


class _Work:
    """A collective whose result is there only after the wait, as on a real network."""

    def __init__(self, events, name, output, value):
        self.events, self.name, self.output, self.value = events, name, output, value
        events.append(f"start {name}")

    def wait(self):
        self.events.append(f"end {self.name}")
        self.output.fill_(self.value)


class _Mesh:
    """Averages are 2 in the group and 3 over the groups, whatever is sent."""

    def __init__(self, size, groups):
        self.size, self.groups, self.events = size, groups, []
        self.world, self.within, self.across = self, "group", "groups"

    def reduce_scatter(self, piece, sent, to):
        assert to == "group"
        return _Work(self.events, "group", piece, 2.0)

    def average(self, piece, over):
        assert over == "groups"
        self.averaged = piece.clone()
        return _Work(self.events, "groups", piece, 3.0)


IN_GROUP, ACROSS = ["start group", "end group"], ["start groups", "end groups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "groups", "events", "averaged", "result"),
    [
        (2, 2, [*IN_GROUP, *ACROSS], 2.0, 3.0),
        (2, 1, IN_GROUP, None, 2.0),
        (1, 2, ACROSS, 5.0, 3.0),
    ],
    ids=["group, then across", "no other groups", "a group of one"],
)
def test_a_slice_is_first_averaged_in_its_group(
    size, groups, events, averaged, result, dtype
):
    mesh, target = _Mesh(size, groups), torch.full((4,), 5.0)
    sent = target if size == 1 else torch.full((4 * size,), 9.0)
    reduction = SliceReduction(mesh, sent.to(dtype), target)
    assert mesh.events == events[:1]
    if groups == size == 2:
        for _ in range(2):  # the second time nothing is left to do
            reduction.start_cross_group()
            assert mesh.events == events[:3]
    reduction.finish()
    assert mesh.events == events
    assert target.tolist() == [result] * 4
    if averaged:
        assert mesh.averaged.tolist() == [averaged] * 4
        assert mesh.averaged.dtype == dtype
