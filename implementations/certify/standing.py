"""Where a server stands: from the step of all ranks to a time to train, beside the published results."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from certify.comparison import OF_MEDIAN
from certify.records import Records
from certify.schema import PARTS
from review.league.estimate import Estimate, estimate

BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}


def standing(records: Records) -> Estimate | str:
    """The estimate from the stage with all ranks; in words why there is none."""
    path = records.folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    model, data, schedule = (config.get(part) or {} for part in ("model", "data", "schedule"))
    if records.on_cpus:
        return "nothing to compare with: the published results are of accelerators, and this was a test of CPUs"
    if {name: model.get(name) for name in BERT_LARGE} != BERT_LARGE or data.get("max_seq_length") != 512:
        return (
            "nothing to compare with: the published results are of BERT-large at 512 tokens, and this was another model"
        )
    rounds = np.nanmedian(records.by_step("together", *PARTS), axis=(0, 2))  # seconds of a step
    step, ranks = float(np.median(rounds)), len(records.places)
    batch = data["batch_size"] * data["gradient_steps"] * data["packing_factor"] * ranks
    error = OF_MEDIAN * float(np.std(rounds, ddof=1)) / len(rounds) ** 0.5 / step
    steps = schedule.get("decay_steps") or schedule.get("max_steps") or 0
    return estimate(batch / step, error, batch, ranks, schedule.get("lr") or 0, steps)
