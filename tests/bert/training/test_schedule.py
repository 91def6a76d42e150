"""The learning-rate rule at its edges; expected values by hand from the published rule."""

import pytest

from bert.training.schedule import RULES, ScheduleConfig, describe, learning_rate
from common.env import ConfigError

# By hand from the published rule: step -> rate.
MLPERF = [
    ({"lr": 0.00096, "max_steps": 3680},
     {1: 0.00096, 2: 0.00096 * (1 - 1 / 3680), 3680: 0.00096 / 3680, 5000: 0.0}),
    # 434x8: 0.35 of the base at step 1, 1.0 just before step 190, then 0.60.
    ({"lr": 3.6e-3, "max_steps": 480, "warmup_steps": 290, "start_warmup_step": -100},
     {1: 3.6e-3 * 101 / 290, 189: 3.6e-3 * 289 / 290, 190: 3.6e-3 * (1 - 190 / 480)}),
    # Flat for 330 steps.
    ({"lr": 2.58e-3, "max_steps": 700, "warmup_steps": 200330, "start_warmup_step": -200000},
     {1: 2.58e-3 * 200001 / 200330, 329: 2.58e-3 * 200329 / 200330, 330: 2.58e-3 * (1 - 330 / 700)}),
    # A start before the whole warm-up: none is left.
    ({"lr": 2.58e-3, "max_steps": 780, "warmup_steps": 170200, "start_warmup_step": -200000},
     {1: 2.58e-3 * (1 - 1 / 780)}),
    ({"lr": 1.0, "max_steps": 100, "warmup_proportion": 0.1},
     {1: 0.0, 2: 0.1, 10: 0.9, 11: 1 - 10 / 100}),
    # A decay that ends before the run stays at its end.
    ({"lr": 4e-4, "max_steps": 299, "decay_steps": 179, "end_lr": 5e-5, "warmup_steps": 82, "start_warmup_step": -16},
     {65: 4e-4 * 81 / 82, 66: 5e-5 + 3.5e-4 * (1 - 66 / 179), 179: 5e-5, 299: 5e-5}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "rates"), MLPERF)
def test_the_benchmarks_rule_at_its_edges(settings, rates):
    config = ScheduleConfig(**settings)
    config.check()
    found = {step: learning_rate(step, config) for step in rates}
    assert found == pytest.approx(rates)


REFUSED = [
    ({"warmup_steps": 5, "warmup_proportion": 0.1}, "WARMUP"),
    ({"start_warmup_step": -5}, "WARMUP"),
    ({"lr": 0.01, "end_lr": 0.1}, r"END_LR=0\.1 is above LR=0\.01"),
    ({"schedule": "dle", "end_lr": 0.1}, "LR_SCHEDULE=dle does not use END_LR: leave it unset"),
    ({"schedule": "linear", "start_warmup_step": -5, "warmup_steps": 9}, "linear does not use START_WARMUP_STEP"),
    ({"schedule": "mlperf", "constant_proportion": 0.1}, "mlperf does not use CONSTANT_PROPORTION"),
    ({"schedule": "poly", "warmup_proportion": 0.6, "constant_proportion": 0.5}, "expected a sum of at most 1"),
    ({"schedule": "samsung", "warmup_steps": 10}, "a warm-up of 10 of 10 steps leaves none to decay"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_contradicts_or_is_unused_or_leaves_no_room_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**{"lr": 1.0, "max_steps": 10} | settings).check()


# Computed apart from this code, from the rules of DeepLearningExamples, Habana and Samsung: step ->
# share or rate.
DLE_1 = ScheduleConfig(schedule="dle", lr=6e-3, max_steps=7038, warmup_proportion=0.2843)  # fmt: skip
DLE_2 = ScheduleConfig(schedule="dle", lr=4e-3, max_steps=1563, warmup_proportion=0.128)
POLY = ScheduleConfig(schedule="poly", lr=1.5e-3, max_steps=155_000, warmup_proportion=0.05, constant_proportion=0.25)  # fmt: skip
LINEAR = ScheduleConfig(
    schedule="linear", lr=3e-5, max_steps=200, warmup_proportion=0.1
)
SAMSUNG_SHARES = {1: 0.2073, 65: 0.9878, 66: 1.1442, 82: 1.0, 120: 0.6575, 178: 0.1349, 179: 0.1258, 299: 0.1258}  # fmt: skip
SAMSUNG_LR = 3.9299421615882676e-4
SAMSUNG = ScheduleConfig(
    schedule="samsung", lr=SAMSUNG_LR, end_lr=4.94549100544884e-5, max_steps=299, decay_steps=179, warmup_steps=82,
    start_warmup_step=-16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        (DLE_1, {1: 2.9986e-6, 2000: 5.9973e-3, 2001: 5.0759e-3, 7037: 7.152e-5, 7038: 0.0}),
        (DLE_2, {200: 3.9987e-3, 201: 3.7340e-3}),
        (POLY, {1: 1.9355e-7, 7750: 1.5e-3, 40_000: 1.5e-3, 46_500: 1.5e-3, 100_000: 7.6037e-4, 155_000: 0.0}),
        # To the base, and to zero at the last step.
        (LINEAR, {1: 1.5e-6, 10: 1.5e-5, 19: 2.85e-5, 20: 3e-5, 110: 1.5e-5, 199: 3e-5 / 180, 200: 0.0, 300: 0.0}),
        (SAMSUNG, {step: share * SAMSUNG_LR for step, share in SAMSUNG_SHARES.items()}),
    ],
    ids=["dle-phase-1", "dle-phase-2", "poly", "linear", "samsung"],
)  # fmt: skip
def test_published_rules_have_their_published_values(config, rates):
    config.check()
    found = {step: learning_rate(step, config) for step in rates}
    assert found == pytest.approx(rates, rel=4e-4, abs=1e-12)


@pytest.mark.parametrize("schedule", ["dle", "poly", "linear", "samsung"])
def test_a_warm_up_in_steps_is_one_in_shares_and_a_longer_one_is_cut_off(schedule):
    given = {"schedule": schedule, "lr": 1.0}
    steps = ScheduleConfig(**given, max_steps=200, warmup_steps=50)
    share = ScheduleConfig(**given, max_steps=200, warmup_proportion=0.25)
    run = ScheduleConfig(**given, max_steps=77, decay_steps=200, warmup_steps=50)
    for step in (1, 49, 50, 51, 77):
        expected = learning_rate(step, steps)
        assert learning_rate(step, share) == pytest.approx(expected)
        assert learning_rate(step, run) == expected


@pytest.mark.parametrize("schedule", ["mlperf", "samsung"])
def test_before_a_warm_up_that_starts_later_the_rate_is_0(schedule):
    config = ScheduleConfig(
        schedule=schedule, lr=1.0, max_steps=99, warmup_steps=9, start_warmup_step=5
    )
    assert [learning_rate(step, config) for step in (1, 5)] == [0, 0]
    assert learning_rate(7, config) > 0


@pytest.mark.parametrize("schedule", ["dle", "poly", "linear"])
def test_a_run_that_is_all_warm_up_has_a_rate_at_every_step(schedule):
    given = {"schedule": schedule, "lr": 1.0, "max_steps": 10}
    config = ScheduleConfig(**given, warmup_proportion=1.0)
    config.check()
    assert [learning_rate(step, config) for step in (1, 9)] == pytest.approx([0.1, 0.9])
    assert 0 <= learning_rate(10, config) <= 1


def test_every_rule_is_documented(repository):
    table = (repository / "docs" / "train.md").read_text(encoding="utf-8")
    assert [rule for rule in RULES if f"\n| `{rule}` |" not in table] == []


def test_the_schedule_is_described_by_four_rates():
    rates = "2.999e-06 at step 1, 0.005076 at step 2,001, 0.004243 at step 3,519, 0 at"
    assert describe(DLE_1) == f"dle: {rates} step 7,038"
    assert "0.0004497 at step 66" in describe(SAMSUNG)
