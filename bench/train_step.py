"""Training steps of BERT-large on one GPU: this trainer in its variants, and Hugging Face's, on the same sequences.

Packed rows of 512 tokens with Wikipedia's mix of lengths (synthetic), dropout 0.1, forward, backward and update.
Two variants at a time take turns, so that they share the chip's temperature and clocks, and are let go of before the
next two: a GPU of 80 GB holds them. Prints a JSON line once a variant has taken its first steps and after each two; a
group's last one has all of its figures.

usage: python bench/train_step.py [--groups main peers ...] [--rounds 5] [--steps 4] [--deadline 300]
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from command_line import Parser, integer, positive
from common import (
    TINY,
    device,
    emit,
    gpu_state,
    machine,
    matmul_ceiling,
    milliseconds,
    model_flops,
    packed_batches,
    synchronize,
)
from errors import explain

from bert import kernels, optim
from bert.core.dist import Config as DistConfig
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, PretrainingCapacity
from bert.kernels import attention
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.training.graph import GraphedStep, graph_capacity, static_batch
from bert.training.step import build_step

NUM_BATCHES = 4
OnBatch = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the result."""

    name: str
    rows: int = 24
    precision: str = "bf16"
    fused: str = "auto"
    attention: str = "auto"
    graph: bool = True
    fp8: dict[str, Any] = field(default_factory=dict)  # settings of precision.py
    peer: dict[str, bool] | None = None  # Hugging Face's: packed, compiled


@dataclass
class Figures:
    """What was measured of a variant."""

    times: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    build_seconds: float = 0.0
    problem: str = ""


def groups(on_gpu: bool) -> dict[str, list[Variant]]:
    """The variants that take turns, by group. On a CPU: those that run there."""
    default = Variant(name="ours")
    eager = Variant(name="ours, eager", graph=False)
    unfused = Variant(name="ours, FUSED=none", fused="none")
    hugging_face = {
        f"Hugging Face {kind}, {mode}": {"packed": kind == "packed", "compiled": mode == "compiled"}
        for mode in ("eager", "compiled")
        for kind in ("padded", "packed")
    }
    peers = [Variant(name=name, peer=peer) for name, peer in hugging_face.items()]
    separate_casts = Variant(name="ours, fp8, separate casts", precision="fp8", fused=without("fp8_cast"))
    backends = attention.candidates(device())
    found = {
        "main": [default, Variant(name="ours, fp8", precision="fp8"), eager, unfused],
        "peers": [default, *[variant for variant in peers if "eager" in variant.name]],
        "rows 48": [Variant(name="ours", rows=48), Variant(name="ours, fp8", rows=48, precision="fp8")],
        "rows 96": [Variant(name="ours", rows=96), Variant(name="ours, fp8", rows=96, precision="fp8")],
        "rows 48 plain": [
            Variant(name="ours, Triton's attention", rows=48, attention="triton"),
            Variant(name="ours, FUSED=none, flash", rows=48, fused="none", attention="flash"),
        ],
        "attention": [default, *[Variant(name=f"ours, {name} attention", attention=name) for name in backends]],
        "kernels": [
            default,
            *[Variant(name=f"ours, without fused {n}", fused=without(n)) for n in kernels.FUSABLE if n != "fp8_cast"],
            unfused,
        ],
        "fp8": [default, Variant(name="ours, fp8", precision="fp8"), separate_casts],
        "fp8 48": [
            Variant(name="ours, fp8", rows=48, precision="fp8"),
            Variant(name="ours, fp8, fast sums", rows=48, precision="fp8", fp8={"fp8_fast_sums": "all"}),
            Variant(name="ours, fp8, output too", rows=48, precision="fp8", fp8={"fp8_output_projection": True}),
            dataclasses.replace(separate_casts, rows=48),
        ],
        "compiled peers": [default, *[variant for variant in peers if "compiled" in variant.name]],
    }
    if not on_gpu:
        found["main"] = [Variant(name="ours"), Variant(name="ours, fp8", precision="fp8")]
        for name in ("kernels", "compiled peers", "attention", "rows 48 plain", "rows 96", "fp8", "fp8 48"):
            del found[name]
    return found


def without(name: str) -> str:
    """FUSED with all but one kernel, and those that need it."""
    return ",".join(other for other in kernels.FUSABLE if other != name and name not in kernels.NEEDED.get(other, ()))


def random_weights(model: torch.nn.Module) -> None:
    """Draws weights where they lie: on the CPU, as a run does, it takes seconds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(float(name.endswith("LayerNorm.weight")))


def build_ours(variant: Variant, config: BertConfig, batches: list[PretrainingBatch]) -> OnBatch:
    """step(n) of this trainer, as a run takes it: batches come from page-locked memory."""
    world = World(DistConfig(device=device().type))
    on_gpu = world.device.type == "cuda"
    choice = kernels.Config(
        fused=variant.fused if on_gpu else "none", attention=variant.attention if on_gpu else "sdpa_loop"
    )
    with torch.device("meta"):
        model = BertForPreTraining(config, kernels.select(choice, world.device))
    model.to_empty(device=world.device)
    random_weights(model)
    fused_update = "lamb" in choice.names(world.device)
    name = variant.precision if on_gpu or variant.precision == "fp8" else "fp32"
    precision = PrecisionConfig(precision=name, **variant.fp8)
    step: Any = build_step(
        model, precision.resolve(world.device), optim.Config(), world, accumulate=False, fused_update=fused_update
    )
    if on_gpu:
        room = capacity(variant.rows, config.max_position_embeddings)
        batches = [(static_batch(b, room) if variant.graph else b).pin_memory() for b in batches]
        if variant.graph:
            step = GraphedStep(step, batches[:1])

    def on_batch(number: int) -> object:
        torch.manual_seed(number)
        return step([batches[number % len(batches)]], 1e-4)

    return on_batch


def capacity(rows: int, length: int) -> PretrainingCapacity:
    """As the trainer computes it for packed rows of at most 3 sequences."""
    return graph_capacity(PretrainingCapacity.of(rows * length, 3 * rows), rows)


def prepare(variant: Variant, config: BertConfig, batches: list[PretrainingBatch], figures: Figures) -> OnBatch | None:
    """Builds and warms up; None, with the reason, where it cannot run."""
    begin, used = time.monotonic(), torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        if variant.peer is not None:
            from peers import build  # transformers is imported only where a peer is measured

            run = build(config, batches, device(), **variant.peer)
        else:
            run = build_ours(variant, config, batches)
        for number in range(NUM_BATCHES):
            run(number)
        synchronize()
    except Exception as error:  # out of memory, no such backend, a library's own errors
        figures.problem = explain(error)
        return None
    finally:
        figures.build_seconds = round(time.monotonic() - begin, 1)
        if torch.cuda.is_available():
            figures.peak_bytes = torch.cuda.max_memory_allocated() - used
    return run


def measure_together(
    variants: list[Variant],
    config: BertConfig,
    rounds: int,
    steps: int,
    ceiling: float,
    deadline: float,
    say: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """One line a variant, of steps that took turns. Nothing of them is left in memory.

    say: is given the lines of those that have taken their first steps, while the next one may still hang.
    """
    batches = packed_batches(variants[0].rows, NUM_BATCHES, config)
    figures = {variant.name: Figures() for variant in variants}
    runs: dict[str, OnBatch] = {}
    early: list[dict[str, Any]] = []
    for variant in variants:
        if time.monotonic() > deadline:
            figures[variant.name].problem = "no time left"
            continue
        run = prepare(variant, config, batches, figures[variant.name])
        if run is not None:
            runs[variant.name] = run
            first = dataclasses.replace(figures[variant.name], times=[turn(run, 1)])
            early.append(line(variant, first, batches, config, ceiling) | {"early": True})
            say(early)
        gc.collect()
    clocks = {}
    for _ in range(rounds):
        for name, run in runs.items():
            figures[name].times += [turn(run, steps)]
        clocks = gpu_state()
    lines = [line(variant, figures[variant.name], batches, config, ceiling) for variant in variants]
    run = None
    runs.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [one | {"clocks": clocks} for one in lines]


def together(variants: list[Variant]) -> list[list[Variant]]:
    """The variants by twos; alone where two would not fit into 80 GB (44 GiB at 96 rows)."""
    count = 2 if variants[0].rows <= 48 else 1
    return [variants[begin : begin + count] for begin in range(0, len(variants), count)]


def turn(run: OnBatch, steps: int) -> float:
    """Milliseconds a step, over every batch equally often."""
    numbers = iter(range(10**9))
    return milliseconds(lambda: run(next(numbers)), steps * NUM_BATCHES)


def line(
    variant: Variant, figures: Figures, batches: list[PretrainingBatch], config: BertConfig, ceiling: float
) -> dict[str, Any]:
    """The figures of a variant; only the reason where there are none."""
    result: dict[str, Any] = {"variant": variant.name, "rows": variant.rows, "build_seconds": figures.build_seconds}
    if not figures.times:
        return result | {"problem": figures.problem}
    time_ms = statistics.median(figures.times)
    count = len(batches)
    sequences = sum(batch.num_sequences for batch in batches) / count
    tokens = sum(batch.num_tokens for batch in batches) / count
    rate = sum(model_flops(config, batch) for batch in batches) / count / time_ms / 1e9
    return result | {
        "milliseconds": round(time_ms, 3),
        "spread": [round(min(figures.times), 3), round(max(figures.times), 3)],
        "sequences_per_second": round(sequences / time_ms * 1e3, 1),
        "tokens_per_second": round(tokens / time_ms * 1e3),
        "model_tflops": round(rate, 4),
        "share_of_ceiling": round(rate / ceiling, 4),
        "peak_gib": round(figures.peak_bytes / 2**30, 2),
    }


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    available = groups(torch.cuda.is_available())
    parser.add_argument("--groups", nargs="+", choices=list(available), default=list(available), help="(default: all)")
    parser.add_argument("--rounds", type=integer, default=5, help="turns of each variant (default 5)")
    parser.add_argument(
        "--steps", type=integer, default=4, help=f"passes over {NUM_BATCHES} batches a turn (default 4)"
    )
    parser.add_argument(
        "--deadline", type=positive, default=300, help="seconds until nothing more begins (default 300)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    deadline = time.monotonic() + options.deadline
    config = BertConfig(**TINY) if options.tiny else BertConfig()
    ceiling = matmul_ceiling()
    result: dict[str, Any] = {"benchmark": "train_step", "ceiling_tflops": round(ceiling, 4), "groups": {}}
    chosen = {variant.attention for name in options.groups for variant in available[name] if variant.peer is None}
    if torch.cuda.is_available() and "auto" in chosen:
        result["tried_attention"] = [vars(trial) for trial in attention.trials(device())]
    result["machine"] = machine()
    for name in options.groups:
        variants = available[name]
        if options.tiny:
            variants = [dataclasses.replace(variant, rows=variant.rows // 12) for variant in variants]
        measured: list[dict[str, Any]] = []

        def say(lines: list[dict[str, Any]], before: list[dict[str, Any]] = measured, group: str = name) -> None:
            emit(result | {"groups": {group: [*before, *lines]}})

        for few in together(variants):
            measured += measure_together(few, config, options.rounds, options.steps, ceiling, deadline, say)
            emit(result | {"groups": {name: measured}})  # at once: a process that is ended leaves what it has


if __name__ == "__main__":
    main()
