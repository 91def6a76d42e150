"""Do the fast paths train like the plain ones? Compares loss curves of a small BERT.

The words of a sequence come from one topic of three words: a model that attends learns to narrow
masked words down to three, and from the topic's number whether B follows A, which takes the loss
from 4.9 to 1.1. Every variant starts from the same weights and sees the same batches. Prints one
JSON line: mean loss in each window of 25 steps for every variant, and the largest gap of each pair.

usage: python bench/convergence.py [--steps 300]
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from lib import Parser, emit, integer
from torch import Tensor
from torch_lib import device, new_model, new_step, no_fp8, precisions
from train_step import Variant

from bert import kernels
from bert.data.batch import PretrainingBatch, PretrainingCapacity, make_batch
from bert.data.records import Records
from bert.kernels.precision import PrecisionConfig
from bert.model.config import BertConfig
from bert.training.graph import GraphedStep, graph_capacity, static_batch

WINDOW = 25
VOCABULARY, LENGTH, ROWS = 64, 64, 8
LONGEST = LENGTH // 2  # sequence, so that two fit in a row
MASK = 1  # id of the masked word
NUM_TOPICS, TOPIC_WORDS = 20, 3
PEAK_LR = 0.02
MODEL = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    initializer_range=0.05,
    max_position_embeddings=LENGTH,
)


def pairs(on_gpu: bool) -> dict[str, tuple[Variant, Variant, float]]:
    """(fast, plain, largest allowed gap between their windows in nats; the loss starts at 5.3)."""
    fp32, bf16, fp8 = (
        Variant(name=name, precision=name, fused="none", graph=False)
        for name in ("fp32", "bf16", "fp8")
    )
    variants = {
        "bf16 against fp32": (bf16, fp32, 0.1),
        "fp8 against bf16": (fp8, bf16, 0.15),
    }
    if on_gpu:
        # Kernels and graphs need a GPU; the other pairs also run on a CPU.
        fused = dataclasses.replace(bf16, fused="auto")
        graphed = dataclasses.replace(fused, graph=True)
        graphed_fp8 = dataclasses.replace(graphed, precision="fp8")
        variants["fused against reference"] = (fused, bf16, 0.1)
        variants["graph against eager"] = (graphed, fused, 0.1)
        variants["fp8 in kernels and graph against bf16"] = (graphed_fp8, fused, 0.15)
    return {
        name: pair
        for name, pair in variants.items()
        if pair[0].precision in precisions()
    }


def records(num_sequences: int, seed: int) -> Records:
    """Sequences of 8 to 32 words of a topic, two per row, 15% masked.

    The next-sentence label is the topic's parity.
    """
    generator = np.random.default_rng(seed)
    lengths = generator.integers(8, LONGEST + 1, num_sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    words = np.empty(starts[-1], dtype=np.int16)
    positions, labels, counts = [], [], []
    topics = generator.integers(0, NUM_TOPICS, num_sequences)
    for number, (begin, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        # Ids 0 and 1 are padding and the masked word.
        ids = (
            2
            + TOPIC_WORDS * topics[number]
            + generator.integers(0, TOPIC_WORDS, length)
        )
        masked = np.sort(
            # The first token is spared: the next-sentence head reads it, as it does [CLS].
            generator.choice(
                np.arange(1, length), max(1, round(0.15 * length)), replace=False
            )
        )
        positions.append(masked)
        labels.append(ids[masked])
        counts.append(len(masked))
        words[begin : begin + length] = np.where(
            np.isin(np.arange(length), masked), MASK, ids
        )
    return Records(
        input_ids=words,
        sequence_offsets=starts,
        segment_b_start=(lengths // 2).astype(np.int16),
        masked_lm_positions=np.concatenate(positions).astype(np.int16),
        masked_lm_ids=np.concatenate(labels).astype(np.int16),
        masked_lm_offsets=np.concatenate([[0], np.cumsum(counts)]),
        next_sentence_labels=(topics % 2).astype(np.int8),
        row_offsets=np.arange(0, num_sequences + 1, 2),
    )


def batches(steps: int) -> list[PretrainingBatch]:
    """One batch of ROWS rows per step, padded to a fixed size."""
    # Short sequences round 15% up to 20% of masked words.
    tokens, sequences = ROWS * LENGTH, 3 * ROWS
    room = graph_capacity(
        PretrainingCapacity(
            tokens=tokens, sequences=sequences, masked=int(0.2 * tokens)
        ),
        ROWS,
    )
    data = records(2 * ROWS * steps, seed=1)
    chosen = np.arange(2 * ROWS * steps).reshape(steps, -1)
    return [
        static_batch(make_batch(data, sequences, LENGTH), room) for sequences in chosen
    ]


def rates_of(steps: int, peak: float = PEAK_LR) -> list[float]:
    """Learning rate of each step: 20 steps of warm-up and a linear decay."""
    return [
        peak * min(1.0, (number + 1) / 20) * (1 - number / steps)
        for number in range(steps)
    ]


def train(
    step: Any, data: list[PretrainingBatch], rates: list[float]
) -> Iterator[Tensor]:
    """Yields the loss of each step."""
    for number, (batch, lr) in enumerate(zip(data, rates, strict=True)):
        torch.manual_seed(number)
        # Stays on the device: the host would wait in every step.
        yield sum(step([batch], lr).losses).detach()


def windows(losses: Iterable[Tensor]) -> np.ndarray:
    """Mean loss of each window of WINDOW steps."""
    return (
        torch.stack(list(losses))
        .double()
        .cpu()
        .numpy()
        .reshape(-1, WINDOW)
        .mean(axis=1)
    )


def curve(variant: Variant, data: list[PretrainingBatch]) -> np.ndarray:
    on_gpu = device().type == "cuda"
    # The fast backends need 16 bits.
    attention = "auto" if on_gpu and variant.precision != "fp32" else "sdpa_loop"
    choice = kernels.KernelsConfig(fused=variant.fused, attention=attention)
    model = new_model(MODEL, choice).to(device())
    precision = PrecisionConfig(precision=variant.precision)
    fused_update = "lamb" in choice.names(device())
    step: Any = new_step(model, precision, fused_update=fused_update, sharded=True)
    if on_gpu:
        data = [batch.pin_memory() for batch in data]
    if variant.graph:
        step = GraphedStep(step, data[:1])
    return windows(train(step, data, rates_of(len(data))))


def compare(steps: int) -> dict[str, Any]:
    """Curves and verdict by pair."""
    data = batches(steps)
    wanted = pairs(torch.cuda.is_available())
    # Each variant trains once, though several pairs have it.
    both = [variant for fast, plain, _ in wanted.values() for variant in (fast, plain)]
    curves = {variant: curve(variant, data) for variant in dict.fromkeys(both)}
    differences: dict[str, Any] = {}
    for name, (fast, plain, allowed) in wanted.items():
        gap = float(np.abs(curves[fast] - curves[plain]).max())
        differences[name] = {
            "largest_gap": round(gap, 4),
            "allowed": allowed,
            "overlay": gap <= allowed,
            "fast": curves[fast].round(4).tolist(),
            "plain": curves[plain].round(4).tolist(),
        }
    return {"pairs": differences, "no_fp8": no_fp8()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--steps", type=integer, default=300, help="of each run, in 25s (default 300)"
    )
    options = parser.parse_args()
    # Losses are reshaped to whole windows.
    if options.steps % WINDOW:
        parser.error(f"--steps {options.steps}: expected a multiple of {WINDOW}")
    emit("convergence", vars(options) | compare(options.steps))


if __name__ == "__main__":
    main()
