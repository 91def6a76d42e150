"""Do the fast paths train like the plain ones? 300 steps of a small BERT, curves compared window by window.

The words of a sequence are of one topic of three words, so a model that attends learns to narrow the masked ones down
to three, and from the topic's number whether B follows A: from a loss of 4.9 to one of 1.1. Every variant starts from
the same weights and sees the same batches. Prints one JSON line: mean loss of each window of 25 steps for every
variant, and the largest gap of each pair.

--against huggingface holds the trainer to an independent implementation instead (bench/plain_bert.py): the same first
weights, the same batches, no dropout; the losses of every window, and the accuracy on held-out sequences. Beside the
gap of the two stands that of ours against itself, begun with weights that are one part in 10^7 away: rounding grows in
training, and faster at a high rate, so that no two programs can be closer than that.

--dropout SEEDS compares them with dropout, where no step can be the same: SEEDS runs of each side, each from first
weights and masks of a seed of its own. The curves overlap where in every window the means of the two sides are no
further apart than the largest and the smallest loss of one side's seeds.

usage: python bench/convergence.py [--steps 300] [--only fp8]
       python bench/convergence.py --against huggingface [--steps 500] [--precision fp32] [--peak-lr 0.02] [--dropout 3]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from command_line import Parser, integer, natural, positive
from common import device, emit, machine
from fast_sums import emulated

from bert import kernels, optim
from bert.checkpoint import huggingface
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, PretrainingCapacity, make_batch
from bert.data.records import Records
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize
from bert.training.graph import GraphedStep, graph_capacity, static_batch
from bert.training.loop import step_seed
from bert.training.step import TrainingStep, build_step

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
    fast_sums: str = "forward"  # of fp8 products; without tensor cores they are emulated (bench/fast_sums.py)
    output_projection: bool = False  # in fp8


def pairs(on_gpu: bool) -> dict[str, tuple[Variant, Variant, float]]:
    """name -> (fast, plain, largest gap allowed between their windows, in nats of a loss that begins at 5.3)."""
    bf16 = Variant(precision="bf16", sharded=True)
    found = {
        "bf16 against fp32": (bf16, Variant(sharded=True), 0.1),
        "fp8 against bf16": (Variant(precision="fp8", sharded=True), bf16, 0.15),
        "fp8 with the output projection against bf16": (
            Variant(precision="fp8", sharded=True, output_projection=True),
            bf16,
            0.15,
        ),
        "fp8 with fast sums against bf16": (Variant(precision="fp8", sharded=True, fast_sums="all"), bf16, 0.15),
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


def first_model(shape: BertConfig, choice: kernels.Config, seed: int = 0) -> BertForPreTraining:
    """The model that every run of a seed begins with, on the CPU."""
    model = BertForPreTraining(shape, kernels.select(choice, device()))
    initialize(model, seed)
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
    settings_of_precision = PrecisionConfig(
        precision=variant.precision,
        fp8_fast_sums=variant.fast_sums,
        fp8_output_projection=variant.output_projection,
    )
    precision = settings_of_precision.resolve(world.device)
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


def compare(steps: int, only: str = "") -> dict[str, Any]:
    """Curves by variant, and gap and verdict by pair, of pairs whose name has ``only`` in it."""
    data = batches(steps, records(2 * ROWS * steps, seed=1))
    wanted = {name: pair for name, pair in pairs(torch.cuda.is_available()).items() if only in name}
    with emulated():
        curves = {
            variant: curve(variant, data)
            for variant in {v for fast, plain, _ in wanted.values() for v in (fast, plain)}
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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training on the CPU that both implementations can do.

    dtype: of weights and all else; peak_lr: the highest rate; seed: of first weights and dropout; away: by which part
    of themselves the first weights are moved.
    """

    steps: int
    dtype: torch.dtype = torch.float64
    peak_lr: float = PEAK_LR / 4
    dropout: float = 0.0
    seed: int = 0
    away: float = 0.0

    @property
    def shape(self) -> BertConfig:
        """The model."""
        return dataclasses.replace(MODEL, hidden_dropout_prob=self.dropout, attention_probs_dropout_prob=self.dropout)

    @property
    def rates(self) -> list[float]:
        """The learning rate of each step."""
        return [rate(number, self.steps, self.peak_lr) for number in range(self.steps)]

    @property
    def data(self) -> Records:
        """What is trained on, two sequences a row."""
        return records(2 * ROWS * self.steps, seed=1)

    def model(self) -> BertForPreTraining:
        """With the first weights."""
        made = first_model(self.shape, kernels.Config(fused="none", attention="sdpa_loop"), self.seed).to(self.dtype)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(1 + self.away)
        return made


class Trained(NamedTuple):
    """Mean loss of each window of WINDOW steps, and the share of held-out masked words that is found."""

    windows: np.ndarray
    accuracy: float


HELD_OUT = 500  # sequences


def ours(trial: Trial) -> Trained:
    """The training by this repository."""
    model = trial.model()
    world = World(DistConfig(device="cpu"))
    precision = PrecisionConfig(precision="fp32").resolve(world.device)
    settings = optim.Config(sharded=False)
    step = build_step(model, precision, settings, world, accumulate=False, fused_update=False)
    losses = []
    for number, (batch, lr) in enumerate(zip(batches(trial.steps, trial.data), trial.rates, strict=True)):
        torch.manual_seed(step_seed(trial.seed, number, 0))
        losses.append(float(sum(step([batch], lr).losses)))
    with torch.no_grad():
        batch = make_batch(records(HELD_OUT, seed=2), np.arange(HELD_OUT), LENGTH)
        found = model.eval().logits(batch).mlm.argmax(dim=1) == batch.masked_labels
    return Trained(np.array(losses).reshape(-1, WINDOW).mean(axis=1), float(found.double().mean()))


def hugging_faces(trial: Trial) -> Trained:
    """The training by bench/plain_bert.py."""
    import plain_bert

    weights = {name: p.detach().clone() for name, p in trial.model().named_parameters()}
    model = plain_bert.model(huggingface.config_values(trial.shape, "BertForPreTraining"), weights).to(trial.dtype)
    torch.manual_seed(trial.seed)
    data, lamb = trial.data, optim.Config().lamb
    plain = plain_bert.Lamb(model.named_parameters(), (lamb.beta1, lamb.beta2), lamb.weight_decay)
    chosen = np.arange(2 * ROWS * trial.steps).reshape(trial.steps, -1)
    padded = (plain_bert.padded(data, sequences) for sequences in chosen)
    losses = list(plain_bert.train(model, padded, trial.rates, plain))
    accuracy = plain_bert.accuracy(model, plain_bert.padded(records(HELD_OUT, seed=2), np.arange(HELD_OUT)))
    return Trained(np.array(losses).reshape(-1, WINDOW).mean(axis=1), accuracy)


def agreement(mine: Trained, theirs: Trained) -> dict[str, Any]:
    """Mean losses of each window of ours and theirs, the largest relative gap, and both accuracies."""
    return {
        "ours": [round(float(loss), 5) for loss in mine.windows],
        "huggingface": [round(float(loss), 5) for loss in theirs.windows],
        "largest_relative_gap": largest_gap(mine, theirs),
        "accuracy": mine.accuracy,
        "huggingface_accuracy": theirs.accuracy,
    }


def largest_gap(one: Trained, other: Trained) -> float:
    """The largest difference of a window, as a part of it."""
    return float(np.abs(one.windows / other.windows - 1).max())


def with_dropout(trial: Trial, seeds: int) -> dict[str, Any]:
    """Both implementations from as many seeds, and whether their curves overlap."""
    trials = [dataclasses.replace(trial, dropout=0.1, seed=seed) for seed in range(seeds)]
    mine, theirs = [ours(each) for each in trials], [hugging_faces(each) for each in trials]
    return overlap(mine, theirs) | {
        "ours": [[round(float(loss), 4) for loss in run.windows] for run in mine],
        "huggingface": [[round(float(loss), 4) for loss in run.windows] for run in theirs],
        "accuracy": [run.accuracy for run in mine],
        "huggingface_accuracy": [run.accuracy for run in theirs],
    }


def overlap(mine: Sequence[Trained], theirs: Sequence[Trained]) -> dict[str, Any]:
    """Difference of the means of each window, the spread of one side's seeds, and whether none is larger than that."""
    sides = [np.array([run.windows for run in runs]) for runs in (mine, theirs)]
    apart = np.abs(sides[0].mean(axis=0) - sides[1].mean(axis=0))
    spread = np.maximum(*(np.ptp(side, axis=0) for side in sides))
    return {
        "difference_of_means": [round(float(value), 4) for value in apart],
        "spread_of_seeds": [round(float(value), 4) for value in spread],
        "overlap": bool((apart <= spread).all()),
    }


def main() -> None:
    """Trains and prints."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--steps", type=integer, help="steps of each run, a multiple of 25 (default 300; 500 with --against)"
    )
    parser.add_argument("--against", choices=("huggingface",), help="the implementation to compare with")
    parser.add_argument(
        "--dropout", type=natural, default=0, metavar="SEEDS", help="with --against: dropout, so many seeds"
    )
    parser.add_argument("--precision", choices=("fp64", "fp32"), default="fp64", help="with --against (default fp64)")
    parser.add_argument("--peak-lr", type=positive, default=PEAK_LR / 4, help="with --against (default %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="pairs whose name has this in it, such as fp8")
    options = parser.parse_args()
    if (options.steps or 0) % 25:
        parser.error(f"--steps {options.steps}: expected a multiple of 25")
    known = pairs(torch.cuda.is_available())
    if not any(options.only in name for name in known):
        parser.error(f"--only {options.only}: no such pair here: {', '.join(known)}")
    steps = options.steps or (500 if options.against else 300)
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[options.precision]
    trial = Trial(steps=steps, dtype=dtype, peak_lr=options.peak_lr)
    if not options.against:
        found = compare(steps, options.only)
    elif options.dropout:
        found = with_dropout(trial, options.dropout)
    else:
        mine, nearby = ours(trial), ours(dataclasses.replace(trial, away=1e-7))
        found = agreement(mine, hugging_faces(trial)) | {"gap_of_ours_from_nearby_weights": largest_gap(nearby, mine)}
    how = {name: str(value) for name, value in vars(options).items() if name != "steps"} | {"steps": steps}
    emit({"benchmark": "convergence"} | how | found | {"machine": machine()})


if __name__ == "__main__":
    main()
