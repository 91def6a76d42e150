"""Memory and time of a training step by RECOMPUTE_LAYERS, and the estimate of ``--check`` beside what was measured.

A model of the width of BERT-1.5B with few layers takes real steps on this machine's CPU. Memory, with --repeats 0: of
tensors, counted operation by operation, in the passes beside what stays, and in the whole step. Time, with --repeats 1
or more: CPU seconds of forward and backward pass, the variants in turns. Prints one JSON line; the ratios are the
figures, the times depend on the machine.

usage: python bench/recompute.py [--layers 4] [--rows 16] [--length 128] [--repeats 0] [--tiny]
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from lib import Parser, emit, in_turns, integer, natural

from bert import kernels, optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch
from bert.kernels.precision import Precision
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import first_weights, uninitialized, use_placeholders
from bert.model.recompute import Recomputation
from bert.optim.sharded import Sharded
from bert.pretraining import memory
from bert.training.step import Step, build_step

CPU, DTYPE = torch.device("cpu"), torch.float32
OPTIMIZER = optim.Config(optimizer="lans", sharded=True)


def full_batch(rows: int, length: int, vocab_size: int) -> PretrainingBatch:
    """Rows of one sequence each, without padding; 15% of the tokens are masked."""
    generator, tokens = torch.Generator().manual_seed(0), rows * length
    masked = torch.randperm(tokens, generator=generator)[: int(0.15 * tokens)].sort().values
    return PretrainingBatch(
        input_ids=torch.randint(vocab_size, (tokens,), generator=generator, dtype=torch.int32),
        segment_ids=torch.zeros(tokens, dtype=torch.int32),
        position_ids=torch.arange(length, dtype=torch.int32).repeat(rows),
        cu_seqlens=torch.arange(0, tokens + 1, length, dtype=torch.int32), max_seqlen=length,
        num_tokens=tokens, num_sequences=rows, num_masked=len(masked), masked_positions=masked.int(),
        masked_labels=torch.randint(vocab_size, (len(masked),), generator=generator),
        next_sentence_labels=torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip


def make_step(shape: BertConfig) -> Step:
    with uninitialized():
        model = BertForPreTraining(shape, kernels.select(kernels.Config(fused="none"), CPU))
    use_placeholders(model, DTYPE, CPU)
    return build_step(
        model, Precision(dtype=DTYPE), OPTIMIZER, World(DistConfig(device="cpu")),
        accumulate=False, fused_update=False, first_weights=first_weights(model, 0),
    )  # fmt: skip


def recompute(step: Step, layers: int) -> None:
    """RECOMPUTE_LAYERS=layers from now on."""
    assert isinstance(step.model, BertForPreTraining)
    step.model.bert.encoder.recomputation = Recomputation(layers, random_state=True) if layers else None


def passes(step: Step, batch: PretrainingBatch) -> None:
    """Forward and backward pass, without an update."""
    with step.gradients.micro_batch(True, True, step.scaler.scale):
        sum(step.gradients.forward(batch)).backward()
    step.gradients.finish(step.scaler.scale)


def memory_of(shape: BertConfig, variants: list[int], batch: PretrainingBatch) -> dict[str, Any]:
    """Megabytes of tensors in the passes beside what stays and in the whole step, and the estimate's ratio to it."""
    step = make_step(shape)
    assert isinstance(step.optimizer, Sharded)
    figures: dict[str, Any] = {}
    for k in variants:
        recompute(step, k)
        stays = [*step.optimizer.state_tensors(), *memory.gradient_buffers(step.optimizer)]
        with memory.Peak(stays) as peak:
            at_rest = peak.now
            passes(step, batch)
            needed = peak.most - at_rest
        with memory.Peak(stays) as peak:
            step([batch], 1e-3)
        plan = memory.Plan(
            model=shape, optimizer=OPTIMIZER, dtype=DTYPE, fused=False, num_ranks=1, tokens=batch.num_tokens,
            masked=batch.num_masked, length=batch.max_seqlen, accumulate=False, recompute_layers=k, device_type="cpu",
        )  # fmt: skip
        figures[f"recompute_{k}"] = {
            "passes_mb": round(needed / 1e6, 1), "step_mb": round(peak.most / 1e6, 1),
            "step_estimate": round(sum(memory.estimate(plan).values()) / peak.most, 3),
        }  # fmt: skip
        figures[f"recompute_{k}"]["passes_ratio"] = round(needed / 1e6 / figures["recompute_0"]["passes_mb"], 3)
    return figures


def times(shape: BertConfig, variants: list[int], batch: PretrainingBatch, repeats: int) -> dict[str, Any]:
    """CPU seconds of forward and backward pass by variant as a ratio to none, in turns: median, least and most."""
    step = make_step(shape)

    def run(k: int) -> None:
        recompute(step, k)
        passes(step, batch)

    seconds = in_turns({f"recompute_{k}": partial(run, k) for k in variants}, repeats + 1)  # the first one warms up
    found = {}
    for name, spans in seconds.items():
        ratios = [a / b for a, b in zip(spans[1:], seconds["recompute_0"][1:], strict=True)]
        found[name] = {
            "seconds": round(statistics.median(spans[1:]), 2),
            "time_ratio": [round(f(ratios), 3) for f in (statistics.median, min, max)],
        }
    return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=integer, default=4)
    parser.add_argument("--rows", type=integer, default=16)
    parser.add_argument("--length", type=integer, default=128)
    parser.add_argument("--repeats", type=natural, default=0, help="turns of the times; 0: memory")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    if options.length > BertConfig.max_position_embeddings:
        parser.error(f"--length {options.length}: expected {BertConfig.max_position_embeddings} at most")
    width, heads, inner, vocab_size = (32, 2, 64, 211) if options.tiny else (1600, 25, 6400, 30522)
    shape = BertConfig(
        vocab_size=vocab_size, hidden_size=width, num_hidden_layers=options.layers, num_attention_heads=heads,
        intermediate_size=inner, layer_norm_large_model=True,
    )  # fmt: skip
    batch = full_batch(options.rows, options.length, vocab_size)
    variants = [0, *(k for k in (1, 2, 4) if k <= options.layers)]
    figures: dict[str, Any] = {"model": f"{options.layers} layers x {width}", "tokens": batch.num_tokens}
    measured = (
        memory_of(shape, variants, batch) if options.repeats == 0 else times(shape, variants, batch, options.repeats)
    )
    emit("recompute", figures | measured, data="random tokens, whole rows")


if __name__ == "__main__":
    main()
