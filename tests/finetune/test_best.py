"""Evaluations during training: the best model is the one that is kept, and worse ones end it."""

import json
from pathlib import Path

import pytest

from bert.training.loop import StepCounter
from finetune.best import evaluation_steps
from finetune.train import run

from . import runs
from .runs import content, evaluate, figures_of, lines_of, table_of, train


@pytest.mark.parametrize(("every", "epochs", "last", "steps"), [
    (0.0, 2.0, 50, set()),
    (1.0, 2.0, 50, {25, 50}),
    (0.5, 2.0, 50, {12, 25, 38, 50}),
    (0.3, 1.0, 10, {3, 6, 9, 10}),  # the last step always
    (5.0, 2.0, 50, {50}),
    (0.01, 1.0, 3, {1, 2, 3}),
])  # fmt: skip
def test_evaluations_are_due_at_epochs_multiples_and_the_end(
    every, epochs, last, steps
):
    assert evaluation_steps(every, epochs, last) == steps


@pytest.fixture(scope="module")
def environment(squad_environment, tmp_path_factory):
    """A table that is soon learnt, at a rate that makes it worse again."""
    folder = tmp_path_factory.mktemp("table")
    rows = [f"{text}\t{text.endswith(('red', 'blue'))}" for text in runs.SENTENCES]
    runs.write_tables(folder, ["text\tlabel", *rows])
    return squad_environment | {
        "TASK": "table", "DATA": str(folder), "EPOCHS": "12", "LR": "5e-3", "WARMUP_PROPORTION": "0",
        "EVAL_EVERY_EPOCHS": "1", "LOG_EVERY_STEPS": "100",
    }  # fmt: skip


def evaluations(model):
    lines = lines_of(model.parent / "metrics_0.jsonl")
    return {x["step"]: x["accuracy"] for x in lines if x["kind"] == "evaluation"}


def kept(model):
    """Which evaluation's model it is."""
    return [figures_of(model)[name] for name in ("steps", "best_step", "accuracy")]


@pytest.fixture(scope="module")
def whole(environment, tmp_path_factory):
    return train(environment, tmp_path_factory.mktemp("whole"), PATIENCE="3")


def test_the_model_of_the_best_evaluation_is_saved_and_worse_ones_end_training(
    whole, environment, tmp_path
):
    found = evaluations(whole)
    # The earlier one of equals.
    best = max(found, key=lambda step: (found[step], -step))
    assert [*found] == [3 * n for n in range(1, len(found) + 1)]
    assert kept(whole) == [[*found][-1], best, found[best]]
    assert [*found][-1] == best + 3 * 3 < 36
    # Between them was a worse one.
    assert min(list(found.values())[-3:]) < found[best]
    again = evaluate(environment, tmp_path, whole)
    assert figures_of(again)["accuracy"] == found[best]
    tables = [model / "predictions.tsv" for model in (whole, again)]
    assert tables[0].read_bytes() == tables[1].read_bytes()


@pytest.mark.parametrize("shard", ["0", "1"])
def test_ranks_evaluate_end_and_keep_as_one(whole, environment, tmp_path, shard):
    own = {"RUN_DIR": str(tmp_path), "PATIENCE": "3", "BATCHSIZE": "6"}
    own |= {"SHARD_OPTIMIZER": shard}
    done = runs.finished(*[environment | own] * 2)
    assert [rank.returncode for rank in done] == [0, 0], done
    mine = tmp_path / "model_0"
    assert evaluations(mine) == evaluations(whole)
    assert kept(mine) == kept(whole)
    # The ranks' sums round otherwise.
    tables = [table_of(model / "predictions.tsv") for model in (mine, whole)]
    said, known = ([row[1] for row in table] for table in tables)
    assert said == known


def test_evaluations_change_nothing_of_what_is_learnt(environment, tmp_path):
    """With dropout, which evaluations switch off."""
    weights, losses = Path(environment["INIT_CHECKPOINT"]), []
    own = environment | runs.copied(weights, tmp_path, weights.name, "vocab.txt")
    own |= {"EPOCHS": "2", "LOG_EVERY_STEPS": "1"}
    shape = content(weights.with_name("config.json")) | {"hidden_dropout_prob": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for every in ("0", "0.3"):
        model = train(own, tmp_path / every, EVAL_EVERY_EPOCHS=every)
        steps = lines_of(tmp_path / every / "metrics_0.jsonl")
        losses.append([x["loss"] for x in steps if x["kind"] == "train"])
    assert len(evaluations(model)) > 4
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


@pytest.mark.parametrize("at", [7, 12, 19], ids=str)
def test_a_run_that_stops_and_resumes_keeps_the_same_model(
    whole, environment, tmp_path, monkeypatch, at
):
    """Before, after and long after evaluations, of which the best may be before the stop."""
    own = environment | {"PATIENCE": "3", "CHECKPOINT_DIR": str(tmp_path / "c")}
    own |= {"CHECKPOINT_EVERY_STEPS": str(at), "RUN_DIR": str(tmp_path)}
    begin = StepCounter.begin

    def dies(self):
        if self.done == at:
            raise RuntimeError("killed")
        return begin(self)

    with monkeypatch.context() as patch:
        patch.setattr(StepCounter, "begin", dies)
        assert run(own) == 1
    assert not (tmp_path / "model_0").exists()
    resumed = train(own, tmp_path, RESUME="1")
    assert evaluations(resumed) == evaluations(whole)
    for name in ("model.safetensors", "predictions.tsv"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert kept(resumed) == kept(whole)
