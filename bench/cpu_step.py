"""Steps of ours and of transformers on this machine's CPU, in turns. Prints one JSON line.

Ours on packed rows with Wikipedia's length distribution (synthetic) against BertForPreTraining with
AdamW on the same sequences padded, in one batch and in micro-batches of 4 that fit the cache: wall
time, 4 layers x 256. The ratios are the figures; the rates depend on the machine.

usage: python bench/cpu_step.py [--repeats 6] [--rows 4] [--threads 1]
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lib import Parser, emit, in_turns, integer
from torch_lib import new_model, new_step, packed_batches
from train_step import build_peer

from bert.kernels.precision import PrecisionConfig
from bert.model.config import BertConfig

SMALL = BertConfig(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    hidden_act="gelu_erf",  # transformers' tanh GELU is many operations
)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    (batch,) = packed_batches(options.rows, 1, SMALL)
    count = batch.num_sequences
    ours = new_step(new_model(SMALL), PrecisionConfig(precision="fp32"))
    # Sequences in a micro-batch; both ways, so that the faster one is the opponent.
    peers = {"hugging_face_padded": 4, "hugging_face_padded_one_batch": count}
    steps: dict[str, Callable[[], object]] = {
        "ours_packed": lambda: ours([batch], 1e-4)
    }
    for name, size in peers.items():
        theirs = build_peer(SMALL, [batch], compiled=False, micro_batch=size)
        steps[name] = partial(theirs, 0)
    in_turns(steps, 1)  # allocator and thread pools warm
    times = in_turns(steps, options.repeats)
    # The fastest step shows what the machine can do; slower ones had to share it.
    fastest = {name: min(spans) for name, spans in times.items()}

    def ratio(pick: Callable[[list[float]], float]) -> float:
        opponent = min(pick(times[name]) for name in peers)
        return round(opponent / pick(times["ours_packed"]), 2)

    return vars(options) | {
        "sequences_per_second": {
            name: round(count / span, 2) for name, span in fastest.items()
        },
        "ratio": ratio(min),
        "ratio_of_medians": ratio(statistics.median),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=integer, default=6, help="turns (default 6)")
    parser.add_argument(
        "--rows", type=integer, default=4, help="packed rows (default 4)"
    )
    parser.add_argument(
        "--threads", type=integer, default=1, help="of PyTorch (default 1)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    emit("cpu_step", measure(options), data="Wikipedia mix (synthetic)")


if __name__ == "__main__":
    main()
