"""The kernels of a training step of BERT-large by time, at 48 rows in bf16 and fp8. Prints one JSON line a precision.

usage: python bench/step_profile.py [--rows 48] [--tiny]
"""

from __future__ import annotations

from typing import Any

from command_line import Parser, integer
from common import TINY, device, emit, machine, packed_batches, synchronize
from parts import by_part
from train_step import NUM_BATCHES, Variant, build_ours

from bert.model.config import BertConfig

COUNT = 40  # kernels told


def kernels_of(variant: Variant, config: BertConfig) -> dict[str, Any]:
    """Over two steps, milliseconds a step by part, and the kernels that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    run = build_ours(variant, config, packed_batches(variant.rows, NUM_BATCHES, config))
    for number in range(NUM_BATCHES):
        run(number)
    synchronize()
    on_gpu = device().type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run(0)
        run(1)
        synchronize()
    found: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found[event.key] = (spent, event.count)
    parts = by_part((name, spent / 2e3) for name, (spent, _) in found.items())
    ordered = sorted(found.items(), key=lambda item: -item[1][0])[:COUNT]
    kernels = [
        {"kernel": name[:120], "ms_per_step": round(spent / 2e3, 4), "calls_per_step": calls / 2}
        for name, (spent, calls) in ordered
    ]
    return {"parts": {part: round(spent, 4) for part, spent in parts.items()}, "top_kernels": kernels}


def main() -> None:
    """Profiles and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=integer, default=48, help="rows of 512 tokens (default 48)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    config, rows = (BertConfig(**TINY), 2) if options.tiny else (BertConfig(), options.rows)
    for precision in ("bf16", "fp8"):
        kernels = kernels_of(Variant(name=f"ours, {precision}", rows=rows, precision=precision), config)
        found = {"profile": precision, "rows": rows, **kernels}
        emit({"benchmark": "step_profile", **found, "machine": machine()})


if __name__ == "__main__":
    main()
