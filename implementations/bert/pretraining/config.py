"""The tree of settings of a run: the components' settings and constraints between them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bert.checkpoint import huggingface
from bert.checkpoint.save import CheckpointConfig
from bert.core import rundir
from bert.data import loader
from bert.deepspeed import settings
from bert.model.config import BertConfig, ModelFiles
from bert.training import debug, evaluate, metrics, mlperf, schedule
from bert.training.config import Hardware
from common.env import ConfigError, env

REHEARSAL_SAMPLES = 300_000  # two evaluations at the usual batch sizes
MAX_SAMPLES = 14_000_000  # after which a run that has not reached its target gives up


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(ModelFiles, Hardware):
    """Everything a run depends on."""

    seed: int | None = env(
        "SEED",
        None,
        "seed of the run; unset: from the system",
        at_least=0,
        at_most=2**32 - 1,
    )
    max_samples: int = env(
        "MAX_SAMPLES_TERMINATION",
        0,
        "limit of training samples; 0: 14,000,000 with a target, or none",
        at_least=0,
    )
    nsp: bool = env(
        "NSP",
        True,
        "0: masked-LM alone, without next-sentence head and pooler (open division)",
    )
    steps_this_run: int = env(
        "STEPS_THIS_RUN",
        0,
        "steps until this process saves and ends; RESUME=1 continues; 0: all",
        at_least=0,
    )
    skip_batches: str = env(
        "SKIP_BATCHES",
        "",
        "batches to leave out, such as 1204,1300-1302, after a loss that is NaN (open division)",
    )
    log_every_steps: int = env(
        "LOG_EVERY_STEPS",
        100,
        "steps between reports, on stderr, in metrics and log",
        at_least=1,
    )
    sustained_minutes: float = env(
        "SUSTAINED_TRAINING_TIME",
        0.0,
        "minutes from run_start to keep training for power meters",
        at_least=0,
    )
    rehearse: bool = env(
        "REHEARSAL",
        False,
        "1: train the start of a closed run to compare it with published ones (docs/review.md)",
    )

    data: loader.LoaderConfig
    evaluate: evaluate.EvaluationConfig
    schedule: schedule.ScheduleConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    mlperf: mlperf.MlperfConfig = mlperf.MlperfConfig()
    run: rundir.RunConfig = rundir.RunConfig()
    observers: metrics.MetricsConfig = metrics.MetricsConfig()
    capture: debug.CaptureConfig = debug.CaptureConfig()
    profile: debug.ProfileConfig = debug.ProfileConfig()
    zero: settings.EngineConfig = settings.EngineConfig()

    def check(self) -> None:
        """Raises ConfigError for settings that contradict each other, before anything starts."""
        self.dist.check()
        self.schedule.check()
        self.checkpoint.check()
        self.observers.check(self.run)
        self.capture.check(self.run, self.uses_graph)
        self.profile.check(
            self.run, min(self.max_steps, self.steps_this_run or self.max_steps)
        )
        if self.steps_this_run and self.checkpoint.directory is None:
            raise ConfigError(
                "STEPS_THIS_RUN is set and CHECKPOINT_DIR is not: give the folder to continue from"
            )
        _ = self.left_out  # may be no list
        if self.checkpoint.best and not self.evaluates:
            raise ConfigError(
                "CHECKPOINT_BEST=1 needs evaluations: set EVAL_ITER_SAMPLES"
            )
        if (
            self.checkpoint.shards
            and not self.zero.is_deepspeed
            and not self.optim.is_sharded(self.device)
        ):
            raise ConfigError(
                "CHECKPOINT_SHARDS=1 needs a sharded optimizer: set SHARD_OPTIMIZER=1"
            )
        others = {"CUDA_GRAPH=1": bool(self.graph.cuda_graph)}
        self.zero.check(self.optim, self.numerics, others)
        self.check_device(uses_graph=self.uses_graph)
        if self.dist.emulate and (self.checkpoint.directory or self.zero.is_deepspeed):
            wrong = "ENGINE=deepspeed" if self.zero.is_deepspeed else "CHECKPOINT_DIR"
            raise ConfigError(
                f"EMULATE_RANKS={self.dist.emulate} trains one rank's part, which is no model: unset {wrong}"
            )
        if self.data.max_seq_length > self.model.max_position_embeddings:
            raise ConfigError(
                f"MAX_SEQ_LENGTH={self.data.max_seq_length} exceeds "
                f"max_position_embeddings {self.model.max_position_embeddings} of {self.bert_config_path}"
            )
        if not self.data.synthetic:
            # Raises if the folder is not given.
            _ = self.data.source
            if self.evaluate.evaldir is None and self.evaluates:
                raise ConfigError(
                    "EVALDIR is not set: give the folder of the evaluation records"
                )

    @property
    def uses_graph(self) -> bool:
        """Whether steps and evaluation run as CUDA graphs: CUDA_GRAPH, or else where it works and
        pays.

        Unpacked rows are half padding, on which a graph would compute.
        """
        if self.graph.cuda_graph is not None:
            return self.graph.cuda_graph
        if self.zero.is_deepspeed or not self.optim.rule_class.capturable:
            return False
        # Auto: recording costs seconds before the clock and saves launches in every step, so only
        # where it works.
        device, fp32 = self.device, self.numerics.dtype == torch.float32
        # A loop over sequences cannot be recorded, as their number differs from batch to batch; in
        # fp32 auto chooses it.
        works = self.kernels.attention != "sdpa_loop" and not (
            fp32 and self.kernels.attention == "auto"
        )
        works &= not self.recompute.layers or self.recomputes_in_graph
        return device.type == "cuda" and works and self.data.packed

    @property
    def bert_config_path(self) -> Path:
        """BERT_CONFIG; unset: the config.json beside an INIT_CHECKPOINT in the Hub's layout, else
        that of phase1.
        """
        path = self.checkpoint.init_checkpoint
        if (
            self.bert_config is None
            and path is not None
            and path.name in huggingface.WEIGHTS
        ):
            return huggingface.config_beside(path) or super().bert_config_path
        return super().bert_config_path

    @property
    def may_have_new_heads(self) -> bool:
        """Whether INIT_CHECKPOINT may lack heads, which are then drawn at random. The closed
        division's has them.
        """
        return self.mlperf.division == "open" and not self.checkpoint.init_optimizer

    @cached_property
    def model(self) -> BertConfig:
        """The model's shape."""
        return dataclasses.replace(
            BertConfig.from_json(self.bert_config_path), next_sentence=self.nsp
        )

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step, nominally: rows x PACKING_FACTOR over all ranks."""
        # Nominal, as published: packed Wikipedia has 1.999 sequences a row, and counts as 2.
        return self.data.rows_per_step * self.dist.world_size * self.data.packing_factor

    @property
    def max_steps(self) -> int:
        """Steps after which the run gives up: MAX_STEPS, or fewer by MAX_SAMPLES_TERMINATION."""
        most = self.schedule.max_steps * self.global_batch_size
        samples = self.max_samples or (
            MAX_SAMPLES if self.evaluate.has_target else most
        )
        # Rounded up: the step in which the limit is reached is trained to its end.
        return min(self.schedule.max_steps, -(-samples // self.global_batch_size))

    @property
    def evaluation_steps(self) -> set[int]:
        """Steps after which the model is evaluated."""
        batch = self.global_batch_size
        steps = evaluate.evaluation_steps(self.evaluate, batch, self.max_steps * batch)
        # Accuracy at sample 0 tells wrong weights at once: published runs have 0.34 there.
        return steps | {0} if self.rehearse and self.evaluate.every_samples else steps

    @cached_property
    def left_out(self) -> set[int]:
        """Numbers of the batches, from 1 on, of SKIP_BATCHES."""
        numbers: set[int] = set()
        for part in filter(None, self.skip_batches.split(",")):
            span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
            if not span:
                raise ConfigError(
                    f"SKIP_BATCHES={self.skip_batches!r}: expected numbers and spans, such as 1204,1300-1302"
                )
            numbers.update(range(int(span[1]), int(span[2] or span[1]) + 1))
        return numbers

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluation_steps)

    def of_trial(self) -> PretrainingConfig:
        """The run with its own folder of checkpoints: CHECKPOINT_DIR, or of trial N > 0 trial_N in
        it.

        Trials never share one: each would continue the other's weights, or refuse the other's seed.
        """
        base = self.checkpoint.directory
        if base is None or not self.run.trial:
            return self
        # Trial 0, also a run without trials, keeps the folder as it was given.
        checkpoint = dataclasses.replace(
            self.checkpoint, directory=base / f"trial_{self.run.trial}"
        )
        return dataclasses.replace(self, checkpoint=checkpoint)

    def rehearsed(self) -> PretrainingConfig:
        """The run to train: with REHEARSAL=1 its start, else the whole.

        A rehearsal also evaluates before the first step, and ends after the evaluation at
        REHEARSAL_SAMPLES; its log is of the open division, so that nobody takes it for a result.
        The learning rate depends on MAX_STEPS as usual.
        """
        if not self.rehearse:
            return self
        every = self.evaluate.every_samples
        if not every:
            raise ConfigError(
                "REHEARSAL=1 compares evaluations, but there are none: set EVAL_ITER_SAMPLES"
            )
        start = self.evaluate.start_samples or every
        run, checkpoint = self.run, self.checkpoint
        # Folders of its own, as the launch scripts give it: the run to come is another one.
        names = (run.run_dir.name, run.run_dir.parent.name) if run.run_dir else ()
        if run.run_dir and not any(name.endswith("rehearsal") for name in names):
            run = dataclasses.replace(run, run_dir=run.run_dir / "rehearsal")
        if checkpoint.directory and checkpoint.directory.name != "rehearsal":
            folder = checkpoint.directory / "rehearsal"
            checkpoint = dataclasses.replace(checkpoint, directory=folder)
        # Whole intervals, since only at an evaluation is there a published figure to compare with.
        intervals = max(0, -(-(REHEARSAL_SAMPLES - start) // every))
        return dataclasses.replace(
            self,
            # Ends on an evaluation: training beyond the last one would show nothing.
            max_samples=min(self.max_samples or MAX_SAMPLES, start + intervals * every),
            mlperf=dataclasses.replace(self.mlperf, division="open"),
            run=run,
            checkpoint=checkpoint,
        )

    def emulated(self) -> PretrainingConfig:
        """With EMULATE_RANKS without evaluations, which would be of a model of which one part is
        trained.
        """
        if not self.dist.emulate:
            return self
        none = dataclasses.replace(self.evaluate, every_samples=0)
        return dataclasses.replace(self, evaluate=none)

    def hyperparameters(self, seed: int) -> dict[str, Any]:
        """The run's settings for the MLPerf log, by MLLOG key."""
        warmup_steps, start_warmup_step = self.schedule.warmup
        degree = self.schedule.rule.degree
        return {
            "seed": seed,
            "global_batch_size": self.global_batch_size,
            "d_batch_size": self.data.batch_size,
            "gradient_accumulation_steps": self.data.gradient_steps,
            "max_sequence_length": self.data.max_seq_length,
            "opt_base_learning_rate": self.schedule.lr,
            "opt_learning_rate_training_steps": self.schedule.length,
            "opt_learning_rate_warmup_steps": warmup_steps,
            # Under both names, as NVIDIA's logs have it.
            "num_warmup_steps": warmup_steps,
            "start_warmup_step": start_warmup_step,
            **({"opt_lamb_learning_rate_decay_poly_power": degree} if degree else {}),
            "opt_end_learning_rate": self.schedule.end_lr,
            **self.optim.hyperparameters(),
            "opt_gradient_clip_norm": self.optim.max_grad_norm,
        }
