"""What is due after a step, when a run evaluates, and that padding does not count."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bert.data.batch import PretrainingCapacity, make_batch
from bert.training.evaluate import (
    EvaluationConfig,
    _count,
    evaluation_steps,
)
from bert.training.graph import graph_capacity, static_batch
from bert.training.loop import StepCounter, StepSchedule, train

from ..plain import model_of

SCHEDULE = StepSchedule(
    last=10, report_every=4, evaluations={3, 8}, checkpoint=lambda step: step % 5 == 0
)


def test_each_thing_is_due_at_its_steps_and_an_evaluation_and_the_end_are_preceded_by_a_report():
    due = {step: SCHEDULE.after(step) for step in range(1, 11)}
    assert [step for step in due if due[step].report] == [3, 4, 8, 10]
    assert [step for step in due if due[step].evaluate] == [3, 8]
    assert [step for step in due if due[step].checkpoint] == [5, 10]
    assert [step for step in due if due[step].end] == [10]
    assert [step for step in due if any(due[step])] == [3, 4, 5, 8, 10]


def test_without_an_interval_no_checkpoint_is_due_and_past_the_last_step_the_end_is():
    schedule = StepSchedule(last=4, report_every=100)
    assert not any(schedule.after(step).checkpoint for step in range(1, 9))
    assert [any(schedule.after(step)) for step in (3, 4, 5)] == [False, True, True]


@pytest.mark.parametrize("done", [0, 3])
def test_a_resumed_run_is_not_evaluated_before_its_first_step_and_goes_on_with_the_seeds_of_its_batches(
    done,
):
    seen, seeds = [], []
    progress = SimpleNamespace(
        samples=lambda: 0,
        paused=contextlib.nullcontext,
        add=lambda *_: None,
        report=lambda *_: None,
    )
    ending = train(
        next_step=list, take_step=lambda batches, rate: None, progress=progress,
        steps=StepCounter(lambda step: 0.1, 4, SimpleNamespace(enabled=False), done, done),
        schedule=StepSchedule(last=4, report_every=9, evaluations={0}), stop=SimpleNamespace(agreed=lambda *_: None),
        seed=lambda batch: seeds.append(batch) or batch,
        evaluate=lambda steps, samples: bool(seen.append(steps)), save=lambda *_: None,
    )  # fmt: skip
    assert ending.step == 4
    assert seen == ([0] if done == 0 else [])
    assert seeds == list(range(done + 1, 5))


@pytest.mark.parametrize(
    ("start", "every", "steps"),
    [(0, 300, {3, 6, 9}), (500, 300, {5, 8}), (100, 300, {1, 4, 7, 10}), (901, 300, {10}), (0, 0, set())],
)  # fmt: skip
def test_evaluations_begin_at_their_start_and_go_on_at_their_interval(
    start, every, steps
):
    config = EvaluationConfig(start_samples=start, every_samples=every)
    assert evaluation_steps(config, 100, 1000) == steps


def test_padding_of_a_fixed_capacity_counts_neither_as_words_nor_as_sequences(
    tiny, make_records
):
    torch.manual_seed(0)
    model = model_of(tiny, seed=None).eval()
    records = make_records(5, packed=False)
    batch = make_batch(records, np.arange(5), tiny.max_position_embeddings)
    room = PretrainingCapacity.of(3 * batch.num_tokens, 9)
    with torch.no_grad():
        exact = _count(model, batch)
        padded = _count(model, static_batch(batch, graph_capacity(room, 3)))
    assert exact[-1] == 5
    torch.testing.assert_close(padded, exact)
