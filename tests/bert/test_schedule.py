"""The learning-rate rule at its edges; expected values by hand from the published rule."""

from __future__ import annotations

import pytest

from bert.env import ConfigError
from bert.schedule import Config, learning_rate


def test_without_warm_up_the_first_step_has_the_base_rate_and_decay_is_linear():
    config = Config(lr=0.00096, max_steps=3680)
    assert learning_rate(1, config) == pytest.approx(0.00096)
    assert learning_rate(2, config) == pytest.approx(0.00096 * (1 - 1 / 3680))
    assert learning_rate(3680, config) == pytest.approx(0.00096 / 3680)


def test_rate_jumps_down_where_a_warm_up_with_negative_start_ends():
    """434x8: 0.35 of the base at step 1, 1.0 just before step 190, then 0.60."""
    config = Config(lr=3.6e-3, max_steps=480, warmup_steps=290, start_warmup_step=-100)
    assert learning_rate(1, config) == pytest.approx(3.6e-3 * 101 / 290)
    assert learning_rate(189, config) == pytest.approx(3.6e-3 * 289 / 290)
    assert learning_rate(190, config) == pytest.approx(3.6e-3 * (1 - 190 / 480))


def test_huge_negative_start_is_a_flat_rate_for_330_steps():
    config = Config(lr=2.58e-3, max_steps=700, warmup_steps=200330, start_warmup_step=-200000)
    assert learning_rate(1, config) == pytest.approx(2.58e-3 * 200001 / 200330)
    assert learning_rate(329, config) == pytest.approx(2.58e-3, rel=1e-5)
    assert learning_rate(330, config) == pytest.approx(2.58e-3 * (1 - 330 / 700))


def test_a_start_before_the_whole_warm_up_means_no_warm_up():
    config = Config(lr=2.58e-3, max_steps=780, warmup_steps=170200, start_warmup_step=-200000)
    assert learning_rate(1, config) == pytest.approx(2.58e-3 * (1 - 1 / 780))


def test_warm_up_from_zero_starts_at_zero():
    config = Config(lr=1.0, max_steps=100, warmup_proportion=0.1)
    assert config.warmup == (10, 0)
    assert [learning_rate(step, config) for step in (1, 2, 10)] == pytest.approx([0.0, 0.1, 0.9])
    assert learning_rate(11, config) == pytest.approx(1 - 10 / 100)


def test_rate_is_never_negative_past_the_end():
    assert learning_rate(5000, Config(lr=1.0, max_steps=100)) == 0.0


@pytest.mark.parametrize(
    "settings", [{"warmup_steps": 5, "warmup_proportion": 0.1}, {"start_warmup_step": -5}], ids=["both", "start-alone"]
)
def test_contradictions_are_refused(settings):
    with pytest.raises(ConfigError, match="WARMUP"):
        Config(lr=1.0, max_steps=10, **settings).check()


def test_a_decay_that_ends_before_the_run_stays_at_its_end():
    config = Config(lr=4e-4, max_steps=299, decay_steps=179, end_lr=5e-5, warmup_steps=82, start_warmup_step=-16)
    config.check()
    assert learning_rate(65, config) == pytest.approx(4e-4 * 81 / 82)
    assert learning_rate(66, config) == pytest.approx(5e-5 + 3.5e-4 * (1 - 66 / 179))
    assert learning_rate(179, config) == learning_rate(299, config) == 5e-5


def test_an_end_above_the_base_is_refused():
    with pytest.raises(ConfigError, match=r"END_LR=0\.1: above LR=0\.01"):
        Config(lr=0.01, max_steps=9, end_lr=0.1).check()
