"""ENGINE=deepspeed on two real processes: curves, weights, states and whole runs are those of our own engine."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from bert.deepspeed.settings import merged
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.pretraining import build
from bert.pretraining.config import PretrainingConfig
from bert.training.debug import differences
from common.env import from_env

from ..ranks import run_ranks
from ..states import losses, newest, values, zero_json
from .engines import (
    FP32,
    STAGES,
    curve,
    deepspeed_step,
    model_of,
    own_step,
    same_optimizer,
)

pytestmark = pytest.mark.deepspeed


def _compare(world, config, folder, steps, cases):
    """cases: rules, micro-batches and settings beside the stage of ZeRO."""
    for rule, accumulate, others in cases:
        own = own_step(world, config, rule, FP32, accumulate)
        expected = curve(world, own, 0, steps, accumulate)
        state = own.state_dict()["optimizer"]
        for zero in STAGES:
            engine = deepspeed_step(
                world, config, rule, FP32, accumulate, folder, **zero, **others
            )
            found = curve(world, engine, 0, steps, accumulate)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            theirs = engine.state_dict()["optimizer"]  # of rank 0 alone
            if world.is_main:
                same_optimizer(theirs, state, atol=1e-5)


def test_rules_in_every_stage_have_curves_and_states_of_our_own_engine(tiny, tmp_path):
    """Those with norms see whole parameters, offloaded too."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    cases = [("adamw", 1, {}), ("lamb", 2, {}), ("lans", 1, offload)]
    run_ranks(_compare, 2, arguments=(tiny, tmp_path, 6, cases))


def _recomputed(world, config, folder):
    """With dropout: recomputation gives the same."""
    for zero in STAGES:
        kept, again = (
            deepspeed_step(world, config, "lans", FP32, 2, folder, recompute=k, **zero)
            for k in (0, 1)
        )
        curves = [curve(world, step, 0, 3, 2) for step in (again, kept)]
        assert torch.equal(*curves), zero


def test_recomputed_layers_give_the_same_losses_and_norms_bit_for_bit(tiny, tmp_path):
    run_ranks(_recomputed, 2, arguments=(tiny, tmp_path))


def _low_precision(world, config, folder):
    precision = Precision(dtype=torch.bfloat16)
    exact = model_of(config).state_dict()
    expected = curve(world, own_step(world, config, "lamb", precision, 1), 0, 6, 1)
    for zero in STAGES:
        engine = deepspeed_step(world, config, "lamb", precision, 1, folder, **zero)
        state = engine.state_dict()["optimizer"]
        for name, tensor in state.get("masters", {}).items():
            assert torch.equal(tensor, exact[name]), name
        found = curve(world, engine, 0, 6, 1)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        with engine.gathered() as model:
            assert next(model.parameters()).dtype == torch.bfloat16


def test_in_low_precision_the_masters_are_the_weights_before_the_cast(tiny, tmp_path):
    run_ranks(_low_precision, 2, arguments=(tiny, tmp_path))


def _begin_with(world, environment, saved):
    _, trained = build.build(from_env(PretrainingConfig, merged(environment)), world, 7)
    state = trained.state_dict()["optimizer"]
    expected = torch.load(saved, weights_only=True)
    if world.is_main:
        assert state["masters"].keys() == expected.keys()
    for name, tensor in state["masters"].items() if world.is_main else ():
        assert torch.equal(tensor, expected[name]), name
    with trained.gathered() as whole:
        for name, parameter in whole.named_parameters():
            assert torch.equal(parameter, expected[name].bfloat16()), name


def test_a_run_begins_with_the_full_precision_of_its_checkpoint(prepared, tmp_path):
    config = BertConfig.from_json(tmp_path / "phase1" / "bert_config.json")
    saved = tmp_path / "weights.pt"
    torch.save(dict(model_of(config).state_dict()), saved)
    given = {"PRECISION": "bf16", "WORLD_SIZE": "2", "INIT_CHECKPOINT": str(saved)}
    environment = prepared | zero_json(tmp_path) | given
    run_ranks(_begin_with, 2, arguments=(environment, saved))


def _loss_scale(world, config, folder):
    """From a scale that overflows: the steps that are skipped, the scales and the losses are our own engine's."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # Slow without AVX-512, and right.
    CPU_Accelerator.is_fp16_supported = lambda self: True
    settings = {"init_loss_scale": 2.0**27, "growth_interval": 3}
    precision = Precision(dtype=torch.float16, **settings)

    def scales_and_figures(step):
        seen, figures = [], []
        for number in range(14):
            figures.append(curve(world, step, number, number + 1, 1))
            finite = bool(torch.isfinite(figures[-1][0, -1]))
            seen.append((float(step.scaler.scale), finite))
        return seen, figures[-1]

    own = own_step(world, config, "lamb", precision, 1)
    scales, figures = scales_and_figures(own)
    assert not scales[0][1], "the first step overflows"
    grows = (later > sooner for (sooner, _), (later, _) in itertools.pairwise(scales))
    assert any(grows)
    for zero in STAGES:
        engine = deepspeed_step(world, config, "lamb", precision, 1, folder, **zero)
        theirs, found = scales_and_figures(engine)
        assert theirs == scales, zero
        torch.testing.assert_close(found, figures, atol=0.01, rtol=0.01)
        state = engine.state_dict()["scaler"]
        assert state == own.state_dict()["scaler"]
        engine.scaler.scale.fill_(1.0)
        ours = [own.state_dict()]
        torch.distributed.broadcast_object_list(ours, 0)
        engine.load_state_dict(ours[0])
        assert engine.optimizer.zero.loss_scaler.loss_scale == state["scale"]


def test_in_fp16_loss_scale_and_skipped_steps_are_our_own_engines(tiny, tmp_path):
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
            joined = torch.cat([begun, continued])
            torch.testing.assert_close(joined, whole, atol=2e-5, rtol=1e-5)
        with again.gathered() as model:
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        last = again.state_dict()  # whole on rank 0
        for name, tensor in weights.items() if world.is_main else ():
            assert torch.equal(tensor, last["optimizer"]["masters"][name]), name


def test_a_state_resumes_exactly_and_moves_between_engines_both_ways(tiny, tmp_path):
    run_ranks(_exchange, 2, arguments=(tiny, tmp_path))


@pytest.fixture
def environ(prepared, tmp_path):
    """environ(stage or 0 for our own engine, **variables) of a run of 8 steps and two evaluations."""

    def make(stage, **variables):
        common = {"OPTIMIZER": "adamw", "LR": "0.003", "PRECISION": "fp32"}
        twice = dict.fromkeys(("EVAL_ITER_SAMPLES", "EVAL_ITER_START_SAMPLES"), "48")
        engine = zero_json(tmp_path, stage) if stage else {}
        folder = {"RUN_DIR": str(tmp_path / f"run_{stage}")}
        return prepared | common | twice | engine | folder | variables

    return make


def _losses(finished):
    return [float(loss) for loss in losses(finished)]


def test_a_run_in_stage_2_reports_and_evaluates_as_with_our_own(environ, run_bert):
    looked_at = {"CAPTURE": "1", "PROFILE_STEPS": "2,3"}
    own, other = environ(0, **looked_at), environ(2, **looked_at)
    reports = [_losses(run_bert(each, 2, status=3)) for each in (own, other)]
    assert len(reports[0]) == 4
    assert reports[1] == pytest.approx(reports[0], abs=2e-4)
    assert len(values(own, "eval_accuracy")) == 2
    logged = "eval_accuracy global_batch_size opt_base_learning_rate run_stop"
    for key in logged.split():
        assert values(other, key) == values(own, key), key
    for rank in "01":
        name = f"capture_0/step_1_rank_{rank}.safetensors"
        files = [Path(run["RUN_DIR"], name) for run in (own, other)]
        found = {name: relative for name, _, relative in differences(*files)}
        words = {word for name in found for word in name.split(".")}
        assert {"inputs", "activation", "gradient"} <= words
        assert max(found.values()) < 1e-4, max(found, key=lambda name: found[name])
    trace = json.loads(Path(other["RUN_DIR"], "trace_0.json").read_text())
    assert trace["traceEvents"]


def test_masked_lm_alone_trains_is_evaluated_and_saved_as_with_our_own_engine(
    environ, run_bert, tmp_path
):
    """NSP=0: without pooler and next-sentence head in model, log and checkpoint."""
    found = []
    for engine in (0, 2):
        folder = tmp_path / str(engine)
        settings = {"NSP": "0", "TARGET_MLM_ACCURACY": "0"}
        environment = environ(engine, CHECKPOINT_DIR=str(folder), **settings)
        finished = run_bert(environment, 2, status=0)
        assert "nsp" not in finished.stderr
        found.append((_losses(finished), values(environment, "eval_accuracy")))
        heads = ("bert.pooler.", "cls.seq_relationship.")
        assert not [name for name in newest(folder)["model"] if name.startswith(heads)]
    assert len(found[0][0]) == 4
    assert found[1][0] == pytest.approx(found[0][0], abs=2e-4)
    assert found[1][1] == found[0][1]


def test_a_rank_alone_with_another_json_is_named(environ, run_bert):
    odd = {"DEEPSPEED_CONFIG": environ(2)["DEEPSPEED_CONFIG"]}
    said = run_bert(environ(1), 2, odd=odd, status=2).stderr.splitlines()[-1]
    another = r"ranks differ: rank 1 on \S+ has DEEPSPEED_CONFIG={.*'stage': 2"
    assert re.search(another, said), said
