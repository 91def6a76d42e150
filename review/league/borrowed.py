"""Borrowed hyper-parameters: which published results have the same set.

The rules let a submitter take over another's hyper-parameters as a group, with a batch size of its own (training rules,
"Hyperparameter Borrowing").
"""

from __future__ import annotations

import math

from review.league.entries import HYPERPARAMETERS, Entry, logged, published
from review.logs.mllog import text
from review.results.score import Result

_GROUP = tuple(key for key in HYPERPARAMETERS if key not in ("gradient_accumulation_steps", "opt_epsilon"))
_REQUIRED = ("opt_base_learning_rate", "opt_learning_rate_training_steps", "opt_lamb_beta_1", "opt_lamb_beta_2")


def same_hyperparameters(result: Result) -> list[Entry]:
    """Published results with the hyper-parameters of this one: those of its batch size first, then by round.

    Compared is what both log of the learning rate, its schedule, the betas and the weight decay.
    """
    run = next((run for run in result.runs if run.log.events), None)
    own = logged(run)
    if not all(key in own for key in _REQUIRED):
        return []
    itself = (text(result.organization or "").casefold(), text(result.name))
    found = [
        entry
        for entry in published()
        if _same(own, entry.hyperparameters) and (entry.submitter.casefold(), entry.system) != itself
    ]
    return sorted(found, key=lambda entry: (entry.batch_size != result.batch_size, entry.round))


def _same(own: dict[str, float], other: dict[str, float]) -> bool:
    if not all(key in other for key in _REQUIRED):
        return False
    return all(math.isclose(own[key], other[key], rel_tol=1e-6) for key in _GROUP if key in own and key in other)


def describe(result: Result) -> str | None:
    """In a line, whose they are; None where they are nobody's."""
    found = same_hyperparameters(result)
    if not found:
        return None
    first = found[0]
    same = sum(entry.batch_size == result.batch_size for entry in found)
    count = "1 published result" if len(found) == 1 else f"{len(found)} published results"
    batch = "" if first.batch_size == result.batch_size else f" at batch {first.batch_size:g}"
    return f"those of {count}, {same} of this batch size; first {first.round} {first.submitter} {first.system}{batch}"


def as_list(result: Result) -> list[dict[str, object]]:
    """For JSON."""
    keys = ("round", "submitter", "system", "batch_size", "folder")
    return [{key: getattr(entry, key) for key in keys} for entry in same_hyperparameters(result)]
