"""EMULATE_RANK: one rank of a large job alone holds what that rank would hold, and no number more."""

from __future__ import annotations

import json

import pytest
import torch

from bert import kernels
from bert.core.dist import EmulatedWorld
from bert.core.env import ConfigError, from_env
from bert.model.bert import BertForPreTraining
from bert.model.init import initialize
from bert.pretraining import emulate, memory
from bert.pretraining.config import Config
from bert.pretraining.run import run
from bert.pretraining.train import build

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE = {
    "vocab_size": 211, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384,
    "max_position_embeddings": 48, "layer_norm_large_model": True,
}  # fmt: skip


@pytest.fixture
def job(prepared, tmp_path):
    """Environment of a rank of six in bf16, sharded."""
    (tmp_path / "bert_config.json").write_text(json.dumps(SHAPE))
    settings = {"BERT_CONFIG": str(tmp_path / "bert_config.json"), "OPTIMIZER": "lans", "PRECISION": "bf16"}
    settings |= {"SHARD_OPTIMIZER": "1", "SHARD_GRADIENTS": "1", "BATCHSIZE": "24", "GRADIENT_STEPS": "3"}
    return prepared | settings | {"EMULATE_RANK": "4", "WORLD_SIZE": "6", "SYNTH_DATA": "1", "PACKED": "0"}


def _shards(config, ranks):
    """Each rank's masters, where they belong in the model: (name, first number, numbers)."""
    for rank in ranks:
        world = EmulatedWorld(len(ranks), rank, CPU, META)
        model, step = build(config, world, 7)
        assert all(p.is_meta for p in model.parameters()), "what is whole has no numbers"
        shard = step.optimizer.shard_state()
        for name, start, begin, size in shard["segments"]:
            yield name, start, shard["parts"]["masters"][begin : begin + size]


def test_the_emulated_ranks_together_hold_the_first_weights_each_number_once(job):
    config = from_env(Config, job)
    with torch.device("meta"):
        model = BertForPreTraining(config.model, kernels.select(kernels.Config(fused="none"), CPU))
    model.to_empty(device=CPU)
    initialize(model, 7)
    missing = {name: torch.ones(p.numel(), dtype=torch.bool) for name, p in model.named_parameters()}
    weights = dict(model.named_parameters())
    for name, start, numbers in _shards(config, range(6)):
        assert torch.equal(numbers, weights[name].detach().view(-1)[start : start + len(numbers)])
        assert missing[name][start : start + len(numbers)].all(), "held twice"
        missing[name][start : start + len(numbers)] = False
    assert not any(places.any() for places in missing.values())


@pytest.mark.parametrize("changed", [{}, {"SHARD_GRADIENTS": "0"}, {"RECOMPUTE_LAYERS": "1"}], ids=str)
def test_a_rank_holds_what_was_foreseen_and_its_step_a_tenth_more_or_less(job, changed):
    config = from_env(Config, job | changed)
    foreseen, found = memory.estimate(memory.Plan.of(config)), emulate.measure(config)
    assert {name: foreseen[name] for name in found.persistent} == found.persistent
    together = sum(found.persistent.values()) + found.transient
    assert together == pytest.approx(sum(foreseen.values()), rel=0.1)
    # Of six ranks: masters and two moments in fp32, a sum of gradients, the weights that this one updates.
    numbers = sum(p for p in found.materialized.values())
    parameters = found.persistent["states"] * 6 / 12
    assert numbers == pytest.approx(parameters * (12 + 4 + 2) / 6, rel=0.01)


def test_a_step_of_an_emulated_rank_takes_other_ranks_for_its_own(job):
    """Where there is room for all, as on a GPU."""
    third, whole = torch.empty(2), torch.arange(6.0)
    EmulatedWorld(3, 1, CPU, CPU).reduce_scatter(third, whole)
    assert third.tolist() == [2, 3], "its own part of the average"
    config = from_env(Config, job | {"GRADIENT_STEPS": "1"})
    world = EmulatedWorld(6, 4, CPU, CPU)
    model, step = build(config, world, 7)
    step.optimizer.gather()
    assert all(p.isfinite().all() for p in model.parameters())
    first, layout = step.optimizer.weights, step.optimizer.layout
    for one in layout.slices:
        own = one.of_shard(first.shard)
        assert torch.equal(one.of_whole(first.whole).view(6, -1), own.expand(6, -1))
    before = step.optimizer.shard.masters.clone()
    found = step(emulate.dummy_batches(config, world), 0.01)
    assert found.finite
    assert (step.optimizer.shard.masters != before).float().mean() > 0.9


def test_the_command_says_what_a_rank_holds_and_trains_nothing(job, tmp_path, capsys):
    assert run(job) == 0
    said = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert said["rank"][:3] == ["4", "of", "6,"]
    assert said.keys() >= {"weights", "gradients", "states", "activations", "together", "this"}
    assert not (tmp_path / "run").exists()


def _check(config):
    config.check()
    emulate.check(config)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"EMULATE_RANK": "6"}, "export WORLD_SIZE, the ranks of the job"),
        ({"RANK": "1"}, "start one process"),
        ({"SHARD_OPTIMIZER": "0", "SHARD_GRADIENTS": "0", "GRADIENT_STEPS": "1"}, "set SHARD_OPTIMIZER=1"),
        ({"PROFILE_STEPS": "2,3"}, "writes nothing: unset CAPTURE and PROFILE_STEPS"),
        ({"CAPTURE": "inputs"}, "writes nothing: unset CAPTURE and PROFILE_STEPS"),
        ({"CLIP": "before", "SHARD_GRADIENTS": "0"}, "set PRECISION=bf16, CLIP=after and no SHARD_GROUP=1"),
    ],
)
def test_a_rank_that_cannot_be_emulated_is_one_line(job, changed, words):
    config = from_env(Config, job | changed)
    with pytest.raises(ConfigError, match=words):
        _check(config)


def test_memory_is_counted_on_devices_without_numbers_too():
    kept = torch.empty(1000, device="meta")
    with memory.Peak([kept]) as peak:
        twice = kept + kept
        del twice
    assert peak.most == 8000
