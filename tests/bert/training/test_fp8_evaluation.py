"""Evaluation in fp8 computes what training would with the current weights, and does not affect
training.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from bert.kernels.fp8 import linear as fp8_linear
from bert.training import evaluate
from bert.training.evaluate import EvaluationGraph, Evaluator, warm_up

from .. import no_gpu
from ..plain import CPU, alone, model_of, step_of
from ..states import same

WORLD = alone()
LENGTH, RATE = 48, 0.02


class _Run:
    """A tiny model, its step, and its evaluation set."""

    def __init__(self, model, prepared, graphed=False):
        self.model = model
        self.step = step_of(model, "fp8", WORLD, sharded=True)
        self.config = evaluate.EvaluationConfig(
            evaldir=Path(prepared["EVALDIR"]), num_examples=7, batch_size=2
        )
        graph = EvaluationGraph(self.config, LENGTH, model, CPU) if graphed else None
        self.evaluator = Evaluator(
            self.config, LENGTH, model.config.vocab_size, "", WORLD, graph
        )

    def train(self, batches, numbers):
        losses = []
        for number in numbers:
            torch.manual_seed(number)
            losses.append(float(self.step([batches[number]], RATE).losses.mlm))
        return losses

    def evaluate(self):
        with self.step.gathered() as model:
            return self.evaluator(model)

    def state(self):
        held = *self.step.state_tensors(), *self.model.parameters()
        return [tensor.clone() for tensor in held]


@pytest.fixture
def run(tiny, make_model, prepared):
    """run(): a run that has taken no step; the same weights each time."""
    return lambda graphed=False: _Run(
        make_model(tiny, dtype=torch.float32), prepared, graphed
    )


@pytest.fixture
def batches(make_records, batch_of):
    """Of four steps."""
    return [batch_of(make_records(6), range(begin, begin + 4)) for begin in range(4)]


def test_training_with_evaluations_between_is_the_training_without_also_from_a_checkpoint(
    run, batches
):
    plain, evaluated = run(), run()
    losses = plain.train(batches, range(4))
    found = []
    for number in range(4):
        before, random_state = evaluated.state(), torch.get_rng_state()
        evaluated.evaluate()
        assert same(before, evaluated.state())
        assert torch.equal(torch.get_rng_state(), random_state)
        assert evaluated.step.needs_calibration_step == (number == 0)
        if number == 2:
            saved, evaluated = copy.deepcopy(evaluated.step.state_dict()), run()
            evaluated.step.load_state_dict(saved)
            evaluated.evaluate()
        found += evaluated.train(batches, [number])
    assert found == losses
    assert same(plain.state(), evaluated.state())


def test_it_is_near_the_evaluation_in_bf16_which_it_is_before_the_first_step(
    run, batches
):
    fp8 = run()

    def reference():
        model = model_of(fp8.model.config)
        model.to(torch.bfloat16).load_state_dict(fp8.model.state_dict())
        return fp8.evaluator(model)  # that never heard of fp8

    assert fp8.evaluate() == reference(), "no step has measured scales"
    fp8.train(batches, range(2))
    ours, theirs = fp8.evaluate(), reference()
    assert ours.mlm_loss != theirs.mlm_loss
    assert ours.mlm_loss == pytest.approx(theirs.mlm_loss, rel=0.02)


def test_weights_are_cast_once_an_evaluation_and_again_for_the_next(
    run, batches, monkeypatch
):
    casts = []

    def counted(x, target, out=None):
        casts.append(out is not None)
        return cast_rows(x, target, out)

    cast_rows = fp8_linear.cast_rows
    ours = run()
    ours.train(batches, [0])
    ours.evaluate()
    monkeypatch.setattr(fp8_linear, "cast_rows", counted)

    def places():
        users = ours.model.bert.encoder.fp8_users
        return [user.fp8.held.numbers.data_ptr() for user in users]

    before = places()
    ours.train(batches, [1])
    assert casts == []
    later = ours.evaluate()
    assert len(ours.evaluator.batches) == 4
    products = len(before)
    assert (sum(casts), len(casts)) == (products, products + 4 * products)
    assert places() == before
    other = run()
    other.step.load_state_dict(ours.step.state_dict())
    assert other.evaluate() == later, "of the weights as they are now"


class _Recorded:
    """A recorded graph's behavior without a GPU: repeats the work, in the mode it was recorded
    in.
    """

    def __init__(self, run, scaling):
        self.run, self.scaling, self.starts = run, scaling, 0
        self.mode = scaling.evaluates
        run()

    def replay(self):
        mode, self.scaling.evaluates = self.scaling.evaluates, self.mode
        self.starts += 1
        with torch.no_grad():
            for module in self.modules:
                module.training = False
            self.run()
        self.scaling.evaluates = mode


def test_a_graph_recorded_before_the_first_step_evaluates_the_current_weights(
    run, batches, monkeypatch
):
    no_gpu.streams(monkeypatch)
    recordings = []

    def capture(function, stream, draws):
        model = graphed_model[0]
        recordings.append(_Recorded(function, model.bert.encoder.fp8_scaling))
        recordings[-1].modules = list(model.modules())
        return recordings[-1]

    graphed_model = []
    build = EvaluationGraph.__init__

    def noted(self, config, length, model, device):
        graphed_model.append(model)
        build(self, config, length, model, device)

    monkeypatch.setattr(evaluate, "capture", capture)
    monkeypatch.setattr(EvaluationGraph, "__init__", noted)
    graphed, eager = run(graphed=True), run()
    # Recorded as if scales were known, and that forgotten.
    assert graphed.step.needs_calibration_step
    assert recordings[0].mode

    def check_close(rel):
        found, expected = graphed.evaluate(), eager.evaluate()
        for name, value in dataclasses.asdict(expected).items():
            assert getattr(found, name) == pytest.approx(value, rel=rel), name

    check_close(1e-3)
    # Before the first step it is in bf16, which the graph is not.
    assert recordings[0].starts == 0
    for number in (1, 2):
        assert graphed.train(batches, [number]) == eager.train(batches, [number])
        starts = recordings[0].starts
        check_close(1e-4)
        assert recordings[0].starts == starts + len(graphed.evaluator.batches)


def test_a_rehearsal_computes_in_fp8_and_leaves_no_trace(run, monkeypatch):
    ours, modes = run(), []
    before = ours.state()
    monkeypatch.setattr(
        evaluate, "_count", lambda model, batch: modes.append(model.evaluates_in_fp8)
    )
    warm_up(ours.config, LENGTH, ours.model, CPU)
    assert modes == [True]
    assert ours.step.needs_calibration_step
    assert ours.model.training
    assert not ours.model.evaluates_in_fp8
    assert same(before, ours.state())
