"""The values that the rules of closed BERT fix, held against what a log says. Each contradiction is an error.

Sources: training_rules ("Hyperparameters", appendix on LAMB) and the reference implementation; what they leave to the
submitter, such as the batch size and the learning rate, only has to be a value that an optimizer can use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from review.logs.mllog import number, text
from review.logs.output import ERROR, Finding
from review.results.run import Run
from review.verdict.in_log import in_log


def _is(expected: float) -> Callable[[Any], bool]:
    return lambda value: number(value) == expected


def _at_least(low: float) -> Callable[[Any], bool]:
    return lambda value: (found := number(value)) is not None and found >= low


def _above(low: float) -> Callable[[Any], bool]:
    return lambda value: (found := number(value)) is not None and found > low


def _decay(value: Any) -> bool:
    return (found := number(value)) is not None and 0 <= found < 1


def _positive_integer(value: Any) -> bool:
    return (found := number(value)) is not None and found >= 1 and found == int(found)


# key: (whether a value is allowed, what is, whence)
_TABLE = "the hyper-parameter table of the training rules"
FIXED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "opt_name": (lambda value: str(value).casefold() == "lamb", "lamb", "closed BERT trains with LAMB"),
    "max_sequence_length": (_is(512), "512", "the data set of closed BERT has sequences of up to 512 tokens"),
    "max_predictions_per_seq": (_is(76), "76", "the data set of closed BERT masks up to 76 tokens a sequence"),
    "opt_gradient_clip_norm": (_is(1), "1", "closed BERT clips the gradient's norm at 1"),
    "opt_end_learning_rate": (_is(0), "0", "the learning rate of closed BERT decays to 0"),
    "opt_lamb_learning_rate_decay_poly_power": (_is(1), "1", "the learning rate of closed BERT decays linearly"),
    "opt_base_learning_rate": (_above(0), "a number above 0", _TABLE),
    "opt_lamb_weight_decay_rate": (_at_least(0), "a number from 0", _TABLE),
    "opt_lamb_epsilon": (_above(0), "a number above 0", _TABLE),
    "opt_epsilon": (_above(0), "a number above 0", _TABLE),
    "opt_lamb_beta_1": (_decay, "a number from 0 to below 1", _TABLE),
    "opt_lamb_beta_2": (_decay, "a number from 0 to below 1", _TABLE),
    "opt_learning_rate_training_steps": (_above(0), "a number above 0", _TABLE),
    "opt_learning_rate_warmup_steps": (_at_least(0), "a number from 0", _TABLE),
    "num_warmup_steps": (_at_least(0), "a number from 0", _TABLE),
    "start_warmup_step": (lambda value: number(value) is not None, "a number", _TABLE),
    "global_batch_size": (_positive_integer, "a positive integer", _TABLE),
    "gradient_accumulation_steps": (_positive_integer, "a positive integer", _TABLE),
}


def check_fixed_values(run: Run) -> Iterator[Finding]:
    """Every logged value that a closed run may not have; a key that is missing is the compliance checker's."""
    for key, (allowed, expected, rule) in FIXED.items():
        for event in run.log.all(key):
            if not allowed(event.value):
                message = f"is {text(event.value)[:80]}, {expected} expected"
                yield in_log(run, ERROR, message, rule, "correct the setting and run again", event)
                break
