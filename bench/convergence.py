"""Do the fast paths train like the plain ones? Compares loss curves of a small BERT over 300 steps, window by window.

The words of a sequence come from one topic of three words: a model that attends learns to narrow masked words down to
three, and from the topic's number whether B follows A, which takes the loss from 4.9 to 1.1. Every variant starts from
the same weights and sees the same batches. Prints one JSON line: mean loss in each window of 25 steps for every
variant, and the largest gap of each pair.

--against huggingface compares the trainer with an independent implementation instead, Hugging Face's BERT with a LAMB
of a few lines: same initial weights, same batches, no dropout; losses of every window, and accuracy on held-out
sequences. For comparison, it also prints the gap of ours to itself from initial weights that differ by one part in
10^7: rounding errors grow in training, faster at a high learning rate, so no two programs can be closer than that.

--dropout SEEDS compares them with dropout, where no step can be identical: SEEDS runs of each side, with different
initial weights and masks. The curves overlap if in every window the means of the two sides differ by no more than the
range of one side's losses over its seeds.

--text FOLDER compares them on your own text: the weights that `make pretrain-demo` leaves in FOLDER, trained further on
its text, masked-LM only, with AdamW and dropout. Both sides see the same batches from the trainer's loader. The losses
are on held-out text, before the first step and after every 25.

--evaluation compares evaluations in fp8 and bf16: the model trains in fp8, and every 25 steps is evaluated on held-out
sequences in fp8, bf16 and, with the same weights, fp32. Prints accuracy and masked-LM loss of every evaluation, and the
largest differences of fp8 from bf16 and of bf16 from fp32; those of accuracy also in standard errors: a word that only
one of two precisions predicts correctly is as likely gained as lost by chance, so the standard error of d such words is
sqrt(d).

usage: python bench/convergence.py [--steps 300] [--only fp8] [--seed 0]
       python bench/convergence.py --against huggingface [--steps 500] [--precision fp32] [--peak-lr 0.02] [--dropout 3]
       python bench/convergence.py --against huggingface --text demo [--steps 50] [--dropout 3]
       python bench/convergence.py --evaluation [--steps 300] [--sequences 4000] [--seed 0]
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from lib import Parser, emit, integer, natural, positive
from torch import Tensor, nn
from torch_lib import device, new_model, new_step
from train_step import inputs_of

from bert import kernels, optim
from bert.checkpoint import huggingface
from bert.checkpoint.weights import load_weights
from bert.data import loader
from bert.data.batch import PretrainingBatch, PretrainingCapacity, make_batch
from bert.data.records import Records, concatenate
from bert.data.sampler import Sampler
from bert.data.shards import Shards, list_shards
from bert.kernels import fp8
from bert.kernels.fp8 import linear as fp8_linear
from bert.kernels.operations import fp8_feed_forward
from bert.kernels.operations.cross_entropy import IGNORE
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.training.graph import GraphedStep, graph_capacity, static_batch
from bert.training.loop import step_seed

WINDOW = 25
# Of another seed than the training data.
HELD_OUT = 500  # sequences
VOCABULARY, LENGTH, ROWS = 64, 64, 8
MASK = 1  # id of the masked word
NUM_TOPICS, TOPIC_WORDS = 20, 3
PEAK_LR = 0.02
EVALUATED = ("fp8 against bf16", "bf16 against fp32")
MODEL = BertConfig(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
    initializer_range=0.05, max_position_embeddings=LENGTH,
)  # fmt: skip


FP32, BF16, FP8 = (PrecisionConfig(precision=name) for name in ("fp32", "bf16", "fp8"))


@dataclass(frozen=True, kw_only=True)
class Variant:
    precision: PrecisionConfig = FP32
    fused: str = "none"
    graph: bool = False
    hidden_act: str = "gelu"


@contextmanager
def emulated_fast_sums() -> Iterator[None]:
    """Within this context, fp8 products with fast accumulation use it on a CPU too.

    Hopper's tensor cores keep about 14 bits of a sum of fp8 products (DeepSeek-AI 2024, arXiv 2412.19437, section
    3.3.2); an instruction adds 32 products. Exact accumulation promotes to fp32 registers at short intervals, fast
    accumulation never does. Here sums are truncated to 14 bits after every 32 products; rounding within an instruction
    is not emulated.
    """

    def product(
        a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not fast or a.is_cuda:
            return fp8.product(a, b, a_inverse, b_inverse, bias, dtype, fast, out)
        total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
        for rows, columns in zip(
            a.float().split(32, dim=1), b.float().split(32, dim=0), strict=True
        ):
            # fp32 has 24 significant bits: the lowest 10 are cleared, 14 stay.
            total = (total.addmm(rows, columns).view(torch.int32) & -(1 << (24 - 14))).view(
                torch.float32
            )
        y = total * (a_inverse * b_inverse)
        y = (y if bias is None else y + bias).to(dtype)
        return y if out is None else out.copy_(y)

    with (
        # Both modules have imported the name, so each is patched.
        mock.patch.object(fp8_feed_forward, "product", product),
        mock.patch.object(fp8_linear, "product", product),
    ):
        yield


def pairs(on_gpu: bool) -> dict[str, tuple[Variant, Variant, float]]:
    """name -> (fast, plain, largest allowed gap between their windows, in nats; the loss starts at 5.3)."""
    fp32, bf16, fp8 = (Variant(precision=precision) for precision in (FP32, BF16, FP8))
    found = {
        "bf16 against fp32": (bf16, fp32, 0.1),
        "fp8 against bf16": (fp8, bf16, 0.15),
        "GELU by tanh against erf": (fp32, dataclasses.replace(fp32, hidden_act="gelu_erf"), 0.1),
    }
    if on_gpu:
        # Kernels and graphs need a GPU; the other pairs also run on a CPU.
        fused, graphed = (
            dataclasses.replace(bf16, fused="auto", graph=graph) for graph in (False, True)
        )
        found["fused against reference"] = (fused, bf16, 0.1)
        found["graph against eager"] = (graphed, fused, 0.1)
        found["fp8 in kernels and graph against bf16"] = (
            dataclasses.replace(graphed, precision=FP8),
            fused,
            0.15,
        )
    return found


def records(num_sequences: int, seed: int) -> Records:
    """Sequences of 8 to 32 words of a topic, two per row, 15% masked; the next-sentence label is the topic's parity."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(8, LENGTH // 2 + 1, num_sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    words = np.empty(starts[-1], dtype=np.int16)
    positions, labels, counts = [], [], []
    topics = generator.integers(0, NUM_TOPICS, num_sequences)
    for number, (begin, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        # Ids 0 and 1 are padding and the masked word.
        own = 2 + TOPIC_WORDS * topics[number] + generator.integers(0, TOPIC_WORDS, length)
        masked = np.sort(
            # The first token is spared: the next-sentence head reads it, as it does [CLS].
            generator.choice(np.arange(1, length), max(1, round(0.15 * length)), replace=False)
        )
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
    """One batch of ROWS rows per step, padded to a fixed size."""
    # Short sequences round 15% up to 20% of masked words.
    tokens, sequences = ROWS * LENGTH, 3 * ROWS
    room = graph_capacity(
        PretrainingCapacity(tokens=tokens, sequences=sequences, masked=int(0.2 * tokens)), ROWS
    )
    chosen = np.arange(2 * ROWS * steps).reshape(steps, -1)
    return [static_batch(make_batch(data, sequences, LENGTH), room) for sequences in chosen]


def rates_of(steps: int, peak: float = PEAK_LR) -> list[float]:
    """Learning rate of each step: 20 steps of warm-up and a linear decay."""
    return [peak * min(1.0, (number + 1) / 20) * (1 - number / steps) for number in range(steps)]


def train(
    step: Any, data: list[PretrainingBatch], rates: list[float], seeds: Iterable[int]
) -> Iterator[Tensor]:
    """Yields the loss of each step."""
    # seeds may be endless.
    for batch, lr, seed in zip(data, rates, seeds, strict=False):
        torch.manual_seed(seed)
        # Stays on the device: the host would wait in every step.
        yield sum(step([batch], lr).losses).detach()


def windows(losses: Iterable[Tensor]) -> np.ndarray:
    """Mean loss of each window of WINDOW steps."""
    return torch.stack(list(losses)).double().cpu().numpy().reshape(-1, WINDOW).mean(axis=1)


def curve(variant: Variant, data: list[PretrainingBatch], seed: int = 0) -> np.ndarray:
    on_gpu = device().type == "cuda"
    # The fast backends need 16 bits.
    attention = "auto" if on_gpu and variant.precision != FP32 else "sdpa_loop"
    choice = kernels.Config(fused=variant.fused, attention=attention)
    model = new_model(dataclasses.replace(MODEL, hidden_act=variant.hidden_act), choice, seed).to(
        device()
    )
    step: Any = new_step(
        model, variant.precision, fused_update="lamb" in choice.names(device()), sharded=True
    )
    if on_gpu:
        data = [batch.pin_memory() for batch in data]
    if variant.graph:
        step = GraphedStep(step, data[:1])
    return windows(train(step, data, rates_of(len(data)), itertools.count()))


def compare(steps: int, only: str = "", seed: int = 0) -> dict[str, Any]:
    """Curves and verdict by pair, for pairs whose name contains ``only``."""
    data = batches(steps, records(2 * ROWS * steps, seed=1))
    wanted = {name: pair for name, pair in pairs(torch.cuda.is_available()).items() if only in name}
    with emulated_fast_sums():
        # Each variant trains once, though several pairs have it.
        variants = dict.fromkeys(
            variant for fast, plain, _ in wanted.values() for variant in (fast, plain)
        )
        curves = {variant: curve(variant, data, seed) for variant in variants}
    found: dict[str, Any] = {}
    for name, (fast, plain, allowed) in wanted.items():
        gap = float(np.abs(curves[fast] - curves[plain]).max())
        found[name] = {"largest_gap": round(gap, 4), "allowed": allowed, "overlay": gap <= allowed}
        found[name] |= {
            "fast": curves[fast].round(4).tolist(),
            "plain": curves[plain].round(4).tolist(),
        }
    return {"pairs": found}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training run on the CPU that both implementations support.

    dtype: of all tensors; seed: of initial weights and dropout; away: relative offset of the initial weights.
    """

    steps: int
    # In fp64 rounding is so small that a gap shows other mathematics.
    dtype: torch.dtype = torch.float64
    peak_lr: float = PEAK_LR / 4
    dropout: float = 0.0
    seed: int = 0
    away: float = 0.0

    @property
    def data(self) -> Records:
        return records(2 * ROWS * self.steps, seed=1)  # two sequences per row

    def model(self) -> BertForPreTraining:
        dropout = dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout
        )
        made = new_model(dataclasses.replace(MODEL, **dropout), seed=self.seed).to(self.dtype)
        with torch.no_grad():
            for parameter in made.parameters():
                # A neighbour whose distance grows with training as rounding errors do.
                parameter.mul_(1 + self.away)
        return made


class Trained(NamedTuple):
    """Mean loss of each window of WINDOW steps, and accuracy on held-out masked words."""

    windows: np.ndarray
    accuracy: float


def ours(trial: Trial) -> Trained:
    """The run with this repository."""
    model = trial.model()
    seeds = (step_seed(trial.seed, number, 0) for number in range(trial.steps))
    step, data = new_step(model, FP32, sharded=False), batches(trial.steps, trial.data)
    losses = windows(train(step, data, rates_of(trial.steps, trial.peak_lr), seeds))
    with torch.no_grad():
        batch = make_batch(records(HELD_OUT, seed=2), np.arange(HELD_OUT), LENGTH)
        right = model.eval().logits(batch).mlm.argmax(dim=1) == batch.masked_labels
    return Trained(losses, float(right.double().mean()))


class PlainLamb:
    """Algorithm 2 of You et al. 2020 (arXiv 1904.00962), with gradients clipped to norm 1.

    No decay and no trust ratio for biases and LayerNorms, as in the benchmark's submissions.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], betas: tuple[float, float], decay: float
    ) -> None:
        self.parameters = [
            (p, not (name.endswith("bias") or "LayerNorm" in name)) for name, p in named
        ]
        self.betas, self.decay, self.steps = betas, decay, 0
        self.m = [torch.zeros_like(p) for p, _ in self.parameters]
        self.v = [torch.zeros_like(p) for p, _ in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.steps += 1
        gradients = [
            p.grad if p.grad is not None else torch.zeros_like(p) for p, _ in self.parameters
        ]
        norm = float(torch.sqrt(sum((g**2).sum() for g in gradients)))
        beta1, beta2 = self.betas
        for (p, adapted), g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            # All gradients by one norm, before the moments, as CLIP=after.
            g = g / max(norm, 1.0)
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g**2)
            update = (m / (1 - beta1**self.steps)) / (
                torch.sqrt(v / (1 - beta2**self.steps)) + 1e-6
            )
            ratio = 1.0
            if adapted:
                update = update + self.decay * p
                weight_norm, update_norm = float(p.norm()), float(update.norm())
                # A tensor of zeros has no direction, and moves at the plain rate.
                ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
            p.sub_(lr * ratio * update)


def padded(batch: PretrainingBatch) -> dict[str, Tensor]:
    """Arguments of BertForPreTraining for a batch, each sequence padded to the longest (S, L)."""
    return inputs_of(
        batch, int(batch.cu_seqlens.diff().max()), packed=False, device=torch.device("cpu")
    )


def peer_of(model: BertForPreTraining, architecture: str) -> Any:
    """A model of this Hugging Face class with the same weights, including initialized heads."""
    import transformers

    with tempfile.TemporaryDirectory() as name:
        folder, values = Path(name), huggingface.config_values(model.config, architecture)
        (folder / "vocab.txt").touch()
        weights = dict(model.named_parameters())
        huggingface.write(
            folder, weights, model.config, values, folder / "vocab.txt", lower_case=True
        )
        # eager: attention is written out in their code, so it shares no function with ours.
        return getattr(transformers, architecture).from_pretrained(
            folder, attn_implementation="eager"
        )


def hugging_faces(trial: Trial) -> Trained:
    """The run with independent code; only records, rates and initial weights come from this repository."""
    model = peer_of(trial.model(), "BertForPreTraining").to(trial.dtype).train()
    torch.manual_seed(trial.seed)
    data, rates, settings = trial.data, rates_of(trial.steps, trial.peak_lr), optim.Config().lamb
    # The names of the parameters decide which are decayed.
    lamb = PlainLamb(
        model.named_parameters(), (settings.beta1, settings.beta2), settings.weight_decay
    )
    losses = []
    for sequences, lr in zip(
        np.arange(2 * ROWS * trial.steps).reshape(trial.steps, -1), rates, strict=True
    ):
        loss = model(**padded(make_batch(data, sequences, LENGTH))).loss
        model.zero_grad()
        loss.backward()
        lamb.step(lr)
        losses.append(loss.detach())
    with torch.no_grad():
        batch = padded(make_batch(records(HELD_OUT, seed=2), np.arange(HELD_OUT), LENGTH))
        guesses = model.eval()(**batch).prediction_logits.argmax(dim=-1)
    return Trained(
        windows(losses),
        float((guesses == batch["labels"])[batch["labels"] != IGNORE].double().mean()),
    )


def continued(folder: Path, steps: int, peak_lr: float, seed: int) -> tuple[Trained, Trained]:
    """Ours and theirs; ``windows`` holds held-out losses, before the first step and after every WINDOW steps."""
    text, weights = folder / "pretraining", folder / "finetune" / "weights"
    shape = dataclasses.replace(BertConfig.from_json(weights / "config.json"), next_sentence=False)
    config = loader.Config(
        packed=True,
        datadir_packed=text / "packed_data",
        batch_size=2 * ROWS,
        max_seq_length=128,
        masking="dynamic",
    )
    source = loader.open_source(config, shape.vocab_size)
    masks = loader.open_masks(config, source, text / "phase1", shape.vocab_size, seed)
    sampler = Sampler(source.row_counts(), config.rows_per_step, seed, rank=0, world_size=1)
    data = loader.TrainingData(
        source, sampler, config, shape.vocab_size, 1, lambda batch: batch, masks
    )
    shards = Shards(list_shards(text / "eval", "--text"), config.max_seq_length)
    held = concatenate([shards[number] for number in range(len(shards))])
    held_out = make_batch(held, np.arange(held.num_sequences), config.max_seq_length)

    model = new_model(shape, seed=seed)
    load_weights(model, weights / "model.safetensors", new_heads=True)
    peer = peer_of(model, "BertForMaskedLM")
    adam = optim.Config(optimizer="adamw").adam
    step: Any = new_step(model, FP32, sharded=False, optimizer="adamw")
    decayed, others = [], []
    for name, p in peer.named_parameters():
        # As ours: biases and LayerNorms are not decayed.
        (others if name.endswith("bias") or "LayerNorm" in name else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": adam.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, betas=(adam.beta1, adam.beta2), eps=adam.eps)

    def theirs(batch: PretrainingBatch) -> Any:
        return peer(
            **{
                name: values
                for name, values in padded(batch).items()
                if name != "next_sentence_label"
            }
        )

    points: list[tuple[float, float, float, float]] = []  # loss and accuracy of ours, then theirs
    # One place more than steps, to evaluate after the last one.
    for number, lr in enumerate([*rates_of(steps, peak_lr), 0.0]):
        if number % WINDOW == 0:
            model.eval(), peer.eval()
            right, loss = evaluated(model, [held_out])
            with torch.no_grad():
                scored, labels = theirs(held_out), padded(held_out)["labels"]
            known = (scored.logits.argmax(dim=-1) == labels)[labels != IGNORE]
            points.append(
                (
                    loss,
                    float(right.double().mean()),
                    float(scored.loss),
                    float(known.double().mean()),
                )
            )
            model.train(), peer.train()
        if number < steps:
            (batch,) = data.batches(number + 1)
            torch.manual_seed(step_seed(seed, number + 1, 0))
            # Both sides see this batch; only their masks of dropout differ.
            step([batch], lr)
            plain.zero_grad()
            theirs(batch).loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), optim.Config().max_grad_norm)
            for group in plain.param_groups:
                group["lr"] = lr
            plain.step()
    data.close()
    losses = np.array(points)
    return Trained(losses[:, 0], losses[-1, 1]), Trained(losses[:, 2], losses[-1, 3])


def agreement(mine: Trained, theirs: Trained) -> dict[str, Any]:
    """Mean loss of each window on both sides, the largest relative difference, and both accuracies."""
    return {
        "ours": mine.windows.round(5).tolist(),
        "huggingface": theirs.windows.round(5).tolist(),
        "largest_relative_gap": float(np.abs(mine.windows / theirs.windows - 1).max()),
        "accuracy": mine.accuracy,
        "huggingface_accuracy": theirs.accuracy,
    }


def with_dropout(trial: Trial, seeds: int) -> dict[str, Any]:
    """Both implementations with several seeds, and whether their curves overlap."""
    trials = [dataclasses.replace(trial, dropout=0.1, seed=seed) for seed in range(seeds)]
    return overlap([ours(each) for each in trials], [hugging_faces(each) for each in trials])


def overlap(mine: list[Trained], theirs: list[Trained]) -> dict[str, Any]:
    """For several seeds of each side: losses by window, difference of the means, the larger range of both sides, and
    whether the difference is within that range in every window.
    """
    sides = [np.array([run.windows for run in runs]) for runs in (mine, theirs)]
    apart = np.abs(sides[0].mean(axis=0) - sides[1].mean(axis=0))
    # The larger range of the two: seeds of one side differ that much by themselves.
    spread = np.maximum(*(np.ptp(side, axis=0) for side in sides))
    figures: dict[str, Any] = {
        "difference_of_means": apart.round(4).tolist(),
        "spread_of_seeds": spread.round(4).tolist(),
        "overlap": bool((apart <= spread).all()),
    }
    for name, side, runs in zip(("ours", "huggingface"), sides, (mine, theirs), strict=True):
        figures |= {
            name: side.round(4).tolist(),
            f"accuracy_{name}": [run.accuracy for run in runs],
        }
    return figures


@torch.no_grad()
def evaluated(model: BertForPreTraining, held_out: list[PretrainingBatch]) -> tuple[Tensor, float]:
    """Which masked words are correct (bool), and the mean loss, in the model's current mode."""
    right, losses = [], []
    for batch in held_out:
        scored = model.scored(batch)
        real = batch.masked_labels != IGNORE
        right.append((scored.mlm.argmax(dim=1) == batch.masked_labels)[real])
        losses.append(scored.mlm_losses[real])
    return torch.cat(right), float(torch.cat(losses).double().mean())


def evaluations(steps: int, sequences: int, seed: int = 0) -> dict[str, Any]:
    """Accuracy and loss of the same weights in each precision, and differences, after every WINDOW steps."""
    held = records(sequences, seed=2)
    # In parts of at most 500, to bound the memory of the logits.
    order = np.array_split(np.arange(sequences), -(-sequences // 500))
    held_out = [make_batch(held, chosen, LENGTH).to(device()) for chosen in order]
    model = new_model(MODEL, seed=seed).to(device())
    step, data = (
        new_step(model, FP8, sharded=True),
        batches(steps, records(2 * ROWS * steps, seed=3 + seed)),
    )
    points: list[dict[str, Any]] = []
    with emulated_fast_sums():
        for number, _ in enumerate(train(step, data, rates_of(steps), itertools.count(1)), start=1):
            if number % WINDOW and number > 1:
                continue
            with model.evaluating():
                assert model.evaluates_in_fp8
                found = {"fp8": evaluated(model, held_out)}
            model.eval()
            found["bf16"] = evaluated(model, held_out)
            # A copy, as the model itself goes on training.
            found["fp32"] = evaluated(copy.deepcopy(model).float(), held_out)
            model.train()
            point = {
                "step": number,
                "loss": {name: round(loss, 5) for name, (_, loss) in found.items()},
            }
            point["accuracy"] = {
                name: round(float(right.double().mean()), 5) for name, (right, _) in found.items()
            }
            for pair in EVALUATED:
                (a, a_loss), (b, b_loss) = (found[name] for name in pair.split(" against "))
                # Words that both or neither predict say nothing about the difference.
                gained, lost = (a & ~b).sum().item(), (b & ~a).sum().item()
                point[pair] = {
                    "accuracy": round((gained - lost) / len(a), 6),
                    "standard_errors": round((gained - lost) / math.sqrt(max(gained + lost, 1)), 2),
                    "relative_loss": round(a_loss / b_loss - 1, 6),
                }
            points.append(point)
    largest = {
        pair: {name: max((p[pair][name] for p in points), key=abs) for name in points[0][pair]}
        for pair in EVALUATED
    }
    return {"words": int(held.masked_lm_offsets[-1]), "points": points, "largest": largest}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--steps", type=integer, help="of each run, in 25s (default 300; 500 with --against)"
    )
    parser.add_argument(
        "--against", choices=("huggingface",), help="implementation to compare with"
    )
    parser.add_argument(
        "--dropout", type=natural, default=0, metavar="SEEDS", help="with --against: use dropout"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="with --against: train on the demo's text"
    )
    parser.add_argument(
        "--precision",
        choices=("fp64", "fp32"),
        default="fp64",
        help="with --against (default fp64)",
    )
    parser.add_argument(
        "--peak-lr", type=positive, help="with --against (default 0.005; 5e-4 with --text)"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only pairs whose name contains this, such as fp8",
    )
    parser.add_argument(
        "--evaluation",
        action="store_true",
        help="compare evaluations in fp8, bf16 and fp32 instead",
    )
    parser.add_argument(
        "--sequences", type=integer, default=4000, help="with --evaluation: held out (default 4000)"
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        help="of weights; with --evaluation of data too (default 0)",
    )
    options = parser.parse_args()
    # A window is 25 steps, and losses are reshaped to whole windows.
    if (options.steps or 0) % 25:
        parser.error(f"--steps {options.steps}: expected a multiple of 25")
    if options.text and not (options.against and (options.text / "finetune" / "weights").is_dir()):
        parser.error(
            f"--text {options.text}: expected the folder of make pretrain-demo, with --against"
        )
    known = pairs(torch.cuda.is_available())
    if not any(options.only in name for name in known):
        parser.error(f"--only {options.only}: no such pair here: {', '.join(known)}")
    steps = options.steps or (50 if options.text else 500 if options.against else 300)
    peak_lr = options.peak_lr or (5e-4 if options.text else PEAK_LR / 4)
    trial = Trial(
        steps=steps,
        dtype=torch.float64 if options.precision == "fp64" else torch.float32,
        peak_lr=peak_lr,
    )
    if options.evaluation:
        found = evaluations(steps, options.sequences, options.seed)
    elif options.text:
        runs = [
            continued(options.text, steps, peak_lr, seed) for seed in range(options.dropout or 3)
        ]
        found = overlap([mine for mine, _ in runs], [others for _, others in runs])
    elif not options.against:
        found = compare(steps, options.only, options.seed)
    elif options.dropout:
        found = with_dropout(trial, options.dropout)
    else:
        mine, nearby = ours(trial), ours(dataclasses.replace(trial, away=1e-7))
        gap = agreement(nearby, mine)["largest_relative_gap"]
        found = agreement(mine, hugging_faces(trial)) | {"gap_of_ours_from_nearby_weights": gap}
    how = {name: str(value) for name, value in vars(options).items() if name != "steps"} | {
        "steps": steps
    }
    emit("convergence", how | found)


if __name__ == "__main__":
    main()
