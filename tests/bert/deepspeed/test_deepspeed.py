"""ENGINE=deepspeed on two real processes: the curves, weights and states are those of our own
engine.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from bert.deepspeed.settings import merged
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.pretraining import build
from bert.pretraining.config import PretrainingConfig
from common.env import from_env

from ..ranks import run_ranks
from .engines import FP32, STAGES, curve, deepspeed_step, model_of, own_step

pytestmark = pytest.mark.deepspeed


def _same_state(world, mine, other, tolerance):
    """Fails if masters or states differ. The gradient of a key's bias is 0 except rounding, which
    Adam amplifies.
    """
    mine, other = mine.state_dict()["optimizer"], other.state_dict()["optimizer"]
    assert mine.keys() == other.keys()
    assert mine["num_steps"] == other["num_steps"]
    for part in mine.keys() - {"num_steps"} if world.is_main else ():
        for name in mine[part].keys() - {
            f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(2)
        }:
            torch.testing.assert_close(
                mine[part][name],
                other[part][name],
                atol=tolerance,
                rtol=1e-3,
                msg=f"{part} {name}",
            )


def _compare(world, config, folder, steps, cases):
    for rule, accumulate, zero in cases:
        own = own_step(world, config, rule, FP32, accumulate)
        expected = curve(world, own, 0, steps, accumulate)
        engine = deepspeed_step(world, config, rule, FP32, accumulate, folder, **zero)
        found = curve(world, engine, 0, steps, accumulate)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        _same_state(world, own, engine, 1e-5)


def test_adamw_in_every_stage_gives_the_loss_curve_of_our_own_engine(tiny, tmp_path):
    run_ranks(
        _compare,
        2,
        arguments=(tiny, tmp_path, 20, [("adamw", 1, zero) for zero in STAGES]),
    )


def test_rules_with_norms_see_whole_parameters_in_every_stage_and_offloaded(
    tiny, tmp_path
):
    offload = {"offload_optimizer": {"device": "cpu"}}
    cases = [
        *(("lamb", 2, zero) for zero in STAGES),
        *(("lans", 1, zero | offload) for zero in STAGES),
    ]
    run_ranks(_compare, 2, arguments=(tiny, tmp_path, 6, cases))


def _recomputed(world, config, folder):
    """With dropout: recomputation gives the same."""
    for zero in STAGES:
        kept, again = (
            deepspeed_step(world, config, "lans", FP32, 2, folder, recompute=k, **zero)
            for k in (0, 1)
        )
        assert torch.equal(curve(world, again, 0, 3, 2), curve(world, kept, 0, 3, 2)), (
            zero
        )


def test_recomputed_layers_give_the_same_losses_and_norms_bit_for_bit(tiny, tmp_path):
    run_ranks(_recomputed, 2, arguments=(tiny, tmp_path))


def _low_precision(world, config, folder):
    precision = Precision(dtype=torch.bfloat16)
    exact = model_of(config).state_dict()
    for zero in STAGES:
        engine = deepspeed_step(world, config, "lamb", precision, 1, folder, **zero)
        state = engine.state_dict()["optimizer"]
        for name, tensor in state.get("masters", {}).items():
            assert torch.equal(tensor, exact[name]), name
        expected = curve(world, own_step(world, config, "lamb", precision, 1), 0, 6, 1)
        torch.testing.assert_close(
            curve(world, engine, 0, 6, 1), expected, atol=0.02, rtol=0.02
        )
        with engine.gathered() as model:
            assert next(model.parameters()).dtype == torch.bfloat16


def test_in_low_precision_the_masters_are_the_weights_before_the_cast(tiny, tmp_path):
    run_ranks(_low_precision, 2, arguments=(tiny, tmp_path))


def _begin_with(world, environment, saved):
    _, trained = build.build(from_env(PretrainingConfig, merged(environment)), world, 7)
    state, expected = (
        trained.state_dict()["optimizer"],
        torch.load(saved, weights_only=True),
    )
    if world.is_main:
        assert state["masters"].keys() == expected.keys()
    for name, tensor in state["masters"].items() if world.is_main else ():
        assert torch.equal(tensor, expected[name]), name
    with trained.gathered() as whole:
        for name, parameter in whole.named_parameters():
            assert torch.equal(parameter, expected[name].bfloat16()), name


def test_a_run_begins_with_the_weights_of_its_checkpoint_in_full_precision(
    prepared, tmp_path
):
    config = BertConfig.from_json(tmp_path / "phase1" / "bert_config.json")
    saved = tmp_path / "weights.pt"
    torch.save(
        {name: p.detach().clone() for name, p in model_of(config).named_parameters()},
        saved,
    )
    given = tmp_path / "ds.json"
    given.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    environment = prepared | {
        "ENGINE": "deepspeed", "DEEPSPEED_CONFIG": str(given), "PRECISION": "bf16", "WORLD_SIZE": "2", "INIT_CHECKPOINT": str(saved),
    }  # fmt: skip
    run_ranks(_begin_with, 2, arguments=(environment, saved))


def _loss_scale(world, config, folder):
    """From a scale that overflows: the steps that are skipped, the scales and the losses are our
    own engine's.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # Slow without AVX-512, and right.
    CPU_Accelerator.is_fp16_supported = lambda self: True
    precision = Precision(
        dtype=torch.float16, init_loss_scale=2.0**27, growth_interval=3
    )
    for zero in STAGES:
        steps = [
            own_step(world, config, "lamb", precision, 1),
            deepspeed_step(world, config, "lamb", precision, 1, folder, **zero),
        ]
        scales, figures = [], []
        for step in steps:
            seen = []
            for number in range(14):
                found = curve(world, step, number, number + 1, 1)
                seen.append(
                    (float(step.scaler.scale), bool(torch.isfinite(found[0, -1])))
                )
            figures.append(found)
            scales.append(seen)
        assert scales[0] == scales[1], zero
        assert not scales[0][0][1], "the first step overflows"
        assert any(
            later > sooner for (sooner, _), (later, _) in itertools.pairwise(scales[0])
        ), "and the scale grows"
        torch.testing.assert_close(figures[1], figures[0], atol=0.01, rtol=0.01)
        state = steps[1].state_dict()["scaler"]
        assert state == steps[0].state_dict()["scaler"]
        steps[1].scaler.scale.fill_(1.0)
        ours = [steps[0].state_dict()]
        torch.distributed.broadcast_object_list(ours, 0)
        steps[1].load_state_dict(ours[0])
        assert steps[1].optimizer.zero.loss_scaler.loss_scale == state["scale"]


def test_in_fp16_the_loss_scale_and_the_skipped_steps_are_those_of_our_own_engine(
    tiny, tmp_path
):
    run_ranks(_loss_scale, 2, arguments=(tiny, tmp_path))


def _exchange(world, config, folder):
    """Half of the steps by one engine, the rest by another, from its state."""
    whole = curve(world, own_step(world, config, "lamb", FP32, 1), 0, 8, 1)
    for zero in STAGES:
        engine = deepspeed_step(world, config, "lamb", FP32, 1, folder, **zero)
        begun = curve(world, engine, 0, 4, 1)
        state = [engine.state_dict()]
        torch.distributed.broadcast_object_list(state, 0)
        again = deepspeed_step(world, config, "lamb", FP32, 1, folder, **zero)
        again.load_state_dict(state[0])
        rest = curve(world, again, 4, 8, 1)
        # Bit for bit: nothing is missing.
        assert torch.equal(rest, curve(world, engine, 4, 8, 1)), zero
        own = own_step(world, config, "lamb", FP32, 1)
        own.load_state_dict(state[0])
        for continued in (rest, curve(world, own, 4, 8, 1)):
            torch.testing.assert_close(
                torch.cat([begun, continued]), whole, atol=2e-5, rtol=1e-5
            )
        with again.gathered() as model:
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        if world.is_main:
            last = again.state_dict()
        else:
            again.state_dict()
        for name, tensor in weights.items() if world.is_main else ():
            assert torch.equal(tensor, last["optimizer"]["masters"][name]), name


def test_a_state_resumes_exactly_and_moves_between_engines_both_ways(tiny, tmp_path):
    run_ranks(_exchange, 2, arguments=(tiny, tmp_path))
