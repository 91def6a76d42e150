"""Settings from the environment: right types, and one clear line for everything else."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REQUIRED", ""), ("REQUIRED", "0"), ("REQUIRED", "11"), ("REQUIRED", "1.5"), ("REQUIRED", "three"),
        ("RATE", "0"), ("RATE", "2"), ("RATE", "nan"), ("RATE", "inf"), ("FLAG", "2"), ("KIND", "c"), ("SEED", "x"),
    ],
)  # fmt: skip
def test_wrong_value_names_the_variable_and_what_was_expected(name, value):
    with pytest.raises(ConfigError) as caught:
        from_env(Sample, {"REQUIRED": "1", name: value})
    assert name in str(caught.value)
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.dictionaries(
        st.sampled_from(["REQUIRED", "RATE", "FLAG", "KIND", "SEED"]),
        st.text(max_size=12),
    )
)
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


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("DEVICE", "gpu", "did you mean cuda?"),
        ("DEVICE", "cpus", "did you mean cpu?"),
        ("LR", "2e5", "expected a number, at most 10, above 0"),
    ],
)
def test_a_wrong_value_of_the_trainer_says_what_is_meant(name, value, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        from_env(
            dist.DistConfig if name == "DEVICE" else schedule.ScheduleConfig,
            {"LR": "1", name: value},
        )
