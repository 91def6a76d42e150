"""The memory estimate of --check, against that of a step on this machine."""

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert import optim
from bert.data.batch import make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.model.recompute import Recomputation
from bert.pretraining import memory
from bert.pretraining.config import PretrainingConfig
from bert.training.step import build_step
from common.env import ConfigError, from_env

from ..peak import Peak
from ..plain import alone, model_of
from ..ranks import run_ranks

SHAPE = BertConfig(
    vocab_size=211, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384,
    max_position_embeddings=48,
)  # fmt: skip


PRE_NORM = dataclasses.replace(SHAPE, layer_norm_large_model=True, attention_probs_dropout_prob=0.0)  # fmt: skip


def _plan(batch, **settings):
    common = {
        "model": SHAPE, "optimizer": optim.OptimizerConfig(sharded=True), "dtype": torch.float32, "fused": False, "num_ranks": 1,
        "tokens": batch.num_tokens, "masked": batch.num_masked, "length": 48, "accumulate": False,
        "recompute_layers": 0, "device_type": "cpu",
    }  # fmt: skip
    return memory.Plan(**{**common, **settings})


def _check_estimate(plan, batch, world):
    """Within a tenth of the most bytes that tensors hold in a step."""
    model = model_of(plan.model)
    if plan.recompute_layers:
        model.recompute(Recomputation(plan.recompute_layers, random_state=True))
    step = build_step(
        model, Precision(dtype=plan.dtype), plan.optimizer, world,
        accumulate=plan.accumulate, fused_update=False,
    )  # fmt: skip
    buckets = step.optimizer.buckets
    held = buckets.whole, buckets.shard, buckets.received
    gradients = [tensor for tensor in held if tensor is not None]
    with Peak([*step.optimizer.state_tensors(), *gradients]) as peak:
        step([batch], 0.01)
    assert sum(memory.estimate(plan).values()) == pytest.approx(peak.most, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (24, {}),
        (24, {"recompute_layers": 1}),
        (4, {"recompute_layers": 2, "dtype": torch.bfloat16, "accumulate": True}),
        (24, {"model": PRE_NORM}),
        (4, {"optimizer": optim.OptimizerConfig(optimizer="lans", sharded=False)}),
    ],
    ids=["plain", "recompute", "bf16", "pre_norm", "replicated"],
)
def test_the_estimate_is_near_what_a_step_takes(rows, settings, make_records, batch_of):
    records = make_records(rows, packed=False)
    batch = batch_of(records, np.arange(rows))
    plan = _plan(batch, length=_mean_length(batch), **settings)
    _check_estimate(plan, batch, alone())


def _on_a_rank(world):
    batch = make_batch(synthetic_records(24, 48, 211, False, seed=0), range(24), 48)
    lans = optim.OptimizerConfig(optimizer="lans", sharded=True)
    more = {"optimizer": lans, "num_ranks": world.size, "length": _mean_length(batch)}
    _check_estimate(_plan(batch, **more), batch, world)


def test_the_estimate_holds_on_each_of_two_ranks():
    run_ranks(_on_a_rank, 2)


def _mean_length(batch):
    """Of the sequence in which a token is, on average: the probabilities of attention are as many as that."""
    lengths = batch.cu_seqlens.diff().double()
    return float(lengths.square().sum() / lengths.sum())


def test_a_gpu_that_is_too_small_is_named_before_the_run(prepared, monkeypatch):
    config = from_env(PretrainingConfig, prepared | {"CHECKPOINT_DIR": "/nowhere"})
    assert "this machine has" in memory.describe(config)
    on_a_gpu = dataclasses.replace(memory.Plan.of(config), device_type="cuda")
    monkeypatch.setattr(memory.Plan, "of", lambda config: on_a_gpu)
    fits = "the GPU has 2.0; host 0.5 GiB for the ranks of a node; this machine has 8.0"
    for gpu, node, words in (
        (2, 8, fits),
        (1, 8, "out of memory: 1.0 GiB per rank.*the GPU has 1.0: lower BATCHSIZE"),
        (2, 0.25, r"out of memory: .*this machine has 0\.2: set SHARD_OPTIMIZER=1"),
    ):
        told = SimpleNamespace(total_memory=gpu * memory.GIB)
        capacity = int(node * memory.GIB)
        properties = lambda _, told=told: told  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(memory, "host_capacity", lambda most=capacity: most)
        if words == fits:
            assert words in memory.describe(config)
            continue
        with pytest.raises(ConfigError, match=words):
            memory.describe(config)


def test_cpus_that_are_too_small_are_refused_for_a_run_on_cpus(prepared, monkeypatch):
    monkeypatch.setattr(memory, "host_capacity", lambda: 1)
    with pytest.raises(ConfigError, match="start fewer ranks on a node"):
        memory.describe(from_env(PretrainingConfig, prepared))
    told = memory.describe(from_env(PretrainingConfig, prepared | {"DEVICE": "auto"}))
    said = "this machine has 0.0: TOO LITTLE for a run here (not tested for another"
    assert said in told


def test_a_node_holds_what_its_ranks_hold_together(prepared):
    """Of 6 ranks on 3 nodes, beside the processes themselves: weights to begin with, the state while
    untimed steps are taken, and then a checkpoint.
    """

    def needed(**settings):
        of = {"WORLD_SIZE": "6", "DGXNNODES": "3", "PRECISION": "bf16"}
        config = from_env(PretrainingConfig, prepared | of | settings)
        plan = dataclasses.replace(memory.Plan.of(config), device_type="cuda")
        held = {"weights": 200, "states": 1000}
        whole = memory.host_bytes(plan, config.checkpoint, held)
        return whole - 2 * memory.PROCESS, config

    saving = {"CHECKPOINT_DIR": "/nowhere"}
    beginning, config = needed(SHARD_OPTIMIZER="0")
    numbers = sum(p.numel() for p in memory.meta_model(config.model).parameters())
    assert beginning == 2 * 4 * numbers
    assert needed(SHARD_OPTIMIZER="1")[0] == 2 * (200 + 1000)
    assert needed(SHARD_OPTIMIZER="1", **saving)[0] == 6 * 1000, "rank 0 gathers"
    sharded = needed(SHARD_OPTIMIZER="1", CHECKPOINT_SHARDS="1", **saving)[0]
    assert sharded == 2 * (200 + 1000), "less for the checkpoint"


def test_the_limit_of_a_control_group_counts(tmp_path):
    whole = memory.host_capacity(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    group = tmp_path / "proc" / "self" / "cgroup"
    older = "sys/fs/cgroup/memory/memory.limit_in_bytes"
    for said, file, limit in (
        ("0::/slurm/job_7\n", "sys/fs/cgroup/slurm/memory.max", "3000\n"),
        ("5:cpu:/a\n9:memory:/b\n", older, "2000\n"),
    ):
        group.write_text(said)
        assert memory.host_capacity(tmp_path) == whole
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("max\n")
        assert memory.host_capacity(tmp_path) == whole
        (tmp_path / file).write_text(limit)
        assert memory.host_capacity(tmp_path) == int(limit)


def test_every_published_size_fits_where_its_configs_run(repository):
    """H100 with 80 GB; the sizes of docs/train.md."""
    sizes = ("1.5b", 8, 32, 0), ("5b", 8, 32, 1), ("5b", 128, 24, 1)
    for name, ranks, rows, layers in sizes:
        models = repository / "configs" / "models"
        batch = SimpleNamespace(num_tokens=rows * 128, num_masked=rows * 20)
        plan = _plan(
            batch, model=BertConfig.from_json(models / f"bert_{name}.json"), num_ranks=ranks,
            recompute_layers=layers, optimizer=optim.OptimizerConfig(optimizer="lans", sharded=True),
            dtype=torch.bfloat16, fused=True, accumulate=True, device_type="cuda", length=128,
        )  # fmt: skip
        parts = memory.estimate(plan)
        assert sum(parts.values()) < 80e9
        states = 3 * 2 * parts["weights"] * ranks / (ranks + 1)
        assert parts["states"] * ranks == pytest.approx(states, rel=0.01)


# apex runs on GPUs alone.
@pytest.mark.parametrize("optimizer", sorted(optim.RULES.keys() - {"apex_lamb"}))
@pytest.mark.parametrize("sharded", [False, True])
def test_an_update_makes_as_many_tensors_as_the_estimate_counts(optimizer, sharded):
    model = memory.meta_model(SHAPE)
    settings = optim.OptimizerConfig(optimizer=optimizer, sharded=sharded)
    world = alone()
    world.device = memory.META
    engine = optim.build(settings, model, None, world, accumulate=True, fused=False)
    with Peak() as update:
        engine.step(0.1)
    expected = settings.rule_class.num_temporaries * engine.shard.masters.nbytes
    assert update.most == pytest.approx(expected, rel=0.02)
