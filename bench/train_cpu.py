"""Training throughput on a CPU: ours on packed rows against Hugging Face on padded ones.

The same sequences, with Wikipedia's mix of lengths (synthetic), the same model (4 layers x 256), forward, backward and
update, interleaved in one process. Prints one JSON line; the ratio is the figure, the rates depend on the machine.

usage: python bench/train_cpu.py [--repeats 5] [--rows 8] [--threads 2]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import transformers
from lib import Parser, emit, in_turns, integer, medians, wall_seconds
from torch_lib import SMALL, new_model
from train_step import inputs_of

from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.synthetic import synthetic_records
from bert.kernels.precision import Precision
from bert.model.config import BertConfig
from bert.optim import Config as OptimizerConfig
from bert.training.step import build_step


def our_step(batch: PretrainingBatch) -> Callable[[], object]:
    model = new_model(BertConfig(**SMALL))
    world, precision = World(DistConfig(device="cpu")), Precision(dtype=torch.float32)
    step = build_step(model, precision, OptimizerConfig(), world, accumulate=False, fused_update=False)
    return lambda: step([batch], 1e-4)


def their_step(batch: PretrainingBatch, length: int, micro_batch: int) -> Callable[[], object]:
    """One step of BertForPreTraining with AdamW on the same sequences padded, in micro-batches that fit the cache."""
    model = transformers.BertForPreTraining(transformers.BertConfig(**SMALL, attn_implementation="sdpa")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = inputs_of(batch, length, False, torch.device("cpu"))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for begin in range(0, batch.num_sequences, micro_batch):
            model(**{name: value[begin : begin + micro_batch] for name, value in inputs.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
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
    in_turns(steps, 1)  # allocator and thread pools warm
    times = in_turns(steps, options.repeats, wall_seconds)
    # The fastest step of each is what the machine can do; slower ones had to share it.
    rates = {name: batch.num_sequences / min(spans) for name, spans in times.items()}
    best_peer = max(rate for name, rate in rates.items() if name != "ours_packed")
    middle = medians(times)
    median_of_peer = min(median for name, median in middle.items() if name != "ours_packed")
    figures = {
        "sequences": batch.num_sequences,
        "mean_length": round(batch.num_tokens / batch.num_sequences, 1),
        "threads": options.threads,
        "sequences_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "ratio": round(rates["ours_packed"] / best_peer, 2),
        "ratio_of_medians": round(median_of_peer / middle["ours_packed"], 2),
        "seconds": {name: [round(span, 3) for span in spans] for name, spans in times.items()},
    }
    emit("train_cpu", figures, data="Wikipedia mix (synthetic)", targets={"ratio": (2.5, True)})


if __name__ == "__main__":
    main()
