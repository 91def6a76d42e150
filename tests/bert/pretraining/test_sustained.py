"""SUSTAINED_TRAINING_TIME continues training after run_stop, without effect on the result."""

from __future__ import annotations

from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

from ..states import events


def test_training_goes_on_after_run_stop_and_the_log_stays_compliant(
    prepared, run_bert
):
    sustained = {"SUSTAINED_TRAINING_TIME": "0.05", "TARGET_MLM_ACCURACY": "0.0001"}
    run_bert(prepared, 2, status=0, **sustained)
    log = Path(prepared["RUN_DIR"]) / "result_0.txt"
    told = events(prepared)
    times = {event["key"]: event["time_ms"] for event in told}
    last = [event["key"] for event in told[-2:]]
    assert last == ["run_stop", "sustained_training_stop"]
    assert times["sustained_training_stop"] - times["run_start"] >= 3000
    checker = mlp_compliance.make_checker("training", "5.0.0", False, False)
    valid, *_ = mlp_compliance.main(str(log), "training_5.0.0/common.yaml", checker)
    assert valid
