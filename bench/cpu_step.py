"""Training steps on this machine's CPU, in turns with what they are compared with. Prints one JSON line.

transformers  ours on packed rows of Wikipedia's mix of lengths (synthetic) against BertForPreTraining with AdamW on the
              same sequences padded, at once and in micro-batches of 4 that fit the cache: wall time, BERT of 4 x 256
recompute     forward and backward pass by RECOMPUTE_LAYERS: CPU time, 4 layers as wide as BERT-1.5B on rows of 128

The ratios are the figures; the rates depend on the machine.

usage: python bench/cpu_step.py transformers|recompute [--repeats 6] [--rows 4] [--threads 1] [--tiny]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lib import Parser, cpu_seconds, emit, in_turns, integer, medians, ratios, wall_seconds
from torch_lib import SMALL, TINY, new_model, new_step, packed_batches
from train_step import build_peer

from bert.kernels.precision import Config as PrecisionConfig
from bert.model.config import BertConfig
from bert.model.recompute import Recomputation

WIDE = SMALL | {
    "hidden_size": 1600, "num_attention_heads": 25, "intermediate_size": 6400, "max_position_embeddings": 128,
    "layer_norm_large_model": True,
}  # fmt: skip


def transformers(options: argparse.Namespace, config: BertConfig) -> dict[str, Any]:
    config = dataclasses.replace(config, hidden_act="gelu_erf")  # theirs by tanh is many operations
    (batch,) = packed_batches(options.rows, 1, config)
    ours = new_step(new_model(config), PrecisionConfig(precision="fp32"))
    peers = {"hugging_face_padded": 4, "hugging_face_padded_one_batch": batch.num_sequences}
    steps: dict[str, Callable[[], object]] = {"ours_packed": lambda: ours([batch], 1e-4)}
    for name, size in peers.items():
        steps[name] = partial(build_peer(config, [batch], packed=False, compiled=False, micro_batch=size), 0)
    in_turns(steps, 1)  # allocator and thread pools warm
    times = in_turns(steps, options.repeats, wall_seconds)
    fastest, middle = {name: min(spans) for name, spans in times.items()}, medians(times)
    return {
        "sequences": batch.num_sequences,
        "mean_length": round(batch.num_tokens / batch.num_sequences, 1),
        "sequences_per_second": {name: round(batch.num_sequences / span, 2) for name, span in fastest.items()},
        # The fastest step of each is what the machine can do; slower ones had to share it.
        "ratio": round(min(fastest[name] for name in peers) / fastest["ours_packed"], 2),
        "ratio_of_medians": round(min(middle[name] for name in peers) / middle["ours_packed"], 2),
        "seconds": {name: [round(span, 3) for span in spans] for name, spans in times.items()},
    }


def recompute(options: argparse.Namespace, config: BertConfig) -> dict[str, Any]:
    model, (batch,) = new_model(config), packed_batches(options.rows, 1, config)

    def both_passes(layers: int) -> None:
        model.bert.encoder.recomputation = Recomputation(layers, random_state=True) if layers else None
        model.zero_grad()
        sum(model(batch)).backward()

    runs = {f"recompute_{layers}": partial(both_passes, layers) for layers in (0, 1, 2, 4)}
    in_turns(runs, 1)
    times = in_turns(runs, options.repeats, cpu_seconds)
    middle = medians(times)
    return {
        name: {"seconds": round(middle[name], 2), "time_ratio": ratios(spans, times["recompute_0"])}
        for name, spans in times.items()
    }


def main() -> None:
    parser = Parser(__doc__)
    measures = {"transformers": transformers, "recompute": recompute}
    parser.add_argument("what", choices=list(measures))
    parser.add_argument("--repeats", type=integer, default=6, help="turns (default 6)")
    parser.add_argument("--rows", type=integer, default=4, help="packed rows (default 4)")
    parser.add_argument("--threads", type=integer, default=1, help="of PyTorch (default 1)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = TINY | {"num_hidden_layers": 4} if options.tiny else WIDE if options.what == "recompute" else SMALL
    figures = measures[options.what](options, BertConfig(**shape))
    settings = {"rows": options.rows, "threads": options.threads, "model": f"4 layers x {shape['hidden_size']}"}
    emit(options.what, settings | figures, data="Wikipedia mix (synthetic)")


if __name__ == "__main__":
    main()
