"""Which part of a step a kernel belongs to, and the model of the step beside what a profile measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PARTS = {  # by the module of bert.kernels, with which the name of each of its Triton kernels begins
    "attention_triton": "attention", "dropout_add_layer_norm": "LayerNorm", "bias_gelu": "GELU", "fp8_cast": "casts",
    "fp8_feed_forward": "GELU", "embeddings": "embeddings", "scatter": "embeddings", "cross_entropy": "head, loss",
    "lamb": "LAMB", "lans": "LANS", "arithmetic": "sums over rows",
}  # fmt: skip
LIBRARIES = {  # of others, in this order
    "attention": re.compile(r"sdpa|flash|fmha|mha_", re.IGNORECASE),
    "communication": re.compile(r"nccl", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|cublas|cutlass|xmma", re.IGNORECASE),
}


def part_of(kernel: str) -> str:
    """The part of a kernel by its name in a profile."""
    for module, part in PARTS.items():
        if kernel.startswith(f"{module}_"):
            return part
    return next((part for part, names in LIBRARIES.items() if names.search(kernel)), "other")


def by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums of (name, milliseconds) by part."""
    found: dict[str, float] = {}
    for name, milliseconds in kernels:
        found[part_of(name)] = found.get(part_of(name), 0.0) + milliseconds
    return found


def beside(modelled: Mapping[str, float], results: Path, precision: str, rows: int) -> dict[str, Any]:
    """Milliseconds by part: modelled, measured, and measured less modelled, the largest first: where to look next.

    results: results.jsonl of gpu_all.py; in a profile the head's products count as products. Raises SystemExit where
    it has no profile of that precision and size.
    """
    try:
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{results}: not a results file of gpu_all.py ({error})") from None
    profiles = [line for line in lines if line.get("profile") == precision and line.get("rows") == rows]
    if not profiles:
        raise SystemExit(f"{results}: no profile of {rows} rows in {precision}: python bench/gpu_all.py --only profile")
    expected: dict[str, float] = {}
    for name, milliseconds in modelled.items():
        part = "products" if name.startswith("products") else name
        expected[part] = expected.get(part, 0.0) + milliseconds
    measured = profiles[-1]["parts"]
    pairs = {part: (expected.get(part, 0.0), measured.get(part, 0.0)) for part in expected | measured}
    ordered = sorted(pairs.items(), key=lambda item: item[1][0] - item[1][1])
    return {
        part: {"modelled": round(a, 2), "measured": round(b, 2), "difference": round(b - a, 2)}
        for part, (a, b) in ordered
    }
