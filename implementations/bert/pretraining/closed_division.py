"""What the rules of MLPerf Training fix for BERT's closed division, checked before a run of it starts.

Sources, in words of the rule at each row: the training rules (training_policies/training_rules.adoc, round 5.0), the
reference (BERT of mlcommons/training: modeling.py, optimization.py, run_pretraining.py, bert_config.json) and its
README, which rules name where they say "as the reference". What they leave free is absent: batch size, learning rate,
warm-up, betas, epsilon, weight decay, number formats, and on which side of the all-reduce gradients are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bert.core.dist import pick_device
from bert.core.env import ConfigError
from bert.model.config import BertConfig
from bert.pretraining.config import Config

# Of bert_config.json; initializer_range is left out, since every weight comes from the checkpoint.
MODEL_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("layer_norm_eps", "layer_norm_large_model"),
)
# By the variable that each fixes; which values keep it: ``violations``.
RULES = {
    "OPTIMIZER": "LAMB is the benchmark's only optimizer (training rules, optimizers)",
    "MAX_GRAD_NORM": "gradients are clipped to a norm of 1.0 (reference, optimization.py)",
    "CLIP": "the whole gradient is clipped, before or after the all-reduce (reference, optimization.py)",
    "LAMB_RATIO": "LAMB scales by a trust ratio where weight decay applies, and nowhere else (reference, "
    "optimization.py)",
    "LR_SCHEDULE": "the learning rate warms up linearly, then decays polynomially: mlperf (reference, optimization.py)",
    "END_LR": "the learning rate decays to 0 (reference, optimization.py)",
    "LR_DECAY_POWER": "the learning rate decays linearly (reference, optimization.py)",
    "TARGET_MLM_ACCURACY": "the quality target is 0.720 (training rules, benchmarks)",
    "NUM_EVAL_EXAMPLES": "every evaluation takes all 10,000 samples of the evaluation set (training rules, quality "
    "measure)",
    "EVAL_ITER_SAMPLES": "evaluations come every floor(0.05 (230.23 batch + 3,000,000) / 25,000) 25,000 samples, or at "
    "the next whole step (training rules, evaluation frequency)",
    "EVAL_ITER_START_SAMPLES": "the first evaluation comes after one interval (training rules, evaluation frequency)",
    "EVAL_INITIAL": "the evaluation at sample 0 is skipped (training rules, evaluation frequency)",
    "MAX_SEQ_LENGTH": "sequences have up to 512 tokens (reference, README)",
    "SEED": "seeds come from the clock or the system: leave it unset (training rules, random numbers)",
    "BATCHING": "data is traversed in random order: rows or online (training rules, training data order)",
    "MASKING": "masks are those of the prepared data: static (reference, create_pretraining_data.py)",
    "SYNTH_DATA": "the data set is Wikipedia's (training rules, benchmarks)",
    "PACKING_FACTOR": "the global batch is logged in sequences: 2 for a packed row of Wikipedia, 1 for an unpacked one",
    "INIT_CHECKPOINT": "training starts from model.ckpt-28252: give the converted checkpoint (training rules, weights)",
    "INIT_OPTIMIZER": "LAMB's moments start from 0 (reference, optimization.py)",
    "RESUME": "a run is timed from its start, and the log of a resumed one leaves out the time trained before",
}


def rule_interval(global_batch_size: int) -> int:
    """Training samples between evaluations: floor(0.05 (230.23 GBS + 3,000,000) / 25,000) 25,000 (training rules)."""
    return int(0.05 * (230.23 * global_batch_size + 3_000_000) / 25_000) * 25_000


def violations(config: Config) -> Iterator[str]:
    """What of a run's settings and model the rules do not allow: NAME=VALUE and the rule, each."""
    data, evaluate, schedule, optim = config.data, config.evaluate, config.schedule, config.optim
    weights, batch = config.checkpoint.init_checkpoint, config.global_batch_size
    intervals = rule_interval(batch), -(-rule_interval(batch) // batch) * batch  # or that rounded up to whole steps
    packing_factor = 2 if data.packed or data.batching == "online" else 1
    kept: dict[str, tuple[Any, bool]] = {
        "OPTIMIZER": (optim.optimizer, optim.is_lamb),
        "MAX_GRAD_NORM": (optim.max_grad_norm, optim.max_grad_norm == 1.0),
        "CLIP": (optim.clip, optim.clip != "bucket"),
        "LAMB_RATIO": (optim.lamb.ratio, optim.lamb.ratio == "decayed"),
        "LR_SCHEDULE": (schedule.schedule, schedule.schedule == "mlperf"),
        "END_LR": (schedule.end_lr, schedule.end_lr == 0.0),
        "LR_DECAY_POWER": (schedule.power, schedule.power == 1.0),
        "TARGET_MLM_ACCURACY": (evaluate.target, evaluate.target == 0.72),
        "NUM_EVAL_EXAMPLES": (evaluate.num_examples, evaluate.num_examples == 10_000),
        "EVAL_ITER_SAMPLES": (evaluate.every_samples, evaluate.every_samples in intervals),
        "EVAL_ITER_START_SAMPLES": (evaluate.start_samples, evaluate.start_samples in intervals),
        "EVAL_INITIAL": (int(evaluate.initial), not evaluate.initial),
        "MAX_SEQ_LENGTH": (data.max_seq_length, data.max_seq_length == 512),
        "SEED": (config.seed, config.seed is None),
        "BATCHING": (data.batching, data.batching in ("rows", "online")),
        "MASKING": (data.masking, data.masking == "static"),
        "SYNTH_DATA": (int(data.synthetic), not data.synthetic),
        "PACKING_FACTOR": (data.packing_factor, data.packing_factor == packing_factor),
        "INIT_CHECKPOINT": ("" if weights is None else weights, weights is not None),
        "INIT_OPTIMIZER": (int(config.checkpoint.init_optimizer), not config.checkpoint.init_optimizer),
        "RESUME": (int(config.checkpoint.resume), not config.checkpoint.resume),
    }
    yield from (f"{name}={kept[name][0]} ({rule})" for name, rule in RULES.items() if not kept[name][1])
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

    starts: the run starts now, so that its caches must have been dropped (on GPUs: a CPU run is a trial of the code,
    which no one submits).
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
