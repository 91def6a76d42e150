"""Evaluations during training: the best model is the one that is kept, and worse ones end it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bert.training.loop import StepCounter
from finetune.best import evaluation_steps
from finetune.train import run

from .ranks import finished


@pytest.mark.parametrize(("every", "epochs", "last", "steps"), [
    (0.0, 2.0, 50, set()),
    (1.0, 2.0, 50, {25, 50}),
    (0.5, 2.0, 50, {12, 25, 38, 50}),
    (0.3, 1.0, 10, {3, 6, 9, 10}),  # the last step always
    (5.0, 2.0, 50, {50}),
    (0.01, 1.0, 3, {1, 2, 3}),
])  # fmt: skip
def test_evaluations_are_due_at_multiples_of_epochs_and_at_the_end(
    every, epochs, last, steps
):
    assert evaluation_steps(every, epochs, last) == steps


@pytest.fixture(scope="module")
def environment(squad_environment, tmp_path_factory):
    """A table that is soon learnt, at a rate that makes it worse again."""
    folder = tmp_path_factory.mktemp("table")
    rows = [
        f"the {a} {b} was {c}\t{c in ('red', 'blue')}"
        for a in ("old", "new", "happy")
        for b in ("cat", "dog", "king")
        for c in ("red", "blue", "north", "here")
    ]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    return squad_environment | {
        "TASK": "table", "DATA": str(folder), "EPOCHS": "12", "LR": "5e-3", "WARMUP_PROPORTION": "0",
        "EVAL_EVERY_EPOCHS": "1", "LOG_EVERY_STEPS": "100",
    }  # fmt: skip


def evaluations(folder):
    lines = map(json.loads, (folder / "metrics_0.jsonl").read_text().splitlines())
    return {x["step"]: x["accuracy"] for x in lines if x["kind"] == "evaluation"}


def figures_of(folder):
    return json.loads((folder / "model_0" / "figures.json").read_text())


@pytest.fixture(scope="module")
def whole(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(environment | {"RUN_DIR": str(folder), "PATIENCE": "3"}) == 0
    return folder


def test_the_model_of_the_best_evaluation_is_saved_and_worse_ones_end_training(
    whole, environment, tmp_path
):
    figures, found = figures_of(whole), evaluations(whole)
    best = max(
        found, key=lambda step: (found[step], -step)
    )  # the earlier one of equals
    assert [*found] == [3 * n for n in range(1, len(found) + 1)]
    assert (figures["best_step"], figures["accuracy"]) == (best, found[best])
    assert figures["steps"] == [*found][-1] == best + 3 * 3 < 36
    # Between them was a worse one.
    assert min(list(found.values())[-3:]) < found[best]
    saved = environment | {"MODE": "eval", "INIT_CHECKPOINT": str(whole / "model_0")}
    assert run(saved | {"RUN_DIR": str(tmp_path)}) == 0
    assert figures_of(tmp_path)["accuracy"] == found[best]
    tables = [f / "model_0" / "predictions.tsv" for f in (whole, tmp_path)]
    assert tables[0].read_bytes() == tables[1].read_bytes()


@pytest.mark.parametrize("shard", ["0", "1"])
def test_several_ranks_evaluate_end_and_keep_as_one(
    whole, environment, tmp_path, shard
):
    own = {"RUN_DIR": str(tmp_path), "PATIENCE": "3", "BATCHSIZE": "6"}
    own["SHARD_OPTIMIZER"] = shard
    done = finished(*[environment | own] * 2)
    assert [rank.returncode for rank in done] == [0, 0], done
    mine, theirs = figures_of(tmp_path), figures_of(whole)
    assert evaluations(tmp_path) == evaluations(whole)
    for name in ("steps", "best_step", "accuracy"):
        assert mine[name] == theirs[name]
    # The ranks' sums round otherwise.
    said, known = (
        [line.split("\t")[1] for line in path.read_text().splitlines()]
        for path in (f / "model_0" / "predictions.tsv" for f in (tmp_path, whole))
    )
    assert said == known


def test_evaluations_change_nothing_of_what_is_learnt(environment, tmp_path):
    """With dropout, which evaluations switch off."""
    weights, losses = Path(environment["INIT_CHECKPOINT"]), []
    shape = json.loads(weights.with_name("config.json").read_text())
    shape["hidden_dropout_prob"] = 0.2
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for name in (weights.name, "vocab.txt"):
        shutil.copy(weights.with_name(name), tmp_path)
    environment = environment | {"INIT_CHECKPOINT": str(tmp_path / weights.name)}
    for every in ("0", "0.3"):
        folder = tmp_path / every
        own = {"EVAL_EVERY_EPOCHS": every, "EPOCHS": "2", "RUN_DIR": str(folder)}
        assert run(environment | own | {"LOG_EVERY_STEPS": "1"}) == 0
        text = (folder / "metrics_0.jsonl").read_text()
        steps = [x for x in map(json.loads, text.splitlines()) if "loss" in x]
        losses.append([x["loss"] for x in steps if x["kind"] == "train"])
    assert len(evaluations(folder)) > 4
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


@pytest.mark.parametrize("at", [7, 12, 19], ids=str)
def test_a_run_that_stops_and_resumes_keeps_the_same_model(
    whole, environment, tmp_path, monkeypatch, at
):
    """Before, after and long after evaluations, of which the best may be before the stop."""
    own = {
        "RUN_DIR": str(tmp_path),
        "PATIENCE": "3",
        "CHECKPOINT_DIR": str(tmp_path / "c"),
    }
    own |= {"CHECKPOINT_EVERY_STEPS": str(at)}
    begin = StepCounter.begin

    def dies(self):
        if self.done == at:
            raise RuntimeError("killed")
        return begin(self)

    with monkeypatch.context() as patch:
        patch.setattr(StepCounter, "begin", dies)
        assert run(environment | own) == 1
    assert not (tmp_path / "model_0").exists()
    assert run(environment | own | {"RESUME": "1"}) == 0
    assert evaluations(tmp_path) == evaluations(whole)
    for name in ("model.safetensors", "predictions.tsv"):
        parts = (tmp_path / "model_0" / name).read_bytes()
        assert parts == (whole / "model_0" / name).read_bytes()
    same = "steps", "best_step", "accuracy"
    assert [figures_of(tmp_path)[n] for n in same] == [
        figures_of(whole)[n] for n in same
    ]
