"""python -m bert --check: what it says of convergence is what the official checker holds a submission to."""

from __future__ import annotations

import pytest

from bert import check
from review.rulebook import rcp


@pytest.mark.parametrize("batch_size", [64, 256, 448, 449, 768, 1536, 3072, 4608, 6144, 8192, 13888, 16384])
def test_the_reference_convergence_is_the_one_that_results_are_judged_by(batch_size):
    point, _ = rcp.find(batch_size)
    said = check.convergence(batch_size, check.reference_runs())
    assert said.startswith(f"{point.mean:,.0f} samples to the target by the RCP")
    assert said.endswith(f"at least {point.minimum:,.0f}")
    for size in point.interpolated_from or ():
        assert f"{size:,}" in said


def test_a_batch_size_above_every_reference_needs_one_of_its_own():
    assert check.convergence(16385, check.reference_runs()).startswith("no RCP above batch size 16,384")


def test_a_reference_without_spread_is_its_own_least():
    assert check.fewest_samples(1000.0, 0.0, 18) == 1000.0


@pytest.mark.parametrize(
    ("batch_size", "interval"),
    [(448, 150_000), (768, 150_000), (3072, 175_000), (4608, 200_000), (8192, 225_000), (16384, 325_000)],
)
def test_the_evaluation_interval_is_the_rules(batch_size, interval):
    assert check.rule_interval(batch_size) == interval


def test_the_check_says_what_would_run(prepared, run_bert):
    done = run_bert(prepared | {"WORLD_SIZE": "2", "EVAL_ITER_SAMPLES": "24"}, arguments=("--check",))
    assert done.returncode == 0, done.stderr
    said = {line.split("  ")[0]: line.partition("  ")[2].strip() for line in done.stdout.splitlines()}
    assert said["global batch"] == "6 sequences = 3 rows x 1 accumulated x 1 ranks x packing factor 2"
    assert said["steps"].startswith("at most 8 (48 samples)")
    assert said["evaluation"] == "every 24 samples from 24, target 0.9", "the open division may choose its interval"
    assert said["convergence"].startswith("2,414,421 samples to the target by the RCP of batch size 448")
    assert said["data"].startswith("3 files in ")
    assert said["attention"] == "sdpa_loop (the device is a CPU)"


def test_the_check_builds_the_batches_of_the_run(prepared, run_bert):
    folder = prepared["DATADIR_PHASE2_PACKED"]
    unpacked = prepared | {"PACKED": "0", "PACKING_FACTOR": "1", "DATADIR_PHASE2": folder, "BATCHING": "online"}
    done = run_bert(unpacked, arguments=("--check",))
    assert done.returncode == 2
    assert "BATCHING=online packs records that are not packed, and these are" in done.stderr
