"""The fast compliance check agrees with the official one."""

import json
import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from review.logs.mllog import TOKEN, read_log
from review.logs.output import ERROR, ReviewError
from review.results.run import run_of
from review.rulebook import official
from review.rulebook.compliance import check_compliance, rulesets

from ..conftest import UNTIMED, LogWriter, official_compliance
from ..verdict.damage import first_of

KEYS = """
cache_clear init_start init_stop run_start run_stop submission_benchmark submission_division submission_org
submission_platform submission_status seed global_batch_size gradient_accumulation_steps opt_base_learning_rate
opt_lamb_epsilon opt_lamb_beta_1 opt_lamb_beta_2 opt_lamb_weight_decay_rate opt_learning_rate_training_steps
opt_learning_rate_warmup_steps num_warmup_steps start_warmup_step epoch_start block_start eval_start eval_stop
eval_accuracy epoch_stop block_stop train_samples eval_samples weights_initialization max_predictions_per_seq
"""
WITHOUT = "epoch_start block_start", "epoch_stop block_stop", "eval_start eval_stop"
TWICE = "run_start seed global_batch_size submission_division eval_samples cache_clear"
EPOCHS = {"epoch_count": 0, "first_epoch_num": 1}
VALUES = {  # fields of a key, one change each
    "submission_division": ({"value": "open"}, {"value": "Closed"}),
    "submission_benchmark": ({"value": "resnet"}, {"value": ["bert"]}),
    "gradient_accumulation_steps": ({"value": 0}, {"value": "1"}),
    "eval_accuracy": (
        *({"value": value} for value in (0.71, 1.0, None, "0.73", float("nan"))),
        {"metadata": {"samples_count": 5}}, {"metadata": None},
    ),
    "eval_start": ({"metadata": {"samples_count": 5}},),
    "epoch_start": ({"metadata": {}},),
    "block_start": tuple({"metadata": one} for one in (EPOCHS, {"epoch_count": 1}, {"samples_count": -1})),
    "train_samples": ({"value": ""}, {"value": None}),
    "init_start": ({"time_ms": 1},),
    "init_stop": ({"time_ms": "soon"}, {"time_ms": None}),
    "run_stop": ({"metadata": {}}, {"metadata": {"status": "aborted"}}),
    "seed": ({"key": ["a", "list"]}, {"key": None}),
    "opt_lamb_beta_1": ({"value": 9},),
}  # fmt: skip
TEXTS = {  # what stands instead of some bytes, one change each
    "}\n": ("}\x1b[0m\n", "} \t\n", "}\u00a0\n", "}\u0085 1\n"),
    "\n": ("\r",),
    '"time_ms"': ('"time"',),
    '"metadata"': ('"meta"',),
    ":::MLLOG ": (":::MLLOG", ":::MLLOG :::MLLOG ", ":::MLLOG [", ":::MLLOG 7 ", ":::MLLOG  \t ", ":::MLLOG \u00a0"),
}  # fmt: skip


def line(log, key, **fields):
    found = next(record for record in log.lines if record["key"] == key)
    return f":::MLLOG {json.dumps(found | fields)}\n"


MUTATIONS = [  # of a log, as its text
    *(lambda log, keys=keys: log.drop(*keys.split()).text() for keys in (*KEYS.split(), *WITHOUT)),
    *(lambda log, key=key: log.text() + line(log, key) for key in TWICE.split()),
    *(lambda log, key=key: log.text() + line(log, key, value=7) for key in TWICE.split()),
    *(lambda log, key=key, fields=fields: log.change(key, **fields).text()
      for key, changes in VALUES.items() for fields in changes),
    *(lambda log, old=old, new=new: log.text().replace(old, new)
      for old, others in TEXTS.items() for new in others),
    lambda log: "",
    lambda log: "\x00\xff noise\r" + log.text(),
    lambda log: log.text(prefix="\x1b[32m12: "),
    lambda log: log.text()[:-40],
    lambda log: "".join(reversed(log.text().splitlines(keepends=True))),
    lambda log: log.text() + ":::MLLOG " + "[" * 20_000 + "\n",
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_verdict_is_the_official_one_on_mutated_logs(mutate, tmp_path):
    path = tmp_path / "result_0.txt"
    path.write_bytes(mutate(LogWriter()).encode("latin-1"))
    assert run_of(read_log(path)).compliant == official_compliance(path)


def test_a_valid_log_passes_and_findings_name_key_and_line(tmp_path):
    path = LogWriter().write(tmp_path / "result_0.txt")
    assert official_compliance(path)
    assert check_compliance(read_log(path)) == []
    LogWriter().drop("eval_samples").write(path)
    (found,) = check_compliance(read_log(path))
    named = (found.key, found.rule, found.hint)
    assert named == ("eval_samples", "EXACTLY_ONE", "log 10000")
    key = "gradient_accumulation_steps"
    log = LogWriter().change(key, value=0)
    (found,) = check_compliance(read_log(log.write(path, prefix="noise\n")))
    assert found.line == 2 * first_of(log.lines, key) + 2


@pytest.mark.parametrize("ruleset", rulesets())
def test_every_ruleset_agrees_with_the_official_checker(ruleset, tmp_path):
    for log in (
        LogWriter(),
        LogWriter().drop("submission_platform"),
        LogWriter().change("submission_status", value="shelf"),
        LogWriter().change("eval_start", metadata={"samples_count": 1}),
        LogWriter().change("eval_stop", metadata={"step_num": 1}),
        LogWriter(division="open"),
    ):
        path = log.write(tmp_path / "result_0.txt")
        stands = official_compliance(path, ruleset)
        assert run_of(read_log(path), ruleset).compliant == stands


def test_rulesets_without_bert_are_refused_with_those_that_have_it(tmp_path):
    path = LogWriter().write(tmp_path / "result_0.txt")
    with pytest.raises(ReviewError, match=r"no ruleset 9\.9\.9: choose .*5\.0\.0"):
        check_compliance(read_log(path), "9.9.9")
    assert rulesets()[-1] == "5.0.0"


def test_verdict_is_the_official_one_on_published_logs(real_folders):
    for path in [log for folder in real_folders for log in folder.glob("result_*.txt")]:
        assert run_of(read_log(path)).compliant == official_compliance(path), path


NUMBER = st.one_of(st.integers(-5, 10**7), st.floats())
VALUE = st.one_of(
    st.none(), st.booleans(), NUMBER, st.text(max_size=3), st.lists(st.none())
)


@settings(max_examples=60, **UNTIMED)
@given(
    seed=st.integers(0, 2**32),
    edits=st.lists(st.tuples(st.integers(0, 4), VALUE), max_size=4),
)
def test_verdict_is_the_official_one_under_edits(seed, edits, tmp_path):
    log, choose = LogWriter(evaluations=3), random.Random(seed)
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
            name = choose.choice(["epoch_num", "samples_count", "status"])
            record["metadata"] = {name: value}
        else:
            record[choose.choice(["key", "time_ms", "metadata"])] = value
    path = log.write(tmp_path / "result_0.txt")
    run = run_of(read_log(path))
    assert run.compliant == official_compliance(path)
    assert run.compliant == (ERROR not in [one.severity for one in run.findings])


PARTS = [TOKEN, ":::MLLOG", " ", "x", "{}", "\r", "\n", "\x85", "\u2028"]


@settings(max_examples=200, **UNTIMED)
@example(f"x\n{TOKEN}")
@given(line=st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_a_line_is_cut_as_the_official_tools_cut_it(line):
    cut = (f".*{TOKEN}", TOKEN, line)
    assert official.substitute(*cut) == re.sub(*cut)


def test_the_official_tools_cut_their_lines_so():
    assert official._fork(lambda _: re.sub)[0] is official.substitute
