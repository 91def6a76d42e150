"""The data loader: a rank's micro-batches of each step, prepared some steps ahead on a thread."""

import dataclasses
import itertools
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert.data import dali
from bert.data.batch import PretrainingBatch, PretrainingCapacity, gather_batch
from bert.data.masking import DynamicMasks, MaskTokens, margin
from bert.data.records import DataError
from bert.data.sampler import Batching, Chosen, RowSource, Sampler, bin_counts
from bert.data.shards import Shards, list_bins, list_shards
from bert.data.synthetic import SyntheticShards
from common.env import ConfigError, env

_STEPS_AHEAD = 4


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Where the rows come from and how many a rank takes."""

    packed: bool = env(
        "PACKED", False, "1: train on DATADIR_PHASE2_PACKED; 0: on DATADIR_PHASE2"
    )
    datadir: Path | None = env(
        "DATADIR_PHASE2", None, "folder of unpacked record files"
    )
    datadir_packed: Path | None = env(
        "DATADIR_PHASE2_PACKED", None, "folder of packed record files"
    )
    synthetic: bool = env(
        "SYNTH_DATA",
        False,
        "1: train on synthetic sequences of Wikipedia's lengths, no files",
    )
    batch_size: int = env("BATCHSIZE", at_least=1, doc="rows per GPU in a micro-batch")
    gradient_steps: int = env(
        "GRADIENT_STEPS", 1, "micro-batches in a step", at_least=1
    )
    packing_factor: int = env(
        "PACKING_FACTOR",
        1,
        "sequences a row counts for: 2 for packed Wikipedia",
        at_least=1,
    )
    max_seq_length: int = env(
        "MAX_SEQ_LENGTH", 512, "tokens of a row at most", at_least=8
    )
    batching: str = env(
        "BATCHING",
        "rows",
        "rows of the files, or a number from each bin of lengths",
        choices=("rows", "bins"),
    )
    max_sequences_per_row: int = env(
        "MAX_SEQUENCES_PER_ROW", 3, "sequences of a packed row at most", at_least=1
    )
    bin_counts: str = env(
        "BIN_COUNTS",
        "",
        "BATCHING=bins: sequences of each bin in a micro-batch, as 6:3:2:5",
    )
    exchange_group: int = env(
        "EXCHANGE_GROUP",
        1,
        "ranks that balance sequence lengths among themselves; 1: off",
        at_least=1,
    )
    masking: str = env(
        "MASKING",
        "static",
        "masks of the records, or new ones per epoch (open division)",
        choices=("static", "dynamic"),
    )
    loader: str = env(
        "DATA_LOADER",
        "thread",
        "what brings batches to the GPU: thread or NVIDIA DALI",
        choices=("thread", "dali"),
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other."""
        if self.loader == "dali":
            dali.check()
        if self.batching == "bins" and not re.fullmatch(r"\d+(:\d+)*", self.bin_counts):
            raise ConfigError(
                f"BIN_COUNTS={self.bin_counts!r}: expected numbers between colons, such as 6:3:2:5"
            )
        if self.packed and self.for_unpacked:
            raise ConfigError(
                f"{self.for_unpacked} needs records that are not packed: set PACKED=0 and DATADIR_PHASE2"
            )

    @property
    def capacity(self) -> PretrainingCapacity:
        """Sizes that no micro-batch exceeds, if 15% of the tokens of each sequence are masked as in
        the benchmark's data, or of all tokens with MASKING=dynamic.
        """
        sequences = self.batch_size * (self.max_sequences_per_row if self.packed else 1)
        capacity = PretrainingCapacity.of(
            self.batch_size * self.max_seq_length, sequences
        )
        if self.masking == "static":
            return capacity
        # New masks are drawn per token, so their number varies about 15%: fixed sizes need room
        # above it.
        return dataclasses.replace(
            capacity, masked=capacity.masked + margin(capacity.tokens)
        )

    @property
    def for_unpacked(self) -> str:
        """A setting that only works on unpacked records, such as BATCHING=bins; or empty."""
        if self.batching == "bins":
            return "BATCHING=bins"
        return (
            f"EXCHANGE_GROUP={self.exchange_group}" if self.exchange_group > 1 else ""
        )

    @property
    def rows_per_step(self) -> int:
        """Rows of one rank in one optimizer step."""
        return self.batch_size * self.gradient_steps

    @property
    def source(self) -> tuple[Path, str]:
        """The training data's folder and the variable that names it. Raises ConfigError if that is
        unset.
        """
        variable = "DATADIR_PHASE2_PACKED" if self.packed else "DATADIR_PHASE2"
        folder = self.datadir_packed if self.packed else self.datadir
        if folder is None:
            raise ConfigError(
                f"{variable} is not set (PACKED={int(self.packed)}): give the folder of record files"
            )
        return folder, variable


def open_source(
    config: LoaderConfig, vocab_size: int, pairs: bool = False
) -> RowSource:
    """The rows to train on. Raises DataError if there are none, or with ``pairs`` no sentence
    pairs.
    """
    if config.synthetic:
        return SyntheticShards(config.max_seq_length, vocab_size, config.packed)
    bins = (
        list_bins(*config.source)
        if config.batching == "bins"
        else [list_shards(*config.source)]
    )
    source = Shards(
        [path for files in bins for path in files],
        config.max_seq_length,
        [len(files) for files in bins],
    )
    first = source[0]
    # Segment B of the first sequence begins at its end: there is none.
    if (
        pairs
        and first.num_sequences
        and first.segment_b_start[0] == first.sequence_offsets[1]
    ):
        folder, variable = config.source
        raise DataError(
            f"{variable}={folder}: no pairs of sentences (--nsp 0): set NSP=0, or prepare them with pairs"
        )
    return source


def make_batching(
    source: RowSource, sampler: Sampler, config: LoaderConfig
) -> Batching:
    """The micro-batches of each step. Raises DataError or ConfigError if the settings do not fit
    the data.
    """
    group = config.exchange_group
    # Bins and exchange move single sequences, and packed rows are fixed.
    if config.for_unpacked and source[0].row_offsets is not None:
        raise DataError(
            f"{config.for_unpacked} needs records that are not packed, and these are: leave it unset"
        )
    if sampler.world_size % group:
        raise ConfigError(
            f"EXCHANGE_GROUP={group}: expected a divisor of the {sampler.world_size} ranks"
        )
    counts: list[int] = []
    if config.batching == "bins":
        counts = bin_counts(source, config.bin_counts, config.batch_size)
    return Batching(source, sampler, config.batch_size, counts, group)


def open_masks(
    config: LoaderConfig,
    source: RowSource,
    phase1: Path | None,
    vocab_size: int,
    seed: int,
) -> DynamicMasks | None:
    """Dynamic masks; None with MASKING=static, which uses the records' own.

    phase1: the folder of vocab.txt. Raises DataError if that is missing, or of other data.
    """
    if config.masking == "static":
        return None
    # For synthetic records, whose tokens mean nothing.
    tokens = MaskTokens(cls=-1, sep=-1, mask=vocab_size - 1, size=vocab_size)
    if not config.synthetic:
        if phase1 is None:
            raise ConfigError(
                "MASKING=dynamic needs vocab.txt: set CHECKPOINTDIR_PHASE1 to its folder"
            )
        _ = source[0]  # sets vocab_md5
        tokens = MaskTokens.read(phase1 / "vocab.txt", source.vocab_md5)
    if tokens.size > vocab_size:
        raise DataError(
            f"{phase1}/vocab.txt has {tokens.size} tokens, bert_config.json vocab_size {vocab_size}: "
            "use a matching pair"
        )
    return DynamicMasks(tokens, seed, config.capacity.masked)


class TrainingData:
    """``next_step()`` returns the micro-batches of one step after the other, from ``first_step``
    on.
    """

    def __init__(
        self,
        source: RowSource,
        sampler: Sampler,
        config: LoaderConfig,
        vocab_size: int,
        first_step: int,
        pad_and_pin: Callable[[PretrainingBatch], PretrainingBatch],
        masks: DynamicMasks | None = None,
    ) -> None:
        """On the thread each batch gets its ``masks``, then ``pad_and_pin``: to a capacity, in
        page-locked memory.
        """
        self.source, self.config = source, config
        self.batching = make_batching(source, sampler, config)
        self.vocab_size, self.pad_and_pin, self.masks = vocab_size, pad_and_pin, masks
        # A thread, not a process: NumPy and compiled loops release the lock of the interpreter.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._steps = itertools.count(first_step)
        self._pending: deque[Future[list[PretrainingBatch]]] = deque()
        for _ in range(_STEPS_AHEAD):
            self._prepare_another()

    def next_step(self) -> list[PretrainingBatch]:
        """Micro-batches of the next step, on the CPU. Raises DataError for records that cannot be
        used.
        """
        # The host waits here if the data thread has fallen behind.
        batches = self._pending.popleft().result()
        self._prepare_another()
        return batches

    def _prepare_another(self) -> None:
        self._pending.append(self._executor.submit(self.batches, next(self._steps)))

    def close(self) -> None:
        """Stops the thread."""
        self._executor.shutdown(cancel_futures=True)

    def batches(self, step: int) -> list[PretrainingBatch]:
        """Micro-batches of any step."""
        return [
            self.pad_and_pin(self._make(chosen)) for chosen in self.batching.step(step)
        ]

    def _make(self, chosen: Chosen) -> PretrainingBatch:
        files, indices = [int(chosen.files[0])], [np.arange(len(chosen.files))]
        # Rare: the micro-batch crosses the end of a file.
        if (chosen.files != files[0]).any():
            files = np.unique(chosen.files).tolist()
            # Where each file's sequences go in the batch; their order does not change.
            indices = [np.flatnonzero(chosen.files == file) for file in files]
        sources = [self.source[file] for file in files]
        limits = self.config.max_seq_length, self.vocab_size
        batch = gather_batch(sources, indices, chosen.sequences, *limits)
        return self.masks(batch, chosen) if self.masks else batch
