"""Compliance rules in words, and what to do about a broken one."""

from __future__ import annotations

import re
from typing import Any

from review.logs.mllog import Event, number, text

KNOWN_RULES = "the division and the benchmark are known"

_ORDER = {
    "s['init_started']": "comes before any init_start",
    "not s['init_stopped']": "comes after init_stop",
    "not s['run_started']": "comes after run_start",
    "( s['init_stopped'] == True )": "comes before init_stop",
    "s['run_started']": "comes before run_start",
}

_HINTS = {
    "cache_clear": "log it with value true before init_start, once the page caches are dropped",
    "init_start": "log it first, before anything is built",
    "init_stop": "log it after the warm-up, right before run_start",
    "run_start": "log it once, after init_stop and before the data set is touched",
    "run_stop": "log it at the end with metadata status success or aborted; a log without it is of a run that died",
    "submission_division": "log closed or open",
    "submission_benchmark": "log bert",
    "seed": "log the run's seed once, on rank 0",
    "train_samples": "log the sequences trained on at the end of the run",
    "eval_samples": "log 10000",
    "eval_accuracy": "log it after every evaluation, with metadata epoch_num = sequences trained so far",
    "global_batch_size": "log the sequences of one optimizer step over all ranks, once, on rank 0",
    "gradient_accumulation_steps": "log the micro-batches of one step, at least 1",
    "opt_lamb_epsilon": "log the epsilon of LAMB, once, on rank 0",
}


def hint(key: str | None, rule: str) -> str | None:
    """What to do about a broken rule."""
    if "first_init_start" in rule:
        return "initialise faster, such as with compiled kernels kept from an earlier run"
    if key in _HINTS:
        return _HINTS[key]
    if rule == KNOWN_RULES:
        return "log submission_division closed or open, and submission_benchmark bert"
    if rule.startswith("AT_LEAST_ONE"):
        return "log it at least once a run"
    if rule == "EXACTLY_ONE":
        return "log it once, on rank 0, before init_stop"
    if "0.720" in rule or "value'] >=" in rule:
        return "the run did not reach the target; at most one run of ten may miss it"
    return None


def describe_end(rule: str, state: dict[str, Any]) -> str:
    """A broken rule about the log as a whole in words."""
    logged = state.get("initialized_tensors")
    if "initialized_tensors" not in rule or not isinstance(logged, list):
        return "the log as a whole breaks a rule"
    wanted, names = re.findall(r'"([^"]+)"', rule), [str(name) for name in logged]
    lacking, extra = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    parts = [f"lacks {len(lacking)} of {len(wanted)} tensors, such as {lacking[0]}"] if lacking else []
    parts += [f"has {len(extra)} others, such as {text(extra[0])}"] if extra else []
    return f"weights_initialization {' and '.join(parts) or 'names a tensor twice'}"


def describe_failure(event: Event, rule: str, state: dict[str, Any]) -> str:
    """A broken rule in words."""
    if rule in _ORDER:
        return _ORDER[rule]
    if "first_init_start" in rule:
        start, limit = number(state.get("first_init_start")), number(state.get("compile_time_mins")) or 30
        if start is not None and start < 9e99:
            return f"initialisation took {(event.time_ms - start) / 60_000:.1f} minutes, the limit is {limit:g}"
        return "comes before any init_start"
    choice = re.fullmatch(r"v\['value'\] in \[(.*)\]", rule)
    if choice:
        return f"is {text(event.value)}, must be one of {choice[1]}"
    names = re.findall(r"'(\w+)' in v\['metadata'\]", rule)
    if names and "if" not in rule.split():
        return f"lacks metadata {' or '.join(names)}"
    return f"breaks the rule {rule} with value {text(event.value)[:80]}"
