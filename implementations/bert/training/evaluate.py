"""Evaluation: masked-LM accuracy over the whole evaluation set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bert.core.dist import World
from bert.data import integrity
from bert.data.batch import PretrainingBatch, PretrainingCapacity, make_batch
from bert.data.records import DataError, Records, concatenate
from bert.data.shards import Shards, list_shards
from bert.data.synthetic import synthetic_records
from bert.kernels.operations.cross_entropy import IGNORE
from bert.kernels.support.graph_capture import capture, warm_stream
from bert.model.bert import BertForPreTraining
from bert.training.graph import copy_batches, graph_capacity, static_batch
from common.env import ConfigError, env

NUM_COUNTS = 6  # see _count


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and on what to evaluate. The samples are training samples (sequences)."""

    evaldir: Path | None = env(
        "EVALDIR", None, "folder (or file) of evaluation records"
    )
    num_examples: int = env(
        "NUM_EVAL_EXAMPLES",
        10000,
        "sequences of the evaluation set; 0: all",
        at_least=0,
    )
    batch_size: int = env(
        "EVAL_BATCHSIZE",
        16,
        "sequences per GPU in one evaluation batch; in a graph, of full length",
        at_least=1,
    )
    start_samples: int = env(
        "EVAL_ITER_START_SAMPLES",
        0,
        "training samples before the first evaluation; 0: one interval",
        at_least=0,
    )
    every_samples: int = env(
        "EVAL_ITER_SAMPLES",
        0,
        "training samples between evaluations; 0: none, and no target",
        at_least=0,
    )
    target: float = env(
        "TARGET_MLM_ACCURACY",
        0.720,
        "masked-LM accuracy that ends the run; 0: none",
        at_least=0,
        at_most=1,
    )

    @property
    def has_target(self) -> bool:
        """Whether reaching an accuracy is success; otherwise reaching the last step is."""
        return self.target > 0 and self.every_samples > 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Figures of masked words (mlm) and next sentences (nsp); nsp is None without that head, or
    data without pairs.
    """

    accuracy: float
    mlm_loss: float
    nsp_loss: float | None
    nsp_accuracy: float | None

    def figures(self) -> dict[str, float]:
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }


def evaluation_steps(
    config: EvaluationConfig, global_batch_size: int, max_samples: int
) -> set[int]:
    """Steps to evaluate after: the first with at least start, start + every, ... nominal samples
    trained.
    """
    if not config.every_samples:
        return set()
    # The rule of the benchmark: none at 0 samples, the first after one interval.
    start = config.start_samples or config.every_samples
    points = range(start, max_samples + 1, config.every_samples)
    return {-(-samples // global_batch_size) for samples in points}


class Evaluator:
    """Holds this rank's part of the evaluation set and measures a model on it."""

    def __init__(
        self,
        config: EvaluationConfig,
        max_seq_length: int,
        vocab_size: int,
        vocab_md5: str,
        world: World,
        graph: EvaluationGraph | None = None,
    ) -> None:
        """Raises DataError, on every rank, if the set is absent, too small, or of another
        vocabulary than ``vocab_md5``. A collective.
        """
        if config.evaldir is None:
            raise DataError(
                "EVALDIR is not set: give the folder of the evaluation records"
            )
        self.world, self.graph = world, graph
        problem = ""
        try:
            shards = Shards(list_shards(config.evaldir, "EVALDIR"), max_seq_length)
            shards.vocab_md5 = vocab_md5
        except (ConfigError, DataError, OSError) as error:
            problem = str(error)
        # The other ranks would miss this one at a collective, and not say why.
        if problem := world.first_text(problem):
            raise DataError(problem)
        world.agree(shards.identity(), "is EVALDIR the same on every node?")
        integrity.check(shards.recorded_digests(), world)  # small: milliseconds
        records = concatenate([shards[number] for number in range(len(shards))])
        self.vocab_md5 = shards.vocab_md5
        # Fewer would be another test: the accuracy of a part of the set says nothing about 0.720.
        if records.num_sequences < config.num_examples:
            few = f"{records.num_sequences} sequences, and NUM_EVAL_EXAMPLES is {config.num_examples}"
            raise DataError(
                f"EVALDIR={config.evaldir}: {few}: prepare the evaluation set again, or lower that"
            )
        if (
            records.input_ids.max() >= vocab_size
            or records.masked_lm_ids.max() >= vocab_size
        ):
            raise DataError(
                f"EVALDIR={config.evaldir}: token ids beyond vocab_size {vocab_size} of bert_config.json"
            )
        self.num_sequences = config.num_examples or records.num_sequences
        mine = share(records, self.num_sequences, world.rank, world.size)
        size = config.batch_size
        # Sequences of like length together; the order does not change the sums.
        groups = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
        if graph is not None:  # every batch costs its capacity, so as few as possible
            groups = fill_batches(records, mine, graph.room)
        # Made once and kept on the device: every evaluation of a run uses the same batches.
        batches = [
            make_batch(records, sequences, max_seq_length) for sequences in groups
        ]
        if graph is not None:
            batches = [static_batch(batch, graph.capacity) for batch in batches]
        # On the device from the start: an evaluation is on the clock.
        self.batches: list[PretrainingBatch] = [
            batch.to(world.device) for batch in batches
        ]

    @torch.no_grad()
    def warm_up(self, model: BertForPreTraining) -> None:
        """One pass that is not counted: the first compiles kernels, and would be timed as slow."""
        with model.evaluating():
            _count(model, self.batches[0]).cpu()

    @torch.no_grad()
    def __call__(self, model: BertForPreTraining) -> Result:
        """Accuracy = correct / masked tokens over all ranks; losses are means over masked tokens
        and over sequences.
        """
        totals = torch.zeros(NUM_COUNTS, dtype=torch.float64, device=self.world.device)
        with model.evaluating():
            # The graph was recorded for evaluations after a step; before the first one there are no
            # fp8 scales.
            graph = self.graph
            if graph is not None and graph.in_fp8 != model.evaluates_in_fp8:
                graph = None
            for batch in self.batches:
                totals += graph(batch) if graph is not None else _count(model, batch)
        # Here the host waits for the device.
        correct, loss, masked, nsp_correct, nsp_loss, sequences = self.world.sum(
            totals
        ).tolist()
        return Result(
            accuracy=correct / masked,
            mlm_loss=loss / masked,
            nsp_loss=nsp_loss / sequences if sequences else None,
            nsp_accuracy=nsp_correct / sequences if sequences else None,
        )


class EvaluationGraph:
    """The pass over one evaluation batch, recorded as a CUDA graph before the clock starts."""

    def __init__(
        self,
        config: EvaluationConfig,
        max_seq_length: int,
        model: BertForPreTraining,
        device: torch.device,
    ) -> None:
        """Capacity: EVAL_BATCHSIZE times ``max_seq_length`` tokens, about twice as many sequences
        of Wikipedia.
        """
        self.room = evaluation_room(config.batch_size, max_seq_length)
        self.capacity = graph_capacity(self.room, config.batch_size)
        # Any batch of this capacity: replays copy theirs into its memory.
        self.batch = static_batch(
            dummy_batch(1, max_seq_length, model), self.capacity
        ).to(device)
        self.counts = torch.zeros(NUM_COUNTS, dtype=torch.float64, device=device)
        with torch.no_grad(), model.evaluating(calibrated=True):
            self.in_fp8 = model.evaluates_in_fp8
            stream = warm_stream(lambda: _count(model, self.batch), 2, device)
            self.graph = capture(
                lambda: self.counts.copy_(_count(model, self.batch)),
                stream,
                draws=False,
            )

    def __call__(self, batch: PretrainingBatch) -> Tensor:
        """The counts of a batch at capacity, on the device; valid until the next call."""
        # The graph reads this memory; stream order makes the copy precede it, without the host
        # waiting.
        copy_batches([self.batch], [batch])
        self.graph.replay()
        return self.counts


def dummy_batch(
    num_sequences: int, max_seq_length: int, model: BertForPreTraining
) -> PretrainingBatch:
    records = synthetic_records(
        num_sequences, max_seq_length, model.config.vocab_size, packed=False, seed=0
    )
    return make_batch(records, np.arange(num_sequences), max_seq_length)


@torch.no_grad()
def warm_up(
    config: EvaluationConfig,
    max_seq_length: int,
    model: BertForPreTraining,
    device: torch.device,
) -> None:
    """A pass over a dummy batch, so that the first evaluation need not compile kernels. Changes no
    state.
    """
    with model.evaluating(calibrated=True):
        _count(model, dummy_batch(config.batch_size, max_seq_length, model).to(device))


def evaluation_room(batch_size: int, max_seq_length: int) -> PretrainingCapacity:
    """Capacity of an evaluation batch for a graph."""
    # Three sequences for each full row; Wikipedia's rows of 512 tokens hold two on average.
    return PretrainingCapacity.of(batch_size * max_seq_length, 3 * batch_size)


def share(records: Records, num_examples: int, rank: int, num_ranks: int) -> np.ndarray:
    """A rank's sequences, shortest first; all ranks get equally many tokens, give or take a
    sequence.
    """
    # Dealt like cards after sorting: each rank gets the same mix of lengths.
    return np.argsort(records.sequence_lengths[:num_examples], kind="stable")[
        rank::num_ranks
    ]


def fill_batches(
    records: Records, sequences: np.ndarray, room: PretrainingCapacity
) -> list[np.ndarray]:
    """Splits the sequences into batches that fit; one that exceeds the room alone is a batch alone.

    In the order of the records, which mixes short and long ones, so that few batches do.
    """
    tokens, masked = records.sequence_lengths, np.diff(records.masked_lm_offsets)
    limits = np.array([room.tokens, room.masked, room.sequences])
    batches: list[list[int]] = []
    filled = limits
    for sequence in np.sort(sequences):
        size = np.array([tokens[sequence], masked[sequence], 1])
        if (filled + size > limits).any():
            batches.append([])
            filled = np.zeros_like(limits)
        batches[-1].append(sequence)
        filled = filled + size
    return [np.array(batch) for batch in batches]


def _count(model: BertForPreTraining, batch: PretrainingBatch) -> Tensor:
    """(correct, summed loss, masked tokens; correct, summed loss, sequences) of a batch [6].

    In fp64: the accuracy must not depend on how the sequences are distributed over batches and
    ranks.
    """
    mlm, losses, nsp = model.scored(batch)
    counts = [
        (mlm.argmax(dim=1) == batch.masked_labels).sum(),  # no word is IGNORE
        losses.double().sum(),
        (batch.masked_labels != IGNORE).sum(),
    ]
    if nsp is None:
        counts += 3 * [torch.zeros_like(counts[0])]
    else:
        counts += [
            (nsp.argmax(dim=1) == batch.next_sentence_labels).sum(),
            F.cross_entropy(
                nsp, batch.next_sentence_labels, ignore_index=IGNORE, reduction="sum"
            ),
            (batch.next_sentence_labels != IGNORE).sum(),
        ]
    return torch.stack([count.double() for count in counts])
