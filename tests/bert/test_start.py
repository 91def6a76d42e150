"""Before the clock: ranks begin with the same weights, and none touches the data before run_start is written."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bert.checkpoint import checksum

# Rank 0 is slow to write run_start; each rank notes when it opens the data.
SLOW_START = """
import time
from pathlib import Path
from bert import mlperf, pretraining
written, opened = mlperf.MlperfLog.run_start, pretraining.open_source
def slow(log):
    if log._logger:
        time.sleep(1.5)
    written(log)
def noted(config, vocab_size):
    Path(config.datadir_packed, "..", "opened").resolve().joinpath(str(time.time_ns())).touch()
    return opened(config, vocab_size)
mlperf.MlperfLog.run_start, pretraining.open_source = slow, noted
"""

# One bit of one weight of rank 2 differs.
ODD_WEIGHTS = """
import os
import torch
from bert import pretraining
drawn = pretraining.initialize
def odd(model, seed):
    drawn(model, seed)
    if os.environ["RANK"] == "2":
        model.bert.pooler.dense.weight.data.view(torch.int32)[3, 5] ^= 1
pretraining.initialize = odd
"""


def _changed(environment, script, repository, tmp_path):
    """The environment of processes that run ``script`` first."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(script)
    return environment | {"PYTHONPATH": f"{repository / 'implementations'}:{site}"}


def test_no_rank_opens_the_data_before_run_start_is_written(prepared, run_bert, repository, tmp_path):
    (tmp_path / "opened").mkdir()
    finished = run_bert(_changed(prepared | {"MAX_STEPS": "1"}, SLOW_START, repository, tmp_path), ranks=2)
    assert finished.returncode == 3, finished.stderr
    events = [json.loads(line[9:]) for line in Path(prepared["RUN_DIR"], "result_0.txt").read_text().splitlines()]
    (started,) = [event["time_ms"] for event in events if event["key"] == "run_start"]
    times = [int(path.name) for path in (tmp_path / "opened").iterdir()]
    assert len(times) == 2
    assert min(times) / 1e6 >= started


def test_a_rank_with_other_weights_is_named_before_the_clock(prepared, run_bert, repository, tmp_path):
    finished = run_bert(_changed(prepared, ODD_WEIGHTS, repository, tmp_path), ranks=3)
    assert finished.returncode == 2
    assert "weights differ between ranks: rank 2 (" in finished.stderr.splitlines()[-1]
    assert "run_start" not in Path(prepared["RUN_DIR"], "result_0.txt").read_text()


def test_a_checksum_knows_names_and_every_bit():
    weights = {"a": torch.randn(5, 3), "b": torch.tensor(1.0), "c": torch.ones(4, dtype=torch.bfloat16)}
    same = {name: tensor.clone() for name, tensor in weights.items()}
    assert checksum(weights) == checksum(same)
    same["a"].view(torch.int32)[4, 2] ^= 1
    assert checksum(weights) != checksum(same)
    assert checksum(weights) != checksum({"x": weights["a"], "b": weights["b"], "c": weights["c"]})
