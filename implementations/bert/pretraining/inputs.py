"""What a run reads, weights and data, judged: by --check and by the run, with the same functions.

What --check accepts trains, and what it refuses the run refuses with the same line. The run calls
them as its clock allows: weights before it, data on it.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from bert.checkpoint.weights import Checksum, check_finite, chunks_of
from bert.core.dist import World
from bert.data import integrity
from bert.data.batch import PretrainingBatch
from bert.data.loader import TrainingData, open_masks, open_source
from bert.data.records import DataError
from bert.data.sampler import RowSource, Sampler
from bert.data.shards import Shards
from bert.model.bert import BertForPreTraining
from bert.pretraining import resume
from bert.pretraining.config import PretrainingConfig
from bert.training.evaluate import EvaluationGraph, Evaluator


def check_finite_weights(
    config: PretrainingConfig, saved: dict[str, Any] | None, shapes: BertForPreTraining
) -> None:
    """Raises ConfigError naming the first weight that is NaN or infinite, of those read. Reads all
    of them.
    """
    path = config.checkpoint.init_checkpoint
    if saved is not None:
        check_finite(saved["model"].items(), config.checkpoint.directory)
    elif path is not None:
        chunks, _ = chunks_of(shapes, path, 0, config.may_have_new_heads, Checksum())
        check_finite(((chunk.name, chunk.values) for chunk in chunks), path)


def checked_source(
    config: PretrainingConfig, world: World, saved: dict[str, Any] | None
) -> RowSource:
    """The rows to train on, the same on every rank and, of a run that continues, as they were.

    Raises DataError or ConfigError for those that this run cannot train on. A collective.
    """
    source = open_source(config.data, config.model.vocab_size, pairs=config.nsp)
    world.agree(source.identity(), "are the training data the same on every node?")
    if isinstance(source, Shards):
        _check_records(config, source)
    resume.check_data(config.checkpoint, saved, source)
    if saved is not None and isinstance(source, Shards):
        # Not what they say of themselves.
        integrity.check(source.recorded_digests(), world, config.run.log_dir)
    return source


def _check_records(config: PretrainingConfig, source: Shards) -> None:
    """Raises DataError for records of another kind or vocabulary than the settings have."""
    folder, variable = config.data.source
    where, first = f"{variable}={folder}", source[0]
    if config.data.packed and first.row_offsets is None:
        raise DataError(
            f"{where}: these records are not packed; set PACKED=0, or give the packed folder"
        )
    # The first file, as another vocabulary shows there; the loader looks at every batch.
    if int(first.input_ids.max(initial=0)) >= config.model.vocab_size:
        raise DataError(
            f"{where}: token ids beyond vocab_size {config.model.vocab_size} of bert_config.json"
        )
    vocab = config.phase1 / "vocab.txt" if config.phase1 else None
    # Other makers' files do not say their vocabulary: an unknown one is not another one.
    if not source.vocab_md5 or vocab is None or not vocab.is_file():
        return
    if hashlib.md5(vocab.read_bytes()).hexdigest() != source.vocab_md5:
        raise DataError(
            f"{where}: made with another vocabulary than {vocab}; prepare the data again"
        )


def training_data(
    config: PretrainingConfig,
    source: RowSource,
    seed: int,
    saved: dict[str, Any] | None,
    pad_and_pin: Callable[[PretrainingBatch], PretrainingBatch],
) -> TrainingData:
    """This rank's micro-batches, from the first step of this process on."""
    settings, vocab_size = config.data, config.model.vocab_size
    sampler = Sampler(
        source.row_counts(),
        settings.rows_per_step,
        seed,
        config.dist.rank,
        config.dist.world_size,
        resume.shard_order(config, saved),
    )
    masks = open_masks(settings, source, config.phase1, vocab_size, seed)
    first_step = 1 + (int(saved["batches"]) if saved is not None else 0)
    return TrainingData(
        source, sampler, settings, vocab_size, first_step, pad_and_pin, masks
    )


def evaluator_of(
    config: PretrainingConfig,
    world: World,
    source: RowSource,
    graph: EvaluationGraph | None = None,
) -> Evaluator | None:
    """None if the run evaluates nothing. Raises DataError for a set that it cannot evaluate on. A
    collective.
    """
    if not config.evaluates:
        return None
    sizes = config.data.max_seq_length, config.model.vocab_size
    return Evaluator(config.evaluate, *sizes, source.vocab_md5, world, graph)
