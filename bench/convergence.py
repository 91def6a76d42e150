"""Do the fast paths train like the plain ones? 300 steps of a small BERT, curves compared window by window.

The words of a sequence are of one topic of three words, so a model that attends learns to narrow the masked ones down
to three, and from the topic's number whether B follows A: from a loss of 4.9 to one of 1.1. Every variant starts from
the same weights and sees the same batches. Prints one JSON line: mean loss of each window of 25 steps for every
variant, and the largest gap of each pair.

--against huggingface holds the trainer to an independent implementation instead (bench/plain_bert.py): the same first
weights, the same batches, no dropout; the losses of every window, and the accuracy on held-out sequences. Both compute
in fp64, at a quarter of the learning rate: at the whole the curves part by 0.4% in 500 steps.

usage: python bench/convergence.py [--steps 300]
       python bench/convergence.py --against huggingface [--steps 500]
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import device, emit, machine

from bert import hub, kernels, optim
from bert.data.pretraining import PretrainingBatch, PretrainingCapacity, make_batch
from bert.data.records import Records
from bert.dist import Config as DistConfig
from bert.dist import World
from bert.graph import GraphedStep, graph_capacity, static_batch
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.precision import Config as PrecisionConfig
from bert.step import TrainingStep, build_step

WINDOW = 25
VOCABULARY, LENGTH, ROWS = 64, 64, 8
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


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a run computes."""

    precision: str = "fp32"
    fused: str = "none"
    sharded: bool = False
    graph: bool = False
    hidden_act: str = "gelu"


def pairs(on_gpu: bool) -> dict[str, tuple[Variant, Variant, float]]:
    """name -> (fast, plain, largest gap allowed between their windows, in nats of a loss that begins at 5.3)."""
    bf16 = Variant(precision="bf16", sharded=True)
    found = {
        "bf16 against fp32": (bf16, Variant(sharded=True), 0.1),
        "fp8 against bf16": (Variant(precision="fp8", sharded=True), bf16, 0.15),
        "sharded against replicated": (Variant(sharded=True), Variant(), 0.1),
        "GELU by tanh against erf": (Variant(), Variant(hidden_act="gelu_erf"), 0.1),
    }
    if on_gpu:
        fused = Variant(precision="bf16", fused="auto", sharded=True)
        graphed = Variant(precision="bf16", fused="auto", sharded=True, graph=True)
        found["fused against reference"] = (fused, bf16, 0.1)
        found["graph against eager"] = (graphed, fused, 0.1)
        inside = Variant(precision="fp8", fused="auto", sharded=True, graph=True)
        found["fp8 in kernels and graph against bf16"] = (inside, fused, 0.15)
    return found


def records(num_sequences: int, seed: int) -> Records:
    """Sequences of 8 to 32 words of a topic, two a row, 15% of them masked; next-sentence labels: is the topic odd?"""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(8, LENGTH // 2 + 1, num_sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    words = np.empty(starts[-1], dtype=np.int16)
    positions, labels, counts = [], [], []
    topics = generator.integers(0, NUM_TOPICS, num_sequences)
    for number, (begin, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        own = 2 + TOPIC_WORDS * topics[number] + generator.integers(0, TOPIC_WORDS, length)
        masked = np.sort(generator.choice(np.arange(1, length), max(1, round(0.15 * length)), replace=False))
        positions.append(masked)
        labels.append(own[masked])
        counts.append(len(masked))
        words[begin : begin + length] = np.where(np.isin(np.arange(length), masked), MASK, own)
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


def batches(steps: int, data: Records) -> list[PretrainingBatch]:
    """One batch of ROWS rows a step, filled up to a fixed size."""
    tokens, sequences = ROWS * LENGTH, 3 * ROWS
    room = graph_capacity(PretrainingCapacity(tokens=tokens, sequences=sequences, masked=int(0.2 * tokens)), ROWS)
    chosen = np.arange(2 * ROWS * steps).reshape(steps, -1)
    return [static_batch(make_batch(data, sequences, LENGTH), room) for sequences in chosen]


def rate(number: int, steps: int, peak: float = PEAK_LR) -> float:
    """The learning rate of a step: up for 20, then down to the last."""
    return peak * min(1.0, (number + 1) / 20) * (1 - number / steps)


def first_model(shape: BertConfig, choice: kernels.Config) -> BertForPreTraining:
    """The model that every run begins with, on the CPU."""
    model = BertForPreTraining(shape, kernels.select(choice, device()))
    initialize(model, 0)
    return model


def curve(variant: Variant, data: list[PretrainingBatch]) -> np.ndarray:
    """Mean loss of each window of WINDOW steps."""
    here = device()
    choice = kernels.Config(
        fused=variant.fused, attention="sdpa_loop" if variant.precision == "fp32" or here.type == "cpu" else "auto"
    )
    shape = dataclasses.replace(MODEL, hidden_act=variant.hidden_act)
    model = first_model(shape, choice).to(here)
    fused_update = "lamb" in choice.names(here)
    settings = optim.Config(sharded=variant.sharded)
    world = World(DistConfig(device=here.type))
    precision = PrecisionConfig(precision=variant.precision).resolve(world.device)
    step: TrainingStep = build_step(model, precision, settings, world, accumulate=False, fused_update=fused_update)
    if here.type == "cuda":
        data = [batch.pin_memory() for batch in data]
    if variant.graph:
        step = GraphedStep(step, data[:1])  # type: ignore[arg-type]
    losses = torch.zeros(len(data), device=here)
    for number, batch in enumerate(data):
        torch.manual_seed(number)
        result = step([batch], rate(number, len(data)))
        losses[number] = sum(result.losses)
    return losses.cpu().numpy().reshape(-1, WINDOW).mean(axis=1)


def compare(steps: int) -> dict[str, Any]:
    """Curves by variant, and gap and verdict by pair."""
    data = batches(steps, records(2 * ROWS * steps, seed=1))
    wanted = pairs(torch.cuda.is_available())
    curves = {
        variant: curve(variant, data) for variant in {v for fast, plain, _ in wanted.values() for v in (fast, plain)}
    }
    result: dict[str, Any] = {"pairs": {}}
    for name, (fast, plain, allowed) in wanted.items():
        gap = float(np.abs(curves[fast] - curves[plain]).max())
        result["pairs"][name] = {
            "largest_gap": round(gap, 4),
            "allowed": allowed,
            "overlay": gap <= allowed,
            "fast": [round(float(loss), 4) for loss in curves[fast]],
            "plain": [round(float(loss), 4) for loss in curves[plain]],
        }
    return result


def against_hugging_face(steps: int) -> dict[str, Any]:
    """Mean losses of each window of ours and theirs, the largest relative gap, and both accuracies."""
    import plain_bert

    shape = dataclasses.replace(MODEL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    data, held_out = records(2 * ROWS * steps, seed=1), records(500, seed=2)
    model = first_model(shape, kernels.Config(fused="none", attention="sdpa_loop")).double()
    theirs = plain_bert.model(
        hub.config_values(shape, "BertForPreTraining"),
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )
    theirs.double()
    settings = optim.Config(sharded=False)
    world = World(DistConfig(device="cpu"))
    precision = PrecisionConfig(precision="fp32").resolve(world.device)
    step = build_step(model, precision, settings, world, accumulate=False, fused_update=False)
    rates = [rate(number, steps, PEAK_LR / 4) for number in range(steps)]
    mine = [float(sum(step([batch], lr).losses)) for batch, lr in zip(batches(steps, data), rates, strict=True)]
    chosen = np.arange(2 * ROWS * steps).reshape(steps, -1)
    lamb = settings.lamb
    plain = plain_bert.Lamb(theirs.named_parameters(), (lamb.beta1, lamb.beta2), lamb.weight_decay)
    padded = (plain_bert.padded(data, sequences) for sequences in chosen)
    other = list(plain_bert.train(theirs, padded, rates, plain))
    ours, reference = (np.array(losses).reshape(-1, WINDOW).mean(axis=1) for losses in (mine, other))
    with torch.no_grad():
        batch = make_batch(held_out, np.arange(500), LENGTH)
        found = model.eval().logits(batch).mlm.argmax(dim=1) == batch.masked_labels
    return {
        "ours": [round(float(loss), 5) for loss in ours],
        "huggingface": [round(float(loss), 5) for loss in reference],
        "largest_relative_gap": float(np.abs(ours / reference - 1).max()),
        "accuracy": float(found.double().mean()),
        "huggingface_accuracy": plain_bert.accuracy(theirs, plain_bert.padded(held_out, np.arange(500))),
    }


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, help="steps of each run, a multiple of 25 (default 300; 500 with --against)"
    )
    parser.add_argument("--against", choices=("huggingface",), help="the implementation to compare with")
    options = parser.parse_args()
    steps = options.steps or (500 if options.against else 300)
    found = against_hugging_face(steps) if options.against else compare(steps)
    emit({"benchmark": "convergence", "against": options.against, "steps": steps} | found | {"machine": machine()})


if __name__ == "__main__":
    main()
