"""python -m bert --check: what would run, and what the rules say of it."""

from __future__ import annotations


def test_the_check_says_what_would_run(prepared, run_bert):
    done = run_bert(prepared | {"WORLD_SIZE": "2", "EVAL_ITER_SAMPLES": "24"}, arguments=("--check",))
    assert done.returncode == 0, done.stderr
    said = {line.split("  ")[0]: line.partition("  ")[2].strip() for line in done.stdout.splitlines()}
    assert said["global batch"] == "6 sequences = 3 rows x 1 accumulated x 1 ranks x packing factor 2"
    assert said["steps"].startswith("at most 8 (48 samples)")
    assert said["learning rate"].startswith("mlperf: 0.05 at step 1 (first), ")
    assert said["evaluation"] == "every 24 samples from 24, target 0.9", "the open division may choose its interval"
    assert "convergence" not in said, "reference points are the closed division's"
    assert said["data"].startswith("3 files in ")
    assert said["attention"] == "sdpa_loop (the device is a CPU)"
    assert "GELU in its tanh form" in said["model"]


def test_the_check_builds_the_batches_of_the_run(prepared, run_bert):
    folder = prepared["DATADIR_PHASE2_PACKED"]
    unpacked = prepared | {"PACKED": "0", "PACKING_FACTOR": "1", "DATADIR_PHASE2": folder, "BATCHING": "online"}
    done = run_bert(unpacked, arguments=("--check",))
    assert done.returncode == 2
    assert "BATCHING=online packs records that are not packed, and these are" in done.stderr
