"""The learning-rate rule of the published MLPerf BERT submissions: a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from bert.env import ConfigError, env


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base rate, length and warm-up. Without LR_DECAY_STEPS, MAX_STEPS is both the end of the run and of the decay."""

    lr: float = env("LR", above=0, doc="base learning rate")
    max_steps: int = env(
        "MAX_STEPS", at_least=1, doc="optimizer steps at which the run ends, and the decay of the rate"
    )
    decay_steps: int = env("LR_DECAY_STEPS", 0, at_least=0, doc="steps at which the rate reaches END_LR; 0: MAX_STEPS")
    end_lr: float = env("END_LR", 0.0, at_least=0, doc="learning rate where the decay ends, and from there on")
    start_warmup_step: int = env("START_WARMUP_STEP", 0, doc="step at which warm-up starts; may be negative")
    warmup_steps: int = env("WARMUP_STEPS", 0, at_least=0, doc="length of the warm-up; 0 takes WARMUP_PROPORTION")
    warmup_proportion: float = env(
        "WARMUP_PROPORTION", 0.0, at_least=0, at_most=1, doc="warm-up as a share of MAX_STEPS"
    )
    power: float = env("LR_DECAY_POWER", 1.0, above=0, doc="degree of the polynomial decay")

    def check(self) -> None:
        """Raises ConfigError where two of the settings contradict each other."""
        if self.end_lr > self.lr:
            raise ConfigError(f"END_LR={self.end_lr:g}: above LR={self.lr:g}, where the decay begins")
        if self.warmup_steps and self.warmup_proportion:
            raise ConfigError("WARMUP_STEPS and WARMUP_PROPORTION are both set: leave one of them at 0")
        if not self.warmup_steps and self.start_warmup_step:
            raise ConfigError(
                "START_WARMUP_STEP is set and WARMUP_STEPS is not: set WARMUP_STEPS, or START_WARMUP_STEP=0"
            )

    @property
    def warmup(self) -> tuple[int, int]:
        """(number of warm-up steps, step at which they start) after the defaults are resolved."""
        if self.warmup_steps:
            return self.warmup_steps, self.start_warmup_step
        return int(self.max_steps * self.warmup_proportion), 0


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of optimizer step ``step`` (1 is the first).

    With o = 1 if the warm-up starts at 0 else 0 and t = step - o - start: base * t / warmup while t < warmup, then
    end + (base - end) * (1 - (step - o) / decay_steps) ** power, and end after those steps. The two branches need not
    meet: the published rule drops where warm-up ends (at 434x8, from 1.0 to 0.60 of the base), and runs are comparable
    only if it is kept.
    """
    warmup, start = config.warmup
    offset = 1 if start == 0 else 0
    progress = step - offset
    if progress - start < warmup:
        return config.lr * max(0.0, (progress - start) / warmup)
    remaining = max(0.0, 1.0 - progress / (config.decay_steps or config.max_steps))
    return config.end_lr + (config.lr - config.end_lr) * remaining**config.power
