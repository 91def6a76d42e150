"""One list of variables: the table follows the code, and a name that looks misspelt stops the run before it starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bert.core import variables
from common.env import ConfigError

# What shells, schedulers, containers, compilers and other libraries export on machines of this
# trade.
NAMES = Path(__file__).with_name("ordinary_names.txt")
ORDINARY = NAMES.read_text(encoding="utf-8").split()

TYPOS = {
    "OPT_LAMB_GAMMA": "OPT_LAMB_BETA_2",  # of our kind, and resembles none
    "BATCHSZIE": "BATCHSIZE",  # these four passed a whole check once, or a whole run
    "LEARNING_RATE": "LR",
    "FUSE": "FUSED",
    "DGXNODES": "DGXNNODES",
    "BATCHSIZ": "BATCHSIZE",
    "LRR": "LR",
    "SEDE": "SEED",
    "MAX_STEP": "MAX_STEPS",
    "DATA_DIR": "DATADIR",
    "DIST_TIMEOT": "DIST_TIMEOUT",
    "EVAL_ITER_SAMPELS": "EVAL_ITER_SAMPLES",
    "OPT_LAMB_BETA1": "OPT_LAMB_BETA_1",
    "WEIGHT_DECAY": "WEIGHT_DECAY_RATE",
    "SUBMISSION_DIVISON": "SUBMISSION_DIVISION",
    "EVAL_INTERVAL_SAMPLES": "EVAL_ITER_SAMPLES",
    "LERNING_RATE": "LR",
    "LEARNING_RATES": "LR",
}


def listed():
    return {entry.name for group in variables.groups().values() for entry in group}


@pytest.mark.parametrize("name", TYPOS)
def test_a_misspelt_name_stops_with_the_name_that_was_meant(name):
    with pytest.raises(ConfigError, match=rf"^{name}: did you mean {TYPOS[name]}\b"):
        variables.check_names({name: "1", "LR": "1"})


def test_all_misspelt_names_are_in_one_line():
    with pytest.raises(ConfigError) as caught:
        variables.check_names({"FUSE": "none", "BATCHSZIE": "8"})
    first, second = "BATCHSZIE: did you mean BATCHSIZE?", "FUSE: did you mean FUSED?"
    assert str(caught.value).startswith(f"{first} {second}")


def test_the_ordinary_environment_of_a_cluster_and_this_very_one_pass():
    variables.check_names(dict.fromkeys([*ORDINARY, *listed()], "1"))
    variables.check_names(os.environ)


@pytest.mark.parametrize(
    ("name", "other", "as_now"),
    [
        ("OPT_EPSILON", "1e-8", "0.000001"),
        ("LR_DECAY_POWER", "0.5", "1.0"),
        ("MTBF_HOURS", "8", "4e3"),
        ("SHARD_GRADIENTS", "1", "0"),
        ("FP8_RECIPE", "current", "delayed"),
        ("DO_LOWER_CASE", "0", ""),
    ],
)
def test_a_setting_that_is_gone_stops_unless_it_is_as_now(name, other, as_now):
    cure = variables.gone()[name].meaning
    with pytest.raises(ConfigError) as caught:
        variables.check_names({name: other, "LR": "1"})
    assert str(caught.value).startswith(f"{name}={other} is gone: {cure}.")
    variables.check_names({name: as_now, "LR": "1"})
    with pytest.raises(ConfigError) as caught:
        variables.check_given(["LR", name])  # after a script: nobody else can be meant
    assert str(caught.value) == f"{name} is gone: {cure}"


def test_names_that_are_gone_are_read_by_nothing_and_cures_and_synonyms_are():
    gone = variables.gone()
    assert len(gone) > 20
    assert not listed() & gone.keys(), "a name that returns leaves launch/gone.txt"
    for entry in gone.values():
        named = re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", entry.meaning)
        assert set(named) <= listed(), entry
    assert set(variables.SYNONYMS.values()) <= listed()
    assert not set(variables.SYNONYMS) & listed()


def test_a_listed_name_that_nothing_declares_is_refused(monkeypatch, tmp_path):
    (tmp_path / "variables.txt").write_text("== Group\nGHOST\n")
    monkeypatch.setattr(variables, "LIST", tmp_path / "variables.txt")
    with pytest.raises(ValueError, match="GHOST is not a setting of the trainer"):
        variables.groups()


def test_the_table_shows_what_this_environment_sets():
    rows = variables.table({"LR": "0.02"}).splitlines()
    assert any(re.match(r"\* LR +0\.02 +base learning rate", row) for row in rows)
    assert any(re.match(r"  CLIP +after +", row) for row in rows)
    lines = variables.table({"DATADIR": "/x" * 30}, 100).splitlines()
    assert max(map(len, lines)) <= 101


@pytest.mark.parametrize(
    ("words", "status"),
    [("bert --help", 0), ("bert --batchsze 8", 2), ("bert.core.variables", 0)],
)
def test_help_waits_for_no_heavy_import(words, status, repository, tmp_path):
    for package in ("torch", "numpy", "scipy", "h5py"):
        (tmp_path / f"{package}.py").write_text("raise SystemExit('imported')")
    path = f"{tmp_path}:{repository / 'implementations'}:{repository}"
    options = {"env": {"PYTHONPATH": path}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", *words.split()], **options)
    assert "imported" not in done.stdout + done.stderr
    assert done.returncode == status, done.stderr
