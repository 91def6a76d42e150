"""Settings of fine-tuning: its own, and those of bert's components."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bert.checkpoint import huggingface
from bert.checkpoint.save import CheckpointConfig
from bert.core import rundir
from bert.model.config import BertConfig
from bert.training import metrics, schedule
from bert.training.config import Hardware
from common.env import ConfigError, env, from_env
from common.files import object_of
from finetune import glue
from finetune.dialect import QUOTING

# Fine-tuning's own defaults.
# As in the fine-tuning of the BERT paper: Adam with decay, 10% of warm-up, then linear to 0.
DEFAULTS = {"OPTIMIZER": "adamw", "LR_SCHEDULE": "linear", "WARMUP_PROPORTION": "0.1"}

# Other tasks' files say these themselves.
OF_TABLES = (
    "TEXT_COLUMNS", "LABEL_COLUMN", "LABEL_SEPARATOR", "SEPARATOR", "QUOTING", "NO_HEADER", "REGRESSION",
)  # fmt: skip

# What a resumed run may change, besides rundir.OUTPUT. Paths are compared by the content of their
# files.
ROUNDING = (
    "DEVICE",
    "OMP_NUM_THREADS",
    "CUDA_GRAPH",
    "RECOMPUTE_LAYERS",
    "SHARD_OPTIMIZER",
    "SHARD_GROUP",
)


@dataclass(frozen=True, kw_only=True)
class SquadConfig:
    """Fields of squad's Limits and Rules. None: as in the training of the model, else those of the
    published run_squad.py.
    """

    max_query_length: int | None = env(
        "MAX_QUERY_LENGTH",
        None,
        at_least=1,
        doc="SQuAD: tokens of a question, cut there; unset: as in training, else 64",
    )
    doc_stride: int | None = env(
        "DOC_STRIDE",
        None,
        at_least=1,
        doc="SQuAD: tokens between the starts of windows; unset: as in training, else 128",
    )
    n_best: int | None = env(
        "N_BEST_SIZE",
        None,
        at_least=1,
        doc="SQuAD: starts, ends and answers kept; unset: as in training, else 20",
    )
    max_answer_length: int | None = env(
        "MAX_ANSWER_LENGTH",
        None,
        at_least=1,
        doc="SQuAD: maximum tokens per answer; unset: as in training, else 30",
    )
    null_threshold: float | None = env(
        "NULL_SCORE_DIFF_THRESHOLD",
        None,
        doc='SQuAD 2.0: margin by which "no answer" must win; unset: as in training, else 0',
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Hardware):
    """One task on one model. BATCHSIZE, MAX_SEQ_LENGTH and the like are as in bert, in
    sequences.
    """

    task: str = env(
        "TASK",
        choices=("squad", *glue.TASKS),
        doc="fine-tuning: the task; table (or TSV): your own table; ner: tags of words",
    )
    data: Path = env(
        "DATA",
        doc="fine-tuning: folder of the task's files; to predict also a file of SQuAD",
    )
    mode: str = env(
        "MODE",
        "train-eval",
        choices=("train-eval", "train", "eval", "prediction"),
        doc="fine-tuning mode",
    )
    squad_version: str = env(
        "SQUAD_VERSION",
        "1.1",
        choices=("1.1", "2.0"),
        doc="2.0: questions may have no answer",
    )
    text_columns: str = env(
        "TEXT_COLUMNS", "", doc="tables: one or two text columns, joined by commas"
    )
    label_column: str = env(
        "LABEL_COLUMN",
        "",
        doc="tables: column to predict, or several of 0 and 1; unset: label, or the last",
    )
    label_separator: str = env(
        "LABEL_SEPARATOR",
        "",
        doc="tables: mark between the labels of a cell, such as `|`; unset: a cell is one label",
    )
    separator: str = env(
        "SEPARATOR",
        "",
        doc="tables: a character, `tab`, or `none`: a text per line; unset: found",
    )
    quoting: str = env(
        "QUOTING",
        "",
        choices=("", *QUOTING),
        doc="tables: marks within cells are doubled, escaped or text; unset: found",
    )
    encoding: str = env(
        "ENCODING",
        "",
        doc="tables: such as cp1252; unset: UTF-8, or UTF-16 with its mark",
    )
    no_header: bool = env(
        "NO_HEADER", False, doc="tables: 1: the first line is an example"
    )
    regression: bool | None = env(
        "REGRESSION",
        None,
        doc="tables: 1 predicts numbers; unset: if some have decimals",
    )
    epochs: float = env(
        "EPOCHS", 2.0, above=0, doc="fine-tuning: passes over the training data"
    )
    eval_every_epochs: float = env(
        "EVAL_EVERY_EPOCHS",
        0.0,
        at_least=0,
        doc="fine-tuning: epochs between evaluations, whose best model is kept; 0: one at the end",
    )
    patience: int = env(
        "PATIENCE",
        0,
        at_least=0,
        doc="fine-tuning: evaluations in a row that are no better and end training; 0: none do",
    )
    seeds: str = env(
        "SEEDS", "", doc="fine-tuning: a seed per trial, joined by commas; unset: SEED"
    )
    seed: int | None = env(
        "SEED",
        None,
        at_least=0,
        at_most=2**32 - 1,
        doc="seed of the run; unset: 1, then 2, ...",
    )
    batch_size: int = env(
        "BATCHSIZE", 32, at_least=1, doc="sequences per GPU in one micro-batch"
    )
    gradient_steps: int = env(
        "GRADIENT_STEPS", 1, at_least=1, doc="micro-batches accumulated into one step"
    )
    eval_batch_size: int = env(
        "EVAL_BATCHSIZE", 32, at_least=1, doc="sequences per GPU in a prediction batch"
    )
    max_seq_length: int | None = env(
        "MAX_SEQ_LENGTH", None, at_least=8, doc="maximum tokens per sequence"
    )
    bert_config: Path | None = env(
        "BERT_CONFIG",
        None,
        doc="the model's config.json; unset: beside INIT_CHECKPOINT",
    )
    log_every_steps: int = env(
        "LOG_EVERY_STEPS", 100, at_least=1, doc="steps between progress lines on stderr"
    )

    squad: SquadConfig = SquadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: rundir.RunConfig = rundir.RunConfig()
    observers: metrics.MetricsConfig = metrics.MetricsConfig()

    def check(self) -> None:
        """Raises ConfigError for contradictory settings."""
        self.dist.check()
        self.checkpoint.check()
        if self.checkpoint.best:
            raise ConfigError(
                "CHECKPOINT_BEST=1 keeps a checkpoint of pretraining: EVAL_EVERY_EPOCHS keeps the best model"
            )
        if self.patience and not self.eval_every_epochs:
            raise ConfigError(
                f"PATIENCE={self.patience} counts evaluations: set EVAL_EVERY_EPOCHS, such as 1"
            )
        if self.eval_every_epochs and self.mode == "train":
            raise ConfigError(
                f"EVAL_EVERY_EPOCHS={self.eval_every_epochs:g} evaluates, which MODE=train does not"
            )
        self.observers.check(self.run)
        of_tables = [name for name in OF_TABLES if getattr(self, name.lower())]
        if of_tables and self.task not in ("table", "TSV"):
            raise ConfigError(
                f"{of_tables[0]} is of tables: unset it, or TASK=table instead of {self.task}"
            )
        if self.graph.cuda_graph:
            raise ConfigError(
                "CUDA_GRAPH=1 captures steps of pretraining: unset it to fine-tune"
            )
        self.check_device(uses_graph=False)
        _ = self.trial_seed  # raises for malformed SEEDS
        if self.length > self.model.max_position_embeddings:
            most = f"max_position_embeddings {self.model.max_position_embeddings} of {self.bert_config_path}"
            raise ConfigError(f"MAX_SEQ_LENGTH={self.length} exceeds {most}")
        if not self.vocabulary.is_file():
            raise ConfigError(
                f"{self.vocabulary}: no such file: the model's words, one a line"
            )
        huggingface.check_vocabulary(self.vocabulary, self.model)
        is_file = self.task == "squad" and not self.trains and self.data.is_file()
        if not (is_file or self.data.is_dir()):
            raise ConfigError(f"DATA={self.data}: no such folder")
        # A head answers only what it was trained for; training
        # starts a new one where it does not fit.
        task = self.described.get("task", self.task)
        if task != self.task and not self.trains:
            raise ConfigError(
                f"INIT_CHECKPOINT={self.checkpoint.init_checkpoint} was fine-tuned for {task}: TASK={task}"
            )

    @property
    def trains(self) -> bool:
        return self.mode.startswith("train")

    @property
    def length(self) -> int:
        """Maximum tokens per sequence: MAX_SEQ_LENGTH, else as fine-tuned, else 384 for SQuAD and
        128 for others.
        """
        # 384 and 128 tokens are those of the published run_squad.py and run_classifier.py.
        usual = min(
            384 if self.task == "squad" else 128, self.model.max_position_embeddings
        )
        return self.max_seq_length or int(
            # A fine-tuned model predicts with the length of its
            # training, since its windows depend on it.
            (not self.trains and self.described.get("max_seq_length")) or usual
        )

    @cached_property
    def lower_case(self) -> bool:
        """As the tokenizer's config or the vocabulary says."""
        return huggingface.lower_case(self.vocabulary)

    @cached_property
    def described(self) -> dict[str, Any]:
        """task.json of the fine-tuned model that the run starts from; empty if it was not
        fine-tuned.
        """
        return object_of(self.weights_folder / "task.json")

    @property
    def weights_folder(self) -> Path:
        """INIT_CHECKPOINT, or its folder if it is a file. Raises ConfigError if unset."""
        path = self.checkpoint.init_checkpoint
        if path is None:
            raise ConfigError(
                "INIT_CHECKPOINT is not set: give the weights to start from (.pt or .safetensors)"
            )
        return path if path.is_dir() else path.parent

    @property
    def bert_config_path(self) -> Path:
        """BERT_CONFIG, or bert_config.json or config.json beside the weights."""
        folder = self.weights_folder
        beside = huggingface.config_beside(folder / "weights")
        return self.bert_config or beside or folder / "config.json"

    @cached_property
    def model(self) -> BertConfig:
        return BertConfig.from_json(self.bert_config_path)

    @property
    def vocabulary(self) -> Path:
        """vocab.txt or tokenizer.json beside the weights, else beside BERT_CONFIG."""
        folders = self.weights_folder, self.bert_config_path.parent
        names = "vocab.txt", "tokenizer.json"
        paths = [folder / name for folder in folders for name in names]
        return next((path for path in paths if path.is_file()), paths[2])

    @property
    def trial_seed(self) -> int:
        """Seed of this trial. Raises ConfigError for invalid or too few SEEDS."""
        if not self.seeds:
            # Trials differ without any setting, and a repeated run gives the same results.
            return 1 + self.run.trial if self.seed is None else self.seed
        seeds = self.seeds.split(",")
        if not all(seed.strip().isdecimal() for seed in seeds):
            raise ConfigError(
                f"SEEDS={self.seeds}: expected whole numbers joined by commas"
            )
        if self.run.trial >= len(seeds):
            raise ConfigError(
                f"SEEDS={self.seeds}: {len(seeds)} seeds, but this is trial {self.run.trial}"
            )
        return int(seeds[self.run.trial])

    @property
    def samples_per_step(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.batch_size * self.gradient_steps * self.dist.world_size

    def folder(self) -> Path:
        """Folder of this trial's model and predictions: RUN_DIR/model_<TRIAL>."""
        assert self.run.run_dir is not None
        return self.run.run_dir / f"model_{self.run.trial}"


def read(environ: Mapping[str, str]) -> FinetuneConfig:
    """The checked settings in ``environ``. Raises ConfigError."""
    config = from_env(FinetuneConfig, with_defaults(environ))
    if environ.get("MAX_STEPS"):
        raise ConfigError(
            "MAX_STEPS is set: EPOCHS determines the length of fine-tuning; unset MAX_STEPS"
        )
    if environ.get("ENGINE", "own") not in ("", "own"):
        raise ConfigError(
            "ENGINE is set: fine-tuning supports only the trainer's own engine; unset ENGINE"
        )
    config.check()
    base = config.checkpoint.directory
    if base is None:
        return config
    # A folder per seed, so that no trial resumes from another's checkpoint.
    checkpoint = dataclasses.replace(
        config.checkpoint, directory=base / f"seed_{config.trial_seed}"
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


def with_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` over DEFAULTS."""
    return {
        **DEFAULTS,
        **{name: value for name, value in environ.items() if value.strip()},
    }


def learning_rates(
    environ: Mapping[str, str], num_steps: int
) -> schedule.ScheduleConfig:
    """Learning-rate schedule of a run of ``num_steps`` steps. Raises ConfigError."""
    rates = from_env(
        schedule.ScheduleConfig, {**with_defaults(environ), "MAX_STEPS": str(num_steps)}
    )
    rates.check()
    return rates
