"""Learning-rate rules, LR_SCHEDULE: pure functions of the step."""

# The rules, whose names LR_SCHEDULE chooses from, come before the config that they read.
from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

from common.env import ConfigError, env

DLE_DEGREE = 0.5


Rate = Callable[[int, "ScheduleConfig"], float]


class ScheduleRule(NamedTuple):
    """A rule, and what is particular to it."""

    # Of a step from 1 on; raises ConfigError for settings that it cannot follow.
    rate: Rate
    # Variables that not all rules use.
    uses: Set[str] = frozenset()
    # Power of the decay, if it is a polynomial, for the MLPerf log.
    degree: float | None = None


def mlperf(step: int, config: ScheduleConfig) -> float:
    """The rule of the published MLPerf BERT submissions.

    With o = 1 if the warm-up starts at 0 else 0 and t = step - o - start: base * t / warmup while t
    < warmup, then end + (base - end) * (1 - (step - o) / decay_steps), and end after those steps.
    The two branches need not meet: the published rule drops where warm-up ends (at 434x8, from 1.0
    to 0.60 of the base), and runs are comparable only if it is kept.
    """
    warmup, start = config.warmup
    # The published code counts steps from 0 here, and from 1 where START_WARMUP_STEP is set.
    progress = step - 1 if start == 0 else step
    # With a start far below 0 and a warm-up shorter than that, as published for GB200, never.
    if progress - start < warmup:
        # 0 before a warm-up that starts later than the run.
        return config.lr * max(0.0, (progress - start) / warmup)
    return config.end_lr + (config.lr - config.end_lr) * _left(progress, config)


def after_warmup(rate: Rate) -> Rate:
    """The warm-up, LR * step / its steps, which need not end with a whole step; then ``rate``."""

    def whole(step: int, config: ScheduleConfig) -> float:
        warmup, flat = config.warmup_share, config.constant_proportion
        # Shares overlap above 1, and nothing is left to decay.
        if warmup + flat > 1:
            raise ConfigError(
                f"CONSTANT_PROPORTION={flat:g} and a warm-up of {warmup:g} of the steps: expected a sum of at most 1"
            )
        t = step / config.length
        return config.lr * t / warmup if t < warmup else rate(step, config)

    return whole


@after_warmup
def dle(step: int, config: ScheduleConfig) -> float:
    """NVIDIA's DeepLearningExamples: with t = step / length, base * sqrt(1 - t), which falls where
    warm-up ends.
    """
    return config.lr * _left(step, config) ** DLE_DEGREE


@after_warmup
def poly(step: int, config: ScheduleConfig) -> float:
    """Habana's BERT-1.5B and 5B: a constant stretch, then a line to 0."""
    warmup, flat = config.warmup_share, config.constant_proportion
    if step / config.length < warmup + flat:
        return config.lr
    decay = 1 - warmup - flat
    return config.lr * _left(step, config) / decay if decay > 0 else 0.0


@after_warmup
def linear(step: int, config: ScheduleConfig) -> float:
    """Fine-tuning's: a line from the base to 0."""
    decay = 1 - config.warmup_share
    if decay > 0:
        return config.lr * _left(step, config) / decay
    # A run that is all warm-up has the base rate at its last step.
    return config.lr * (step <= config.length)


def samsung(step: int, config: ScheduleConfig) -> float:
    """Samsung's 1,024 GPUs of v1.1: with D the length and W the warm-up, base * (step - start) / W,
    then a line that reaches END_LR at D.

    The line is base only at step W: where the warm-up starts before 0, it is entered earlier, above
    base.
    """
    warmup, start = config.warmup
    if warmup >= config.length:
        raise ConfigError(
            f"LR_SCHEDULE=samsung: a warm-up of {warmup} of {config.length} steps leaves none to decay"
        )
    if step > config.length:
        return config.end_lr
    if step - start < warmup:
        # 0 before a warm-up that starts later than the run.
        return max(0.0, config.lr * (step - start) / warmup)
    share = (step - warmup) / (config.length - warmup)
    return config.end_lr + (config.lr - config.end_lr) * (1 - share)


def _left(step: int, config: ScheduleConfig) -> float:
    return max(0.0, 1 - step / config.length)


RULES = {
    "mlperf": ScheduleRule(mlperf, {"END_LR", "START_WARMUP_STEP"}, degree=1.0),
    "dle": ScheduleRule(dle, degree=DLE_DEGREE),
    "poly": ScheduleRule(poly, {"CONSTANT_PROPORTION"}, degree=1.0),
    "linear": ScheduleRule(linear, degree=1.0),
    "samsung": ScheduleRule(samsung, {"END_LR", "START_WARMUP_STEP"}, degree=1.0),
}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Rule, base rate, length and warm-up. Without LR_DECAY_STEPS, MAX_STEPS ends both the run and
    the decay.
    """

    schedule: str = env(
        "LR_SCHEDULE", "mlperf", "learning-rate rule, see docs/train.md", choices=RULES
    )
    lr: float = env("LR", above=0, at_most=10, doc="base learning rate")
    max_steps: int = env(
        "MAX_STEPS",
        at_least=1,
        doc="optimizer steps of the run, and of the learning rate's decay",
    )
    decay_steps: int = env(
        "LR_DECAY_STEPS",
        0,
        "steps at which the rate reaches END_LR; 0: MAX_STEPS",
        at_least=0,
    )
    end_lr: float = env(
        "END_LR", 0.0, "learning rate at the end of the decay and after it", at_least=0
    )
    start_warmup_step: int = env(
        "START_WARMUP_STEP", 0, "step at which warm-up starts; may be negative"
    )
    warmup_steps: int = env(
        "WARMUP_STEPS", 0, "length of the warm-up; 0: by WARMUP_PROPORTION", at_least=0
    )
    warmup_proportion: float = env(
        "WARMUP_PROPORTION",
        0.0,
        "warm-up as a share of the steps",
        at_least=0,
        at_most=1,
    )
    constant_proportion: float = env(
        "CONSTANT_PROPORTION",
        0.0,
        "poly: share of the steps at LR before the decay",
        at_least=0,
        at_most=1,
    )

    def check(self) -> None:
        """Raises ConfigError if settings contradict each other, or the rule does not use one that
        is set.
        """
        if self.end_lr > self.lr:
            raise ConfigError(
                f"END_LR={self.end_lr:g} is above LR={self.lr:g}, where the decay begins"
            )
        if self.warmup_steps and self.warmup_proportion:
            raise ConfigError(
                "WARMUP_STEPS and WARMUP_PROPORTION are both set: leave one of them at 0"
            )
        values = {
            "END_LR": self.end_lr,
            "START_WARMUP_STEP": self.start_warmup_step,
            "CONSTANT_PROPORTION": self.constant_proportion,
        }
        is_set = {name for name, value in values.items() if value}
        if unused := is_set - self.rule.uses:
            raise ConfigError(
                f"LR_SCHEDULE={self.schedule} does not use {', '.join(sorted(unused))}: leave it unset"
            )
        if not self.warmup_steps and self.start_warmup_step:
            raise ConfigError(
                "START_WARMUP_STEP without WARMUP_STEPS: set WARMUP_STEPS, or START_WARMUP_STEP=0"
            )
        learning_rate(1, self)  # the rule may refuse

    @property
    def length(self) -> int:
        """Step at which the decay ends."""
        return self.decay_steps or self.max_steps

    @property
    def warmup(self) -> tuple[int, int]:
        """(number of warm-up steps, step at which they start), defaults resolved."""
        if self.warmup_steps:
            return self.warmup_steps, self.start_warmup_step
        # Rounded down, as in NVIDIA's code, so that a closed run has the published rates.
        return int(self.length * self.warmup_proportion), 0

    @property
    def warmup_share(self) -> float:
        """The warm-up as a share of the schedule's length."""
        return self.warmup_steps / self.length or self.warmup_proportion

    @property
    def rule(self) -> ScheduleRule:
        """That of the schedule's name."""
        return RULES[self.schedule]


def learning_rate(step: int, config: ScheduleConfig) -> float:
    """Learning rate of optimizer step ``step`` (1 is the first)."""
    return config.rule.rate(step, config)


def describe(config: ScheduleConfig) -> str:
    """The rule, and its rate at the first step, at the end of the warm-up, in the middle and at the
    last step.
    """
    last = config.max_steps
    warm = round(config.length * config.warmup_share) + config.warmup[1]
    rates = ", ".join(
        f"{learning_rate(step, config):.4g} at step {step:,}"
        for step in (1, min(max(warm, 1), last), max(last // 2, 1), last)
    )
    return f"{config.schedule}: {rates}"
