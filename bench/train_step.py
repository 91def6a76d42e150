"""Training steps of BERT-large on one GPU: variants of this trainer, and Hugging Face's, on the same sequences.

Packed rows of 512 tokens with Wikipedia's length distribution (synthetic), dropout 0.1, forward, backward and update.
Variants take turns in pairs, so that they share the chip's temperature and clocks and fit a GPU of 80 GB. Prints a JSON
line once a variant has taken its first steps and after each pair; a group's last line has all of its figures. --profile
prints the kernels of a step of 48 rows by time instead, in bf16 and fp8.

usage: python bench/train_step.py [--groups main peers ...] [--rounds 5] [--steps 4] [--deadline 300]
       python bench/train_step.py --profile
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lib import Parser, emit, explain, integer, positive
from torch import Tensor
from torch_lib import (
    TINY,
    Call,
    device,
    gpu_state,
    matmul_ceiling,
    milliseconds,
    model_flops,
    new_step,
    packed_batches,
    synchronize,
)

from bert import kernels
from bert.data.batch import PretrainingBatch, PretrainingCapacity
from bert.kernels import attention
from bert.kernels.attention import benchmark
from bert.kernels.operations.cross_entropy import IGNORE
from bert.kernels.precision import Config as PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.training.graph import GraphedStep, graph_capacity, static_batch

NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    rows: int = 24
    precision: str = "bf16"
    fused: str = "auto"
    attention: str = "auto"
    graph: bool = True
    peer: dict[str, bool] | None = None  # of Hugging Face's: packed, compiled


def groups(on_gpu: bool) -> dict[str, list[Variant]]:
    """Variants that take turns, by group. On a CPU: those that run there."""
    ours, fp8 = partial(Variant, name="ours"), partial(Variant, name="ours, fp8", precision="fp8")
    unfused = Variant(name="ours, FUSED=none", fused="none")

    def peer(kind: str, mode: str) -> Variant:
        settings = {"packed": kind == "packed", "compiled": mode == "compiled"}
        return Variant(name=f"Hugging Face {kind}, {mode}", peer=settings)

    # Padded is what most users run; packed does nearly the same work as ours.
    eager = [peer("padded", "eager"), peer("packed", "eager")]
    small = {"peers": [ours(), *eager], "rows 48": [ours(rows=48), fp8(rows=48)]}
    if not on_gpu:
        return {"main": [ours(), fp8()], **small}
    # On a CPU compiling takes longer than the steps that it would save.
    small["peers"] += [peer("packed", "compiled"), peer("padded", "compiled")]
    backends = [
        Variant(name=f"ours, {name} attention", attention=name)
        for name in attention.candidates(device())
    ]
    # Casts to fp8 occur in none of this group's variants; "fp8 48" measures them.
    fusable = [name for name in kernels.FUSABLE if name != "fp8_cast"]
    return {
        "main": [ours(), fp8(), Variant(name="ours, eager", graph=False), unfused],
        **small,
        "rows 96": [ours(rows=96), fp8(rows=96)],
        "rows 48 plain": [
            Variant(name="ours, Triton's attention", rows=48, attention="triton"),
            Variant(name="ours, FUSED=none, flash", rows=48, fused="none", attention="flash"),
        ],
        "attention": [ours(), *backends],
        "kernels": [
            ours(),
            *[Variant(name=f"ours, without fused {name}", fused=without(name)) for name in fusable],
            unfused,
        ],
        "fp8 48": [
            fp8(rows=48),
            fp8(name="ours, fp8, separate casts", rows=48, fused=without("fp8_cast")),
        ],
    }


def without(name: str) -> str:
    """FUSED without a kernel and those that need it."""
    return ",".join(
        other
        for other in kernels.FUSABLE
        if other != name and name not in kernels.NEEDED.get(other, ())
    )


def build_ours(variant: Variant, config: BertConfig, batches: list[PretrainingBatch]) -> Call:
    """step(n) of this trainer as in a run, with batches in page-locked memory."""
    on_gpu = device().type == "cuda"
    fused, backend = (variant.fused, variant.attention) if on_gpu else ("none", "sdpa_loop")
    choice = kernels.Config(fused=fused, attention=backend)
    with torch.device("meta"):
        model = BertForPreTraining(config, kernels.bind_kernels(choice, device()))
    model.to_empty(device=device())
    with (
        torch.no_grad()
    ):  # initialized on the device: on the CPU, as in a run, it would take seconds
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(float(name.endswith("LayerNorm.weight")))
    # bf16 is slower than fp32 on a CPU.
    precision = variant.precision if on_gpu or variant.precision == "fp8" else "fp32"
    fused_update = "lamb" in choice.names(device())
    step: Any = new_step(model, PrecisionConfig(precision=precision), fused_update=fused_update)
    if on_gpu:
        room = capacity(variant.rows, config.max_position_embeddings)
        batches = [(static_batch(b, room) if variant.graph else b).pin_memory() for b in batches]
        if variant.graph:
            step = GraphedStep(step, batches[:1])

    def on_batch(number: int) -> object:
        # As the training loop does before each step, so that its cost is included.
        torch.manual_seed(number)
        return step([batches[number % len(batches)]], 1e-4)

    return on_batch


def capacity(rows: int, length: int) -> PretrainingCapacity:
    """The trainer's capacity for packed rows of at most 3 sequences."""
    return graph_capacity(PretrainingCapacity.of(rows * length, 3 * rows), rows)


def inputs_of(
    batch: PretrainingBatch, length: int, packed: bool, device: torch.device
) -> dict[str, Tensor]:
    """Inputs of Hugging Face's BertForPreTraining for a batch, rows padded to ``length``.

    packed: as many consecutive sequences per row as fit, with a block-diagonal mask and restarting positions; else one.
    The model pools only the first token of a row, so its next-sentence head sees one sequence per row: slightly less
    work than ours.
    """
    lengths = batch.cu_seqlens.diff()[: batch.num_sequences].long()
    # As if a row were full, so that the first sequence begins one. T tokens go to [R, length].
    rows, begins, used = [-1], [], length
    for size in lengths.tolist():
        begins.append(used if packed and used + size <= length else 0)
        rows.append(rows[-1] + (begins[-1] == 0))
        used = begins[-1] + size
    num_tokens = int(lengths.sum())
    positions = batch.position_ids[:num_tokens].long()
    # [T]: row and column of each token.
    row = torch.tensor(rows[1:]).repeat_interleave(lengths)
    column = torch.tensor(begins).repeat_interleave(lengths) + positions

    def table(values: Tensor, padding: int = 0) -> Tensor:
        filled = torch.full((rows[-1] + 1, length), padding)
        filled[row, column] = values[:num_tokens].long()
        return filled

    labels = torch.full((num_tokens,), IGNORE)
    labels[batch.masked_positions.long()[: batch.num_masked]] = batch.masked_labels[
        : batch.num_masked
    ]
    # [R, length]: number of the sequence of each place, -1 at padding.
    sequence = table(torch.arange(batch.num_sequences).repeat_interleave(lengths), -1)
    if packed:  # padding attends to itself, so that no row is without keys
        # [R, 1, length, length], for all heads.
        mask = (sequence[:, None, :, None] == sequence[:, None, None, :]) & (
            sequence[:, None, None, :] >= 0
        )
        mask |= torch.eye(length, dtype=torch.bool)
    else:
        mask = (sequence >= 0).long()
    made = {
        "input_ids": table(batch.input_ids), "token_type_ids": table(batch.segment_ids),
        "position_ids": table(positions), "labels": table(labels, IGNORE), "attention_mask": mask,
        # Of the sequence that begins the row, whose first token is pooled.
        "next_sentence_label": batch.next_sentence_labels[: batch.num_sequences][torch.tensor(begins) == 0],
    }  # fmt: skip
    return {name: tensor.to(device) for name, tensor in made.items()}


def build_peer(
    config: BertConfig,
    batches: list[PretrainingBatch],
    *,
    packed: bool,
    compiled: bool,
    micro_batch: int = 0,
) -> Call:
    """step(n) of Hugging Face's model with AdamW and clipping; on a GPU in bf16 with the fused AdamW.

    micro_batch: rows per forward pass; 0: all.
    """
    import transformers  # only needed here

    on_gpu = device().type == "cuda"
    shape = {name: getattr(config, name) for name in vars(config) if name != "hidden_act"}
    theirs = transformers.BertConfig(
        **shape, hidden_act=config.hugging_face_hidden_act, attn_implementation="sdpa"
    )
    model = (
        transformers.BertForPreTraining(theirs)
        # Moments are in bf16 too then: less to move than our fp32 masters and moments.
        .to(device(), torch.bfloat16 if on_gpu else torch.float32)
        .train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    inputs = [
        inputs_of(batch, config.max_position_embeddings, packed, device()) for batch in batches
    ]
    forward = torch.compile(model) if compiled else model

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        # Gradients of micro-batches add up without a weight, as only time counts here.
        parts = {
            name: value.split(micro_batch or len(value))
            for name, value in inputs[number % len(inputs)].items()
        }
        for values in zip(*parts.values(), strict=True):
            forward(**dict(zip(parts, values, strict=True))).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def prepare(
    variant: Variant, config: BertConfig, batches: list[PretrainingBatch], figures: dict[str, Any]
) -> Call:
    """Builds and warms up a variant; records the time and memory that takes."""
    on_gpu, begin = torch.cuda.is_available(), time.monotonic()
    # The other variant of the pair is in memory already.
    used = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run = (
        build_peer(config, batches, **variant.peer)
        if variant.peer
        else build_ours(variant, config, batches)
    )
    for number in range(NUM_BATCHES):
        run(number)
    synchronize()
    figures["build_seconds"] = round(time.monotonic() - begin, 1)
    figures["peak_gib"] = round(
        (torch.cuda.max_memory_allocated() - used if on_gpu else 0) / 2**30, 2
    )
    return run


def measure_together(
    variants: list[Variant], config: BertConfig, rounds: int, steps: int, ceiling: float, deadline: float,
    report: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """Figures of each variant, from steps in turns. Frees all memory afterwards.

    report: called with the figures of the variants that have taken their first steps, before the next one is built.
    """
    # The same for all variants, so that only code differs.
    batches = packed_batches(variants[0].rows, NUM_BATCHES, config)
    sequences = sum(batch.num_sequences for batch in batches) / NUM_BATCHES
    tokens = sum(batch.num_tokens for batch in batches) / NUM_BATCHES
    flops = sum(model_flops(config, batch) for batch in batches) / NUM_BATCHES
    lines: dict[str, dict[str, Any]] = {
        each.name: {"variant": each.name, "rows": each.rows} for each in variants
    }
    runs: dict[str, Call] = {}

    def turn(run: Call, steps: int) -> float:
        """Milliseconds per step, over every batch equally often."""
        numbers = itertools.count()
        return milliseconds(lambda: run(next(numbers)), steps * NUM_BATCHES)

    def timed(name: str, times: list[float]) -> dict[str, Any]:
        time_ms = statistics.median(times)
        rate = flops / time_ms / 1e9
        return lines[name] | {
            "milliseconds": round(time_ms, 3),
            "spread": [round(min(times), 3), round(max(times), 3)],
            "sequences_per_second": round(sequences / time_ms * 1e3, 1),
            "tokens_per_second": round(tokens / time_ms * 1e3),
            "model_tflops": round(rate, 4),
            "share_of_ceiling": round(rate / ceiling, 4),
        }

    early: list[dict[str, Any]] = []
    for variant in variants:
        if time.monotonic() > deadline:
            lines[variant.name]["problem"] = "no time left"
            continue
        try:
            run = prepare(variant, config, batches, lines[variant.name])
            # Something to show, should the process be killed before its turns.
            early.append(timed(variant.name, [turn(run, 1)]) | {"early": True})
        except Exception as error:  # out of memory, no such backend, a library's errors
            lines[variant.name]["problem"] = explain(error)
        else:
            runs[variant.name] = run
            report(early)
        # A reference left here would keep a failed variant's memory from the next one.
        run = None
        gc.collect()
    times: dict[str, list[float]] = {}
    while runs:  # if a variant fails in its turn, it is removed and the others start over
        name = ""
        try:
            for number in range(rounds):
                # Every other round runs backwards, so that neither
                # variant always follows the hotter one.
                for name in list(runs)[:: -1 if number % 2 else 1]:
                    times.setdefault(name, []).append(turn(runs[name], steps))
            break
        except Exception as error:
            lines[name]["problem"] = explain(error)
            del runs[name]
            times.clear()
            gc.collect()
    # Read while the GPU is still warm.
    clocks = gpu_state()
    runs.clear()
    gc.collect()
    with contextlib.suppress(RuntimeError):  # an earlier error, which the GPU repeats
        torch.cuda.empty_cache()
    return [
        (timed(name, times[name]) if name in times else one) | {"clocks": clocks}
        for name, one in lines.items()
    ]


def together(variants: list[Variant]) -> list[list[Variant]]:
    """Variants in pairs, or alone if two would not fit in 80 GB (44 GiB at 96 rows)."""
    count = 2 if variants[0].rows <= 48 else 1
    return [variants[begin : begin + count] for begin in range(0, len(variants), count)]


PARTS = {  # by module of bert.kernels, the prefix of the names of its Triton kernels
    "triton_attention": "attention", "dropout_add_layer_norm": "LayerNorm", "bias_gelu": "GELU", "cast": "casts",
    "fp8_feed_forward": "GELU", "embeddings": "embeddings", "scatter": "embeddings", "cross_entropy": "head, loss",
    "lamb": "LAMB", "lans": "LANS", "arithmetic": "sums over rows",
}  # fmt: skip
LIBRARIES = {  # other libraries' kernels; the first match counts
    "attention": re.compile(r"sdpa|flash|fmha|mha_", re.IGNORECASE),
    "communication": re.compile(r"nccl", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|cublas|cutlass|xmma", re.IGNORECASE),
}


def by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums (kernel name, milliseconds) by part of the step."""
    found: dict[str, float] = {}
    for name, spent in kernels:
        ours = (part for module, part in PARTS.items() if name.startswith(f"{module}_"))
        others = (part for part, names in LIBRARIES.items() if names.search(name))
        part = next(itertools.chain(ours, others), "other")
        found[part] = found.get(part, 0.0) + spent
    return found


def profiled(precision: str, rows: int, config: BertConfig) -> dict[str, Any]:
    """Milliseconds per step by part, and the 40 slowest kernels, averaged over two steps."""
    from torch.profiler import ProfilerActivity, profile

    variant = Variant(name=f"ours, {precision}", rows=rows, precision=precision)
    run = build_ours(variant, config, packed_batches(rows, NUM_BATCHES, config))
    # Compiles, and measures the fp8 scales, before the profile begins.
    for number in range(NUM_BATCHES):
        run(number)
    synchronize()
    on_gpu = device().type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        run(0)
        run(1)
        synchronize()
    kernels = [
        (
            event.key,
            # Microseconds of two steps become milliseconds of one.
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 2e3,
            event.count / 2,
        )
        for event in profiler.key_averages()
    ]
    parts = by_part((name, spent) for name, spent, _ in kernels)
    return {
        "profile": precision,
        "rows": rows,
        "parts": {part: round(spent, 4) for part, spent in parts.items()},
        "top_kernels": [
            {"kernel": name[:120], "ms_per_step": round(spent, 4), "calls_per_step": calls}
            for name, spent, calls in sorted(kernels, key=lambda kernel: -kernel[1])[:40]
        ],
    }


def main() -> None:
    parser = Parser(__doc__)
    available = groups(torch.cuda.is_available())
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=list(available),
        default=list(available),
        help="(default: all)",
    )
    parser.add_argument(
        "--rounds", type=integer, default=5, help="turns of each variant (default 5)"
    )
    parser.add_argument(
        "--steps", type=integer, default=4, help=f"passes over {NUM_BATCHES} batches (default 4)"
    )
    parser.add_argument(
        "--deadline", type=positive, default=300, help="seconds until the last start (default 300)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a step by time instead"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try out the script")
    options = parser.parse_args()
    deadline = time.monotonic() + options.deadline
    config = BertConfig(**TINY) if options.tiny else BertConfig()
    if options.profile:
        for precision in ("bf16", "fp8"):
            try:
                emit("step_profile", profiled(precision, 2 if options.tiny else 48, config))
            except Exception as error:  # keep the other precision's
                emit("step_profile", {"problem": f"{precision}: {explain(error)}"})
        return
    ceiling = matmul_ceiling()
    result: dict[str, Any] = {"ceiling_tflops": round(ceiling, 4)}
    # The trials of ATTENTION=auto are figures as well: config and tables use the fastest.
    chosen = {
        variant.attention
        for name in options.groups
        for variant in available[name]
        if variant.peer is None
    }
    if torch.cuda.is_available() and "auto" in chosen:
        result["tried_attention"] = [
            vars(trial) for trial in benchmark.benchmark_backends(device())
        ]
    for name in options.groups:
        variants = available[name]
        if options.tiny:
            variants = [
                dataclasses.replace(variant, rows=variant.rows // 12) for variant in variants
            ]
        measured: list[dict[str, Any]] = []

        # The defaults bind group and earlier lines now, since both change in the loop.
        def report(
            lines: list[dict[str, Any]], before: list[dict[str, Any]] = measured, group: str = name
        ) -> None:
            emit("train_step", result | {"groups": {group: [*before, *lines]}})

        for few in together(variants):
            lines = measure_together(
                few, config, options.rounds, options.steps, ceiling, deadline, report
            )
            report(lines)  # at once, so that it survives a kill
            measured += lines


if __name__ == "__main__":
    main()
