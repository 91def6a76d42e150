"""What is due after a step."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from bert.training.loop import StepCounter, StepSchedule, train

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
