"""What the official RCP checker takes from a log, quirks and crashes included.

It looks for names anywhere in a line, goes by the last of them, and stops with a traceback where a value is missing or
of another type; then the whole result fails, not only this run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from review.logs.mllog import Event, Log, number, text

NO_BATCH_SIZE = -1
# These count samples in an entry of their own; the checker knows bert by no name.
_COUNT_SAMPLES = ("llama2_70b_lora", "llama31_405b", "llama31_8b", "flux1", "stable_diffusion")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """``samples`` to the target, None for a run that did not converge. ``crash``: why the checker crashes."""

    samples: float | None = None
    batch_size: Any = NO_BATCH_SIZE
    benchmark: Any = None
    crash: str | None = None


def read_rcp(log: Log, train_samples: bool = False) -> Reading:
    """Reads the events of a log. Lines that are none make the seed checker fail, whatever is read here.

    ``train_samples``: the samples are those that the log sums up as train_samples, which the rules grant to BERT, and
    not the epoch_num of the evaluation that reached the target.
    """
    batch_size: Any = NO_BATCH_SIZE
    benchmark: Any = None
    last = samples = None
    for event in log.events:
        line = event.text
        if "global_batch_size" in line:
            batch_size = event.value
        if "submission_benchmark" in line:
            benchmark = event.value
        if train_samples and benchmark in (None, "bert"):
            if "train_samples" in line:
                last = event.value
        elif ("eval_accuracy" in line or "eval_error" in line) and benchmark not in _COUNT_SAMPLES:
            last = _rounded(event)
            if last is None:
                reason = f"line {event.line} has eval_accuracy without a number epoch_num"
                return Reading(batch_size=batch_size, benchmark=benchmark, crash=reason)
        if event.key == "run_stop":
            if not isinstance(event.metadata, dict) or "status" not in event.metadata:
                reason = f"line {event.line} has run_stop without a status"
                return Reading(batch_size=batch_size, benchmark=benchmark, crash=reason)
            if event.metadata["status"] != "success":
                samples = None
            elif last is None:
                key = "train_samples" if train_samples else "eval_accuracy"
                reason = f"line {event.line} has run_stop with success, and no {key} before it"
                return Reading(batch_size=batch_size, benchmark=benchmark, crash=reason)
            elif train_samples and number(last) is None:
                reason = f"train_samples is {text(last)}, not a number"
                return Reading(batch_size=batch_size, benchmark=benchmark, crash=reason)
            else:
                samples = last
    return Reading(samples=samples, batch_size=batch_size, benchmark=benchmark)


def _rounded(event: Event) -> float | None:
    value = event.metadata.get("epoch_num") if isinstance(event.metadata, dict) else None
    return round(value, 3) if isinstance(value, (int, float)) else None
