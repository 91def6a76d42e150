"""The fast compliance check agrees with the official one."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from review.logs.mllog import read_log
from review.logs.output import ERROR, ReviewError
from review.results.run import run_of
from review.rulebook.compliance import check_compliance, rulesets

KEYS = [
    "cache_clear init_start init_stop run_start run_stop submission_benchmark submission_division submission_org",
    "submission_platform submission_status seed global_batch_size gradient_accumulation_steps opt_base_learning_rate",
    "opt_lamb_epsilon opt_lamb_beta_1 opt_lamb_beta_2 opt_lamb_weight_decay_rate opt_learning_rate_training_steps",
    "opt_learning_rate_warmup_steps num_warmup_steps start_warmup_step epoch_start block_start eval_start eval_stop",
    "eval_accuracy epoch_stop block_stop train_samples eval_samples weights_initialization max_predictions_per_seq",
]


TWICE = "run_start seed global_batch_size submission_division eval_samples cache_clear"
WITHOUT = "epoch_start block_start", "epoch_stop block_stop", "eval_start eval_stop"


def mutations():
    """A change of a log, as its text."""
    for keys in (*" ".join(KEYS).split(), *WITHOUT):
        yield lambda log, keys=keys: log.drop(*keys.split()).text()
    for key in TWICE.split():
        yield lambda log, key=key: log.text() + line(log, key)
        yield lambda log, key=key: log.text() + line(log, key, value=7)
    for key, fields in VALUES:
        yield lambda log, key=key, fields=fields: log.change(key, **fields).text()
    for old, new in TEXTS:
        yield lambda log, old=old, new=new: log.text().replace(old, new)
    yield lambda log: ""
    yield lambda log: "\x00\xff noise\r" + log.text()
    yield lambda log: log.text(prefix="\x1b[32m12: ")
    yield lambda log: log.text()[:-40]
    yield lambda log: "".join(reversed(log.text().splitlines(keepends=True)))
    yield lambda log: log.text() + ":::MLLOG " + "[" * 20_000 + "\n"


VALUES = [
    ("submission_division", {"value": "open"}),
    ("submission_division", {"value": "Closed"}),
    ("submission_benchmark", {"value": "resnet"}),
    ("submission_benchmark", {"value": ["bert"]}),
    ("gradient_accumulation_steps", {"value": 0}),
    ("gradient_accumulation_steps", {"value": "1"}),
    ("eval_accuracy", {"value": 0.71}),
    ("eval_accuracy", {"value": 1.0}),
    ("eval_accuracy", {"value": None}),
    ("eval_accuracy", {"value": "0.73"}),
    ("eval_accuracy", {"value": float("nan")}),
    ("eval_accuracy", {"metadata": {"samples_count": 5}}),
    ("eval_accuracy", {"metadata": None}),
    ("eval_start", {"metadata": {"samples_count": 5}}),
    ("epoch_start", {"metadata": {}}),
    ("block_start", {"metadata": {"epoch_count": 0, "first_epoch_num": 1}}),
    ("block_start", {"metadata": {"epoch_count": 1}}),
    ("block_start", {"metadata": {"samples_count": -1}}),
    ("train_samples", {"value": ""}),
    ("train_samples", {"value": None}),
    ("init_start", {"time_ms": 1}),
    ("init_stop", {"time_ms": "soon"}),
    ("init_stop", {"time_ms": None}),
    ("run_stop", {"metadata": {}}),
    ("run_stop", {"metadata": {"status": "aborted"}}),
    ("seed", {"key": ["a", "list"]}),
    ("seed", {"key": None}),
    ("opt_lamb_beta_1", {"value": 9}),
]
TEXTS = [
    ("}\n", "}\x1b[0m\n"),
    ("\n", "\r"),
    ('"time_ms"', '"time"'),
    ('"metadata"', '"meta"'),
    (":::MLLOG ", ":::MLLOG"),
    (":::MLLOG ", ":::MLLOG :::MLLOG "),
    (":::MLLOG {", ":::MLLOG [{"),
    (":::MLLOG {", ":::MLLOG 7 {"),
    (":::MLLOG {", ":::MLLOG  \t {"),
    (":::MLLOG {", ":::MLLOG \u00a0{"),
    ("}\n", "} \t\n"),
    ("}\n", "}\u00a0\n"),
    ("}\n", "}\u0085 1\n"),
]


def line(log, key, /, **fields):
    found = next(record for record in log.lines if record["key"] == key)
    return f":::MLLOG {json.dumps(found | fields)}\n"


@pytest.mark.parametrize("mutate", [*mutations()])
def test_verdict_equals_the_official_one_on_mutated_logs(
    mutate, writer, tmp_path, official_compliance
):
    path = tmp_path / "result_0.txt"
    path.write_bytes(mutate(writer()).encode("latin-1"))
    assert run_of(read_log(path)).compliant == official_compliance(path)


def test_a_valid_log_passes_and_each_missing_key_is_named(
    writer, tmp_path, official_compliance
):
    path = writer().write(tmp_path / "result_0.txt")
    assert official_compliance(path)
    assert check_compliance(read_log(path)) == []
    writer().drop("eval_samples").write(path)
    (finding,) = check_compliance(read_log(path))
    assert (finding.key, finding.rule, finding.hint) == (
        "eval_samples",
        "EXACTLY_ONE",
        "log 10000",
    )


def test_findings_name_the_line(writer, tmp_path):
    log = writer().change("gradient_accumulation_steps", value=0)
    (finding,) = check_compliance(
        read_log(log.write(tmp_path / "result_0.txt", prefix="noise\n"))
    )
    number = next(
        i
        for i, record in enumerate(log.lines)
        if record["key"] == "gradient_accumulation_steps"
    )
    assert finding.line == 2 * number + 2


@pytest.mark.parametrize("ruleset", rulesets())
def test_every_ruleset_with_bert_agrees_with_the_official_checker(
    ruleset, writer, tmp_path, official_compliance
):
    variants = {
        "valid": writer(),
        "no platform": writer().drop("submission_platform"),
        "status": writer().change("submission_status", value="shelf"),
        "samples only": writer().change("eval_start", metadata={"samples_count": 1}),
        "steps only": writer().change("eval_stop", metadata={"step_num": 1}),
        "open": writer(division="open"),
    }
    for name, log in variants.items():
        path = log.write(tmp_path / "result_0.txt")
        assert run_of(read_log(path), ruleset).compliant == official_compliance(
            path, ruleset
        ), name


def test_rulesets_without_bert_are_refused_with_those_that_have_it(writer, tmp_path):
    path = writer().write(tmp_path / "result_0.txt")
    with pytest.raises(ReviewError, match=r"no ruleset 9\.9\.9: choose .*5\.0\.0"):
        check_compliance(read_log(path), "9.9.9")
    assert rulesets()[-1] == "5.0.0"


def test_verdict_equals_the_official_one_on_published_logs(
    real_folders, official_compliance
):
    for path in [
        path for folder in real_folders for path in folder.glob("result_*.txt")
    ]:
        assert run_of(read_log(path)).compliant == official_compliance(path), path


NUMBER = st.one_of(st.integers(-5, 10**7), st.floats())
VALUE = st.one_of(
    st.none(), st.booleans(), NUMBER, st.text(max_size=3), st.lists(st.none())
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    edits=st.lists(st.tuples(st.integers(0, 4), VALUE), max_size=4),
)
def test_verdict_equals_the_official_one_under_random_edits(
    seed, edits, writer, tmp_path, official_compliance
):
    log, choose = writer(evaluations=3), random.Random(seed)
    for kind, value in edits:
        at = choose.randrange(len(log.lines))
        record = log.lines[at]
        if kind == 0:
            del log.lines[at]
        elif kind == 1:
            log.lines.insert(choose.randrange(len(log.lines)), dict(record))
        elif kind == 2:
            record["value"] = value
        elif kind == 3:
            record["metadata"] = {
                choose.choice(["epoch_num", "samples_count", "status"]): value
            }
        else:
            record[choose.choice(["key", "time_ms", "metadata"])] = value
    path = log.write(tmp_path / "result_0.txt")
    run = run_of(read_log(path))
    assert run.compliant == official_compliance(path)
    assert run.compliant == (
        not [finding for finding in run.findings if finding.severity == ERROR]
    )
