"""Training throughput on a CPU: ours on packed rows against Hugging Face on padded ones.

The same sequences, with Wikipedia's mix of lengths (synthetic), the same model (4 layers x 256), forward, backward and
update, interleaved in one process. Prints one JSON line; the ratio is the figure, the rates depend on the machine.

usage: python bench/train_cpu.py [--repeats 5] [--rows 8] [--threads 2]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import result
import torch
import transformers
from command_line import Parser, integer
from small_bert import SMALL, new_model

from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.optim import Config as OptimizerConfig
from bert.training.step import build_step


def our_step(batch: PretrainingBatch) -> Callable[[], object]:
    """One step of the trainer on the packed batch."""
    model = new_model(BertConfig(**SMALL))
    world, precision = World(DistConfig(device="cpu")), Precision(dtype=torch.float32)
    step = build_step(model, precision, OptimizerConfig(), world, accumulate=False, fused_update=False)
    return lambda: step([batch], 1e-4)


def padded(batch: PretrainingBatch, length: int) -> dict[str, torch.Tensor]:
    """The batch as Hugging Face takes it: one sequence a row, filled up to ``length``."""
    ends = batch.cu_seqlens.tolist()
    shape = (batch.num_sequences, length)
    fields = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "token_type_ids", "attention_mask")}
    labels = torch.full(shape, -100)
    flat_labels = torch.full((batch.num_tokens,), -100)
    flat_labels[batch.masked_positions.long()] = batch.masked_labels
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        fields["input_ids"][row, : end - begin] = batch.input_ids[begin:end]
        fields["token_type_ids"][row, : end - begin] = batch.segment_ids[begin:end]
        fields["attention_mask"][row, : end - begin] = 1
        labels[row, : end - begin] = flat_labels[begin:end]
    return fields | {"labels": labels, "next_sentence_label": batch.next_sentence_labels}


def their_step(batch: PretrainingBatch, length: int, micro_batch: int) -> Callable[[], object]:
    """One step of BertForPreTraining with AdamW on the same sequences padded, in micro-batches that fit the cache."""
    model = transformers.BertForPreTraining(transformers.BertConfig(**SMALL, attn_implementation="sdpa")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = padded(batch, length)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for begin in range(0, batch.num_sequences, micro_batch):
            model(**{name: value[begin : begin + micro_batch] for name, value in inputs.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def seconds(step: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=integer, default=5, help="interleaved steps of each (default 5)")
    parser.add_argument("--rows", type=integer, default=8, help="packed rows of 512 tokens (default 8)")
    parser.add_argument("--threads", type=integer, default=2, help="CPU threads (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = synthetic_records(options.rows, 512, SMALL["vocab_size"], packed=True, seed=0)
    batch = make_batch(records, np.arange(records.num_sequences), 512)
    steps = {
        "ours_packed": our_step(batch),
        "hugging_face_padded": their_step(batch, 512, micro_batch=4),
        "hugging_face_padded_one_batch": their_step(batch, 512, micro_batch=batch.num_sequences),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        seconds(step)  # allocator and thread pools warm
    for _ in range(options.repeats):
        for name, step in steps.items():
            times[name].append(seconds(step))
    # The fastest step of each is what the machine can do; slower ones had to share it.
    rates = {name: batch.num_sequences / min(spans) for name, spans in times.items()}
    best_peer = max(rate for name, rate in rates.items() if name != "ours_packed")
    medians = {name: statistics.median(spans) for name, spans in times.items()}
    median_of_peer = min(median for name, median in medians.items() if name != "ours_packed")
    figures = {
        "sequences": batch.num_sequences,
        "mean_length": round(batch.num_tokens / batch.num_sequences, 1),
        "threads": options.threads,
        "sequences_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "ratio": round(rates["ours_packed"] / best_peer, 2),
        "ratio_of_medians": round(median_of_peer / medians["ours_packed"], 2),
        "seconds": {name: [round(span, 3) for span in spans] for name, spans in times.items()},
    }
    result.emit("train_cpu", figures, data="Wikipedia mix (synthetic)", targets={"ratio": (2.5, True)})


if __name__ == "__main__":
    main()
