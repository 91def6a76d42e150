"""Settings from the environment: right types, and one clear line for everything else."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.core import dist
from bert.pretraining.config import PretrainingConfig
from bert.training import schedule
from common.env import ConfigError, env, from_env, variables


@dataclass(frozen=True, kw_only=True)
class Sample:
    required: int = env("REQUIRED", at_least=1, at_most=10)
    rate: float = env("RATE", 0.5, above=0, below=2)
    flag: bool = env("FLAG", False)
    kind: str = env("KIND", "a", choices=("a", "b"))
    seed: int | None = env("SEED", None)
    path: Path | None = env("A_PATH", None)


def test_values_are_typed_and_defaults_apply():
    assert from_env(Sample, {"REQUIRED": "3", "FLAG": "yes", "A_PATH": "/x"}) == Sample(
        required=3, rate=0.5, flag=True, kind="a", seed=None, path=Path("/x")
    )
    assert from_env(Sample, {"REQUIRED": "1e1", "SEED": " "}).required == 10


@pytest.mark.parametrize(("name", "value"), [
    ("REQUIRED", ""), ("REQUIRED", "0"), ("REQUIRED", "11"), ("REQUIRED", "1.5"), ("REQUIRED", "three"),
    ("RATE", "0"), ("RATE", "2"), ("RATE", "nan"), ("RATE", "inf"), ("FLAG", "2"), ("KIND", "c"), ("SEED", "x"),
])  # fmt: skip
def test_wrong_value_names_the_variable_and_what_was_expected(name, value):
    with pytest.raises(ConfigError, match=rf"^.*{name}.*expected.*\Z"):
        from_env(Sample, {"REQUIRED": "1", name: value})


NAMES = ["REQUIRED", "RATE", "FLAG", "KIND", "SEED"]


@settings(deadline=None)  # a busy machine is no failure
@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=12)))
def test_any_text_gives_a_config_or_a_config_error(environ):
    try:
        config = from_env(Sample, environ)
    except ConfigError:
        return
    assert 1 <= config.required <= 10
    assert 0 < config.rate < 2


def test_every_variable_is_documented_and_read_once():
    names = [variable.name for _, variable, _ in variables(PretrainingConfig)]
    assert len(names) == len(set(names))
    for _, variable, _ in variables(PretrainingConfig):
        assert variable.doc, variable.name


@pytest.mark.parametrize(("config", "name", "value", "told"), [
    (dist.DistConfig, "DEVICE", "gpu", "did you mean cuda?"),
    (dist.DistConfig, "DEVICE", "cpus", "did you mean cpu?"),
    (schedule.ScheduleConfig, "LR", "2e5", "expected a number, at most 10, above 0"),
])  # fmt: skip
def test_a_wrong_value_of_the_trainer_says_what_is_meant(config, name, value, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_env(config, {"LR": "1", name: value})
