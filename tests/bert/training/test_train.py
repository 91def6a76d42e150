"""Whole runs of ``python -m bert``: resuming, ranks, warm-up, evaluation, the MLPerf log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.core.dist import World
from bert.data.format import open_records, write_records
from bert.data.records import Records
from bert.kernels.precision import LossScaler, Precision, PrecisionConfig
from bert.pretraining import train
from bert.pretraining.config import PretrainingConfig
from bert.training.mlperf import MlperfLog
from bert.training.schedule import learning_rate
from common.env import from_env

from ..plain import close
from ..states import events, folders, losses, newest, same, values, without_dropout


def test_resumed_run_keeps_the_seed_that_was_drawn_and_refuses_other_data(
    prepared, run_bert, make_records, tmp_path
):
    environment = prepared | folders(tmp_path, "c")
    environment |= {"CHECKPOINT_EVERY_STEPS": "2", "MAX_STEPS": "4"}
    del environment["SEED"]
    run_bert(environment, status=3)
    (seed,) = values(environment, "seed")
    newest = sorted((tmp_path / "c").glob("step_*.pt"))[-1]
    newest.unlink()  # as if the run had been killed before it
    environment["RUN_DIR"] = str(tmp_path / "run_resumed")
    run_bert(environment, status=3, RESUME=1)
    assert values(environment, "seed") == [seed]
    newest.unlink()
    data = Path(prepared["DATADIR_PHASE2_PACKED"])
    _, metadata = open_records(next(data.glob("part_*")))
    write_records(data / "part_more.hdf5", make_records(5), metadata)
    refused = run_bert(environment, status=2, RESUME=1, RUN_DIR=tmp_path / "refused")
    assert "other training data" in refused.stderr.splitlines()[-1]


# One rank takes at each step the rows which two ranks would, in the same order.
ROWS_OF_TWO_RANKS = """
from bert.data import sampler
single = sampler.Sampler.rows
def rows(self, step, rank=None):
    half = lambda r: sampler.Sampler(self.row_counts, self.rows_per_step // 2, self.seed, r, 2)
    return single(half(0), step) + single(half(1), step)
sampler.Sampler.rows = rows
"""


def _like_sequences(folder):
    """Makes all sequences of the shards equally long and equally masked: then means of means are
    means.
    """
    for path in Path(folder).iterdir():
        records, metadata = open_records(path)
        count, length, masked = records.num_sequences, 16, 3
        rng = np.random.default_rng(count)
        ids = rng.integers(0, 200, count * length).astype(np.int16)
        like = Records(
            input_ids=ids, sequence_offsets=np.arange(count + 1) * length, segment_b_start=np.full(count, 8, np.int16),
            masked_lm_positions=np.tile(np.array([1, 5, 9], np.int16), count), masked_lm_ids=ids[: count * masked],
            masked_lm_offsets=np.arange(count + 1) * masked, row_offsets=np.arange(count + 1),
            next_sentence_labels=records.next_sentence_labels,
        )  # fmt: skip
        write_records(path, like, metadata)


@pytest.mark.parametrize(
    ("clip", "one_rank"),
    [("after", {"GRADIENT_STEPS": "2"}), ("after", {"BATCHSIZE": "6"}), ("before", {"GRADIENT_STEPS": "2"})],
    ids=["after-accumulated", "after-twice-the-batch", "before-accumulated"],
)  # fmt: skip
def test_two_ranks_are_one_rank_with_twice_the_batch(
    prepared, run_bert, tmp_path, clip, one_rank
):
    without_dropout(prepared)
    # Ranks weigh equally, so a joint mean is theirs only where they hold equally much.
    if "BATCHSIZE" in one_rank:
        _like_sequences(prepared["DATADIR_PHASE2_PACKED"])
    common = prepared | {"CLIP": clip, "MAX_STEPS": "3", "CHECKPOINT_EVERY_STEPS": "3"}
    # Out of reach for CLIP=before, whose local norms differ from the joint one by design.
    common |= {"MAX_GRAD_NORM": "1000" if clip == "before" else "0.5"}
    two = common | folders(tmp_path, "two")
    run_bert(two, 2, status=3)
    one = common | folders(tmp_path, "one") | one_rank
    (tmp_path / "first.py").write_text(ROWS_OF_TWO_RANKS)
    run_bert(one, status=3, FIRST=tmp_path / "first.py")
    a, b = newest(tmp_path / "one")["model"], newest(tmp_path / "two")["model"]
    close(a, b, atol=2e-6, rtol=2e-5)
    assert values(one, "train_samples") == values(two, "train_samples")


def test_warm_up_leaves_the_run_as_it_is_without(prepared, run_bert, tmp_path):
    states = []
    for warm in ("0", "1"):
        first = f"from bert.pretraining import build\nbuild.warms_up = lambda device: {warm} == 1\n"
        (tmp_path / f"warm{warm}.py").write_text(first)
        environment = prepared | folders(tmp_path, warm)
        run_bert(environment, status=3, FIRST=tmp_path / f"warm{warm}.py")
        states.append((newest(tmp_path / warm), values(environment, "eval_accuracy")))
    assert same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]


def test_evaluation_does_not_depend_on_ranks_or_batch_size(
    prepared, run_bert, tmp_path
):
    accuracies = []
    for ranks, size in ((1, "16"), (2, "5")):
        folder = str(tmp_path / f"r{ranks}" / "rehearsal")
        # Which also evaluates before the first step.
        environment = prepared | {"REHEARSAL": "1", "RUN_DIR": folder}
        one_step = {"MAX_STEPS": "1", "TARGET_MLM_ACCURACY": "0.999"}
        run_bert(environment | one_step, ranks, EVAL_BATCHSIZE=size)
        accuracies.append(values(environment, "eval_accuracy")[0])
    assert accuracies[0] == accuracies[1]


def test_unset_seed_comes_from_the_system_and_is_logged(prepared, run_bert):
    seeds = set()
    for trial in ("0", "1"):
        run_bert(prepared, ranks=2, SEED="", TRIAL=trial, MAX_STEPS=1)
        seeds.add(values(prepared, "seed", trial)[0])
    assert len(seeds) == 2


def test_log_passes_the_official_checker_in_both_divisions(
    prepared, run_bert, tmp_path
):
    from mlperf_logging.compliance_checker import mlp_compliance

    run_bert(prepared, status=0, TARGET_MLM_ACCURACY=0.1, MAX_STEPS=16)
    path = Path(prepared["RUN_DIR"]) / "result_0.txt"
    accuracy = values(prepared, "eval_accuracy")[-1]
    log = path.read_text()
    # No tiny run reaches the 0.720 of the rules, nor may it be of the closed division: both are
    # edited in.
    closed = log.replace(f'"value": {accuracy}', '"value": 0.7201')
    closed = closed.replace('"value": "open"', '"value": "closed"')
    for division, text in (("open", log), ("closed", closed)):
        path.write_text(text)
        checker = mlp_compliance.make_checker("training", "5.0.0", False, False)
        rules = "training_5.0.0/common.yaml"
        valid, *_ = mlp_compliance.main(str(path), rules, checker)
        assert valid, division


def test_every_progress_line_is_in_the_log_as_well_and_a_missed_target_says_aborted(
    prepared, run_bert
):
    finished = run_bert(prepared, status=3, LOG_EVERY_STEPS=2, MAX_STEPS=6)
    (end,) = (event for event in events(prepared) if event["key"] == "run_stop")
    assert end["metadata"]["status"] == "aborted", "short of its target"
    stats = values(prepared, "tracked_stats")
    assert [f"{values['loss']:.4f}" for values in stats] == losses(finished)
    assert len(stats) >= 3
    assert all(values["throughput"] > 0 for values in stats)


def test_run_folder_describes_the_run(prepared, run_bert):
    run_bert(prepared, MAX_STEPS=1)
    folder = Path(prepared["RUN_DIR"])
    config = json.loads((folder / "config.json").read_text())
    assert config["schedule"]["lr"] == 0.05
    assert config["model"]["gelu_form"] == "tanh"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert (environment["attention"], environment["fused"]) == ("sdpa_loop", [])
    error = (folder / "error_0.txt").read_text()
    assert error.startswith("the target accuracy 0.9 was not reached in 1 steps")


def test_fp16_looks_for_its_loss_scale_and_then_takes_every_step(
    prepared, run_bert, tmp_path
):
    environment = prepared | {
        "PRECISION": "fp16", "INIT_LOSS_SCALE": str(2.0**40), "CHECKPOINT_DIR": str(tmp_path / "c"),
        "CHECKPOINT_EVERY_STEPS": "4", "MAX_STEPS": "8", "EVAL_ITER_START_SAMPLES": "24", "EVAL_ITER_SAMPLES": "24",
    }  # fmt: skip
    run_bert(environment, status=3)
    state = newest(tmp_path / "c")
    skipped = state["scaler"]["num_skipped_steps"]
    assert skipped >= 5
    assert state["scaler"]["scale"] == 2.0 ** (40 - skipped)
    assert state["optimizer"]["num_steps"] == state["step"] == 8
    assert state["batches"] == 8 + skipped
    assert state["samples"] == values(environment, "train_samples")[0]
    assert len(values(environment, "eval_accuracy")) == 2
    elsewhere = environment | folders(tmp_path, "d")
    finished = run_bert(elsewhere, status=1, INIT_LOSS_SCALE="1e30")
    assert "steps in a row after step 0: lower LR or the loss scale" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "shard"), [("after", "1"), ("before", "0"), ("before", "1")]
)
def test_fp16_ranks_skip_the_same_batches(clip, shard, prepared, run_bert, tmp_path):
    environment = prepared | {
        "PRECISION": "fp16", "INIT_LOSS_SCALE": str(2.0**35), "CHECKPOINT_DIR": str(tmp_path / "c"), "CLIP": clip,
        "CHECKPOINT_EVERY_STEPS": "4", "EVAL_ITER_START_SAMPLES": "48", "EVAL_ITER_SAMPLES": "48",
        "SHARD_OPTIMIZER": shard,
    }  # fmt: skip
    run_bert(environment, 2, status=3)
    state = newest(tmp_path / "c")
    assert state["step"] == state["optimizer"]["num_steps"] == 8
    assert state["batches"] == 8 + state["scaler"]["num_skipped_steps"] > 13


OVERFLOWING = {1, 2, 5, 8, 9, 12}


def _train_with_overflows(environment, monkeypatch, overflow):
    """Trains in this process with a loss scale; the batches in OVERFLOWING overflow, or are left
    out of the data.
    """
    take, build = train.TrainingData.next_step, train.build
    number, count, rates, trained = 0, iter(range(1, 99)), [], []

    def next_step(data):
        nonlocal number
        batches, number = take(data), next(count)
        while not overflow and number in OVERFLOWING:
            batches, number = take(data), next(count)
        return batches

    def poisoned(config, world, seed, first_weights):
        # In fp32, where scaling by powers of two is exact.
        exact = PrecisionConfig(precision="fp32")
        model, step = build(dataclasses.replace(config, precision=exact), world, seed)
        scaled = Precision(dtype=torch.float16, init_loss_scale=2.0**20)
        step.scaler = LossScaler(scaled)
        step.gradients.find_overflow = True
        model.bert.pooler.dense.weight.register_hook(
            lambda g: g * float("inf") if number in OVERFLOWING else g
        )
        run = step.run

        def recorded(batches):
            rates.append(float(step.lr))
            return run(batches)

        step.run = recorded
        trained.append(model)
        return model, step

    with monkeypatch.context() as patch:
        patch.setattr(train.TrainingData, "next_step", next_step)
        patch.setattr(train, "build", poisoned)
        config = from_env(PretrainingConfig, environment)
        path = Path(environment["RUN_DIR"], "result_0.txt")
        log = MlperfLog(config.mlperf, True, path)
        with World(config.dist) as world:
            assert not train.pretrain(config, world, log).reached
    said = []
    for event in events(environment):
        value = event["value"] if event["key"] != "tracked_stats" else None
        said.append((event["key"], value, event["metadata"].get("epoch_num")))
    return trained[0].state_dict(), rates, said


@pytest.mark.parametrize("shard", ["0", "1"], ids=["replicated", "sharded"])
def test_run_with_overflows_is_the_run_without_their_batches(
    shard, prepared, tmp_path, monkeypatch
):
    without_dropout(prepared)
    settings = {"SHARD_OPTIMIZER": shard, "LOG_EVERY_STEPS": "4"}
    settings |= {"WARMUP_STEPS": "3", "PRECISION": "fp16"}
    outcomes = []
    for name in ("clean", "overflows"):
        environment = prepared | settings | {"RUN_DIR": str(tmp_path / name)}
        overflows = name == "overflows"
        outcomes.append(_train_with_overflows(environment, monkeypatch, overflows))
    (weights, rates, said), (others, tried, told) = outcomes
    schedule = from_env(PretrainingConfig, prepared | settings).schedule
    expected = [learning_rate(step, schedule) for step in range(1, 9)]
    assert rates == pytest.approx(expected, rel=1e-6)
    assert [tried[n] for n in range(len(tried)) if n + 1 not in OVERFLOWING] == rates
    assert same(weights, others)
    assert told == said
    assert [key for key, *_ in said].count("eval_accuracy") == 2
    assert [key for key, *_ in said].count("tracked_stats") == 2
