"""SUSTAINED_TRAINING_TIME continues training after run_stop, without effect on the result."""

from __future__ import annotations

import json
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance


def test_training_goes_on_after_run_stop_and_the_log_stays_compliant(
    prepared, run_bert, tmp_path
):
    settings = prepared | {
        "SUSTAINED_TRAINING_TIME": "0.05",
        "TARGET_MLM_ACCURACY": "0.0001",
    }
    done = run_bert(settings, ranks=2)
    assert done.returncode == 0, done.stderr
    log = Path(settings["RUN_DIR"]) / "result_0.txt"
    events = [
        json.loads(line.removeprefix(":::MLLOG "))
        for line in log.read_text().splitlines()
    ]
    times = {event["key"]: event["time_ms"] for event in events}
    assert [event["key"] for event in events[-2:]] == [
        "run_stop",
        "sustained_training_stop",
    ]
    assert times["sustained_training_stop"] - times["run_start"] >= 3000
    checker = mlp_compliance.make_checker("training", "5.0.0", False, False)
    valid, *_ = mlp_compliance.main(str(log), "training_5.0.0/common.yaml", checker)
    assert valid
