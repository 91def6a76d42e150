"""What the rules of MLPerf Training fix for BERT's closed division, checked before a run of it starts.

Sources, in words of the rule at each row: the training rules (training_policies/training_rules.adoc, round 5.0), the
reference (BERT of mlcommons/training: modeling.py, optimization.py, run_pretraining.py, bert_config.json) and its
README, which rules name where they say "as the reference". What they leave free is absent: batch size, learning rate,
warm-up, betas, epsilon, weight decay, number formats, and on which side of the all-reduce gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bert.core.dist import pick_device
from bert.core.env import ConfigError
from bert.model.config import BertConfig
from bert.pretraining.config import Config

# Of bert_config.json; initializer_range is left out, since every weight comes from the checkpoint.
MODEL_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    "layer_norm_eps",
)


@dataclass(frozen=True)
class Rule:
    """A rule: the variable it fixes, what it says, and which values keep it."""

    variable: str
    text: str
    value: Callable[[Config], Any]
    kept: Callable[[Config, Any], bool]


def rule_interval(global_batch_size: int) -> int:
    """Training samples between evaluations: floor(0.05 (230.23 GBS + 3,000,000) / 25,000) 25,000 (training rules)."""
    return int(0.05 * (230.23 * global_batch_size + 3_000_000) / 25_000) * 25_000


def _is_interval(config: Config, samples: int) -> bool:
    """The rule's interval, or that rounded up to whole steps."""
    size = config.global_batch_size
    interval = rule_interval(size)
    return samples in (interval, -(-interval // size) * size)


def _packing_factor(config: Config) -> int:
    return 2 if config.data.packed or config.data.batching == "online" else 1


def _equals(fixed: Any) -> Callable[[Config, Any], bool]:
    return lambda _, value: value == fixed


RULES = (
    Rule(
        "OPTIMIZER",
        "LAMB is the benchmark's only optimizer (training rules, optimizers)",
        lambda c: c.optim.optimizer,
        lambda c, _: c.optim.is_lamb,
    ),
    Rule(
        "MAX_GRAD_NORM",
        "gradients are clipped to a norm of 1.0 (reference, optimization.py)",
        lambda c: c.optim.max_grad_norm,
        _equals(1.0),
    ),
    Rule(
        "LAMB_RATIO",
        "LAMB scales by a trust ratio where weight decay applies, and nowhere else (reference, optimization.py)",
        lambda c: c.optim.lamb.ratio,
        _equals("decayed"),
    ),
    Rule(
        "LR_SCHEDULE",
        "the learning rate warms up linearly, then decays polynomially: mlperf (reference, optimization.py)",
        lambda c: c.schedule.schedule,
        _equals("mlperf"),
    ),
    Rule(
        "END_LR",
        "the learning rate decays to 0 (reference, optimization.py)",
        lambda c: c.schedule.end_lr,
        _equals(0.0),
    ),
    Rule(
        "LR_DECAY_POWER",
        "the learning rate decays linearly (reference, optimization.py)",
        lambda c: c.schedule.power,
        _equals(1.0),
    ),
    Rule(
        "TARGET_MLM_ACCURACY",
        "the quality target is 0.720 (training rules, benchmarks)",
        lambda c: c.evaluate.target,
        _equals(0.72),
    ),
    Rule(
        "NUM_EVAL_EXAMPLES",
        "every evaluation takes all 10,000 samples of the evaluation set (training rules, quality measure)",
        lambda c: c.evaluate.num_examples,
        _equals(10_000),
    ),
    Rule(
        "EVAL_ITER_SAMPLES",
        "evaluations come every floor(0.05 (230.23 batch + 3,000,000) / 25,000) 25,000 samples, or at the next whole "
        "step (training rules, evaluation frequency)",
        lambda c: c.evaluate.every_samples,
        _is_interval,
    ),
    Rule(
        "EVAL_ITER_START_SAMPLES",
        "the first evaluation comes after one interval (training rules, evaluation frequency)",
        lambda c: c.evaluate.start_samples,
        _is_interval,
    ),
    Rule(
        "EVAL_INITIAL",
        "the evaluation at sample 0 is skipped (training rules, evaluation frequency)",
        lambda c: int(c.evaluate.initial),
        _equals(0),
    ),
    Rule(
        "MAX_SEQ_LENGTH",
        "sequences have up to 512 tokens (reference, README)",
        lambda c: c.data.max_seq_length,
        _equals(512),
    ),
    Rule(
        "SEED",
        "seeds come from the clock or the system: leave it unset (training rules, random numbers)",
        lambda c: c.seed,
        _equals(None),
    ),
    Rule(
        "BATCHING",
        "data is traversed in random order: rows or online (training rules, training data order)",
        lambda c: c.data.batching,
        lambda _, value: value in ("rows", "online"),
    ),
    Rule(
        "MASKING",
        "masks are those of the prepared data: static (reference, create_pretraining_data.py)",
        lambda c: c.data.masking,
        _equals("static"),
    ),
    Rule(
        "SYNTH_DATA",
        "the data set is Wikipedia's (training rules, benchmarks)",
        lambda c: int(c.data.synthetic),
        _equals(0),
    ),
    Rule(
        "PACKING_FACTOR",
        "the global batch is logged in sequences: 2 for a packed row of Wikipedia, 1 for an unpacked one",
        lambda c: c.data.packing_factor,
        lambda c, value: value == _packing_factor(c),
    ),
    Rule(
        "INIT_CHECKPOINT",
        "training starts from model.ckpt-28252: give the converted checkpoint (training rules, weights)",
        lambda c: c.checkpoint.init_checkpoint,
        lambda _, value: value is not None,
    ),
    Rule(
        "RESUME",
        "a run is timed from its start, and the log of a resumed one leaves out the time trained before",
        lambda c: int(c.checkpoint.resume),
        _equals(0),
    ),
)


def violations(config: Config) -> Iterator[str]:
    """What of a run's settings and model the rules do not allow: NAME=VALUE and the rule, each."""
    for rule in RULES:
        value = rule.value(config)
        if not rule.kept(config, value):
            yield f"{rule.variable}={'' if value is None else value} ({rule.text})"
    reference = BertConfig()
    for name in MODEL_FIELDS:
        value, fixed = getattr(config.model, name), getattr(reference, name)
        if value != fixed:
            yield f"{name}={value} in {config.bert_config_path} (the model is BERT-large: {fixed})"
    if config.model.gelu_form != "tanh":
        yield (
            f"hidden_act={config.model.hidden_act} in {config.bert_config_path} (GELU is the tanh form: reference, "
            "modeling.py)"
        )


def check(config: Config, starts: bool) -> None:
    """Raises ConfigError naming every violation of a closed run at once; does nothing in the open division.

    Args: starts: the run starts now, so that its caches must have been dropped (on GPUs: a CPU run is a trial of the
    code, which no one submits).
    """
    if config.mlperf.division != "closed":
        return
    found = list(violations(config))
    if starts and not config.mlperf.cache_cleared and pick_device(config.dist).type == "cuda":
        found.append(
            "CACHE_CLEARED=0 (page caches are dropped before each run; the launch scripts do it where DROPCACHE_CMD is "
            "allowed and CLEAR_CACHES is not 0)"
        )
    if found:
        raise ConfigError(
            f"the closed division does not allow {'; '.join(found)}. Correct this, or set SUBMISSION_DIVISION=open"
        )
