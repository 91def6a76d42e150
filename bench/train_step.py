"""Training steps of BERT-large on one GPU: variants of this trainer, and Hugging Face's padded.

Packed rows of 512 tokens with Wikipedia's length distribution (synthetic), dropout 0.1, forward,
backward and update. The variants of a group run one after the other, each alone in memory, on the
same sequences; each has its JSON line. --profile prints the kernels of a step of 48 rows by time
instead, in bf16 and fp8.

usage: python bench/train_step.py [--group "rows 24"]
       python bench/train_step.py --profile
"""

import contextlib
import dataclasses
import gc
import itertools
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lib import Parser, emit, explain
from torch import Tensor
from torch_lib import (
    TINY,
    Call,
    device,
    gpu_state,
    matmul_ceiling,
    milliseconds,
    new_step,
    no_fp8,
    packed_batches,
    precisions,
    synchronize,
)

from bert import kernels
from bert.data.batch import PretrainingBatch, PretrainingCapacity
from bert.kernels.operations.cross_entropy import IGNORE
from bert.kernels.precision import PrecisionConfig
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.flops import model_flops
from bert.training.graph import GraphedStep, graph_capacity, static_batch

NUM_BATCHES = 4
# What only a GPU can decide on, off by default: settings of a Variant.
TRIALS: dict[str, dict[str, str]] = {
    "fp8 output projection": {"trials": "projection"},
    "fast backward sums": {"trials": "fast_backward"},
    "both": {"trials": "projection,fast_backward"},
    "attention by cuDNN": {"attention": "cudnn_frontend"},
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    rows: int = 24
    precision: str = "bf16"
    trials: str = "none"  # FP8_TRIALS
    attention: str = "auto"
    fused: str = "auto"
    graph: bool = True
    peer: str = ""  # Hugging Face's: eager, compiled

    def settings(self) -> dict[str, str]:
        """Of a run of ours, where they are not the default."""
        variables = {"PRECISION": self.precision, "BATCHSIZE": str(self.rows)}
        for name, value, default in (
            ("FUSED", self.fused, "auto"),
            ("FP8_TRIALS", self.trials, "none"),
            ("ATTENTION", self.attention, "auto"),
            ("CUDA_GRAPH", str(int(self.graph)), "1"),
        ):
            variables |= {} if value == default else {name: value}
        return variables


def groups(on_gpu: bool) -> dict[str, list[Variant]]:
    """Variants that are compared, by group. On a CPU: those that run there."""
    ours, fp8 = (
        partial(Variant, name="ours"),
        partial(Variant, name="ours, fp8", precision="fp8"),
    )
    # Padded is what most users run.
    eager, compiled = (
        Variant(name=f"Hugging Face, {mode}", peer=mode)
        for mode in ("eager", "compiled")
    )
    if not on_gpu:
        # Compiling takes longer there than the steps that it would save.
        return {"rows 24": [ours(), fp8()], "peers": [eager]}
    each = [
        Variant(name=f"ours, without fused {name}", fused=without({name}))
        for name in kernels.FUSABLE
        if name != "fp8_cast"  # casts occur in none of these variants
    ]
    return {
        "rows 24": [
            ours(),
            fp8(),
            Variant(name="ours, eager", graph=False),
            Variant(name="ours, FUSED=none", fused="none"),
            *each,
        ],
        "rows 48": [ours(rows=48), fp8(rows=48)],
        "rows 96": [ours(rows=96), fp8(rows=96)],
        "peers": [eager, compiled],
        "trials": [
            fp8(rows=48, name=f"ours, fp8, trial of {name}", **settings)
            for name, settings in TRIALS.items()
        ],
    }


def without(names: set[str]) -> str:
    """FUSED without these kernels and those that need them."""
    left = [
        name
        for name in kernels.FUSABLE
        if name not in names and not names & {*kernels.NEEDED.get(name, ())}
    ]
    return ",".join(left) or "none"


def build_ours(
    variant: Variant, config: BertConfig, batches: list[PretrainingBatch]
) -> Call:
    """step(n) of this trainer as in a run, with batches in page-locked memory."""
    on_gpu = device().type == "cuda"
    fused, backend = variant.fused, variant.attention
    if not on_gpu:
        fused, backend = "none", "sdpa_loop"
    choice = kernels.KernelsConfig(fused=fused, attention=backend)
    bound = kernels.bind_kernels(choice, device())  # its trials may run in this process
    with torch.device("meta"):
        model = BertForPreTraining(config, bound)
    model.to_empty(device=device())
    # On the device: on the CPU, as in a run, it would take seconds.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(float(name.endswith("LayerNorm.weight")))
    # bf16 is slower than fp32 on a CPU.
    precision = variant.precision if on_gpu or variant.precision == "fp8" else "fp32"
    fused_update = "lamb" in choice.names(device())
    step: Any = new_step(
        model,
        PrecisionConfig(precision=precision, fp8_trials=variant.trials),
        fused_update=fused_update,
    )
    if on_gpu:
        room = capacity(variant.rows, config.max_position_embeddings)
        batches = [
            (static_batch(b, room) if variant.graph else b).pin_memory()
            for b in batches
        ]
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


def inputs_of(batch: PretrainingBatch, length: int) -> dict[str, Tensor]:
    """Inputs of Hugging Face's BertForPreTraining: a sequence per row [S, length], padded."""
    lengths = batch.cu_seqlens.diff()[: batch.num_sequences].long()
    num_tokens = int(lengths.sum())
    positions = batch.position_ids[:num_tokens].long()
    row = torch.arange(batch.num_sequences).repeat_interleave(lengths)

    def table(values: Tensor, padding: int = 0) -> Tensor:
        filled = torch.full((batch.num_sequences, length), padding)
        filled[row, positions] = values[:num_tokens].long()
        return filled

    labels = torch.full((num_tokens,), IGNORE)
    masked = batch.masked_positions.long()[: batch.num_masked]
    labels[masked] = batch.masked_labels[: batch.num_masked]
    return {
        "input_ids": table(batch.input_ids),
        "token_type_ids": table(batch.segment_ids),
        "attention_mask": table(torch.ones_like(positions)),
        "labels": table(labels, IGNORE),
        "next_sentence_label": batch.next_sentence_labels[: batch.num_sequences],
    }


def build_peer(
    config: BertConfig,
    batches: list[PretrainingBatch],
    *,
    compiled: bool,
    micro_batch: int = 0,
) -> Call:
    """step(n) of Hugging Face's model with AdamW and clipping; on a GPU in bf16, AdamW fused.

    micro_batch: rows per forward pass; 0: all.
    """
    import transformers  # only needed here

    on_gpu = device().type == "cuda"
    shape = {
        name: getattr(config, name) for name in vars(config) if name != "hidden_act"
    }
    theirs = transformers.BertConfig(
        **shape, hidden_act=config.hugging_face_hidden_act, attn_implementation="sdpa"
    )
    # Moments are in bf16 too then: less to move than our fp32 masters and moments.
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = transformers.BertForPreTraining(theirs).to(device(), dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    inputs = []
    for batch in batches:
        made = inputs_of(batch, config.max_position_embeddings)
        inputs.append({name: values.to(device()) for name, values in made.items()})
    forward = torch.compile(model) if compiled else model

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        chosen = inputs[number % len(inputs)]
        parts = [values.split(micro_batch or len(values)) for values in chosen.values()]
        # Gradients of micro-batches add up without a weight, as only time counts here.
        for values in zip(*parts, strict=True):
            forward(**dict(zip(chosen, values, strict=True))).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measured(
    variant: Variant, config: BertConfig, rounds: int, steps: int, ceiling: float
) -> dict[str, Any]:
    """Figures of a variant, or the problem that it has; frees its memory.

    rounds: times that are taken, each of ``steps`` passes over NUM_BATCHES batches.
    """
    on_gpu, begin = torch.cuda.is_available(), time.monotonic()
    row: dict[str, Any] = {"variant": variant.name, "rows": variant.rows}
    if not variant.peer:
        row["settings"] = variant.settings()
    if variant.precision == "fp8" and no_fp8():
        return row | {"left_out": no_fp8()}
    run: Any = None
    numbers = itertools.count()
    # The same for all variants of this size, so that only code differs.
    batches = packed_batches(variant.rows, NUM_BATCHES, config)
    try:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if variant.peer:
            run = build_peer(config, batches, compiled=variant.peer == "compiled")
        else:
            run = build_ours(variant, config, batches)
        for _ in range(NUM_BATCHES):
            run(next(numbers))
        synchronize()
        row["build_seconds"] = round(time.monotonic() - begin, 1)
        # Every batch equally often.
        times = [
            milliseconds(lambda: run(next(numbers)), steps * NUM_BATCHES)
            for _ in range(rounds)
        ]
        row |= figures(times, config, batches, ceiling)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        row["peak_gib"] = round(peak / 2**30, 2)
        # Read while the GPU is still warm.
        row["clocks"] = gpu_state()
    except Exception as error:  # out of memory, no such backend, a library's errors
        row["problem"] = explain(error)
    # A reference left here would keep this variant's memory from the next one.
    run = None
    gc.collect()
    with contextlib.suppress(RuntimeError):  # an earlier error, which the GPU repeats
        torch.cuda.empty_cache()
    return row


def figures(
    times: list[float],
    config: BertConfig,
    batches: list[PretrainingBatch],
    ceiling: float,
) -> dict[str, Any]:
    """Rates of steps on these batches. times: milliseconds per step, of each round."""
    time_ms = statistics.median(times)
    seconds = time_ms * len(batches) / 1e3
    rate = sum(model_flops(config, batch) for batch in batches) / seconds / 1e12
    return {
        "milliseconds": round(time_ms, 3),
        "spread": [round(min(times), 3), round(max(times), 3)],
        "sequences_per_second": round(
            sum(b.num_sequences for b in batches) / seconds, 1
        ),
        "tokens_per_second": round(sum(b.num_tokens for b in batches) / seconds),
        "model_tflops": round(rate, 4),
        "share_of_ceiling": round(rate / ceiling, 4),
    }


# By module of bert.kernels, the prefix of the names of its Triton kernels.
PARTS = {
    "triton_attention": "attention",
    "dropout_add_layer_norm": "LayerNorm",
    "bias_gelu": "GELU",
    "cast": "casts",
    "fp8_feed_forward": "GELU",
    "embeddings": "embeddings",
    "cross_entropy": "head, loss",
    "lamb": "LAMB",
    "arithmetic": "sums over rows",
}
LIBRARIES = {  # other libraries' kernels; the first match counts
    "attention": re.compile(r"sdpa|flash|fmha|mha_", re.IGNORECASE),
    "communication": re.compile(r"nccl", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|cublas|cutlass|xmma", re.IGNORECASE),
}


def by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums (kernel name, milliseconds) by part of the step."""
    totals: dict[str, float] = {}
    for name, spent in kernels:
        ours = (part for module, part in PARTS.items() if name.startswith(f"{module}_"))
        others = (part for part, names in LIBRARIES.items() if names.search(name))
        part = next(itertools.chain(ours, others), "other")
        totals[part] = totals.get(part, 0.0) + spent
    return totals


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
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
            / 2e3,
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
            {
                "kernel": name[:120],
                "ms_per_step": round(spent, 4),
                "calls_per_step": calls,
            }
            for name, spent, calls in sorted(kernels, key=lambda kernel: -kernel[1])[
                :40
            ]
        ],
    }


def main() -> None:
    parser = Parser(__doc__)
    available = groups(torch.cuda.is_available())
    parser.add_argument(
        "--group", choices=list(available), default="rows 24", help="(default rows 24)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the kernels of a step by time instead",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to try out the script"
    )
    options = parser.parse_args()
    config = BertConfig(**TINY) if options.tiny else BertConfig()
    if options.profile:
        for precision in precisions():
            try:
                emit(
                    "step_profile",
                    profiled(precision, 2 if options.tiny else 48, config),
                )
            except Exception as error:  # keep the other precision's
                emit("step_profile", {"problem": f"{precision}: {explain(error)}"})
        return
    ceiling = matmul_ceiling()
    for variant in available[options.group]:
        if options.tiny:
            variant = dataclasses.replace(variant, rows=variant.rows // 12)
        row = measured(variant, config, *((1, 1) if options.tiny else (5, 4)), ceiling)
        # At once, so that it survives a kill.
        emit(
            "train_step",
            {"group": options.group, "ceiling_tflops": round(ceiling, 4)} | row,
        )


if __name__ == "__main__":
    main()
