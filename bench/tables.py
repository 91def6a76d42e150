"""Writes the GPU tables of docs/evidence.md from a results file of gpu_all.py, between their markers.

What was not measured says so: without a results file every row is "unmeasured".

usage: python bench/tables.py [--results bench_results/results.jsonl] [--document docs/evidence.md]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from command_line import Parser

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- gpu tables: begin (bench/tables.py writes what is between) -->", "<!-- gpu tables: end -->"
UNMEASURED = "unmeasured"
# The rows that a complete run has, in order: (group, variant).
EXPECTED = [
    ("main", "ours", 24), ("main", "ours, fp8", 24), ("main", "ours, eager", 24), ("main", "ours, FUSED=none", 24),
    ("rows 48", "ours", 48), ("rows 48", "ours, fp8", 48), ("rows 96", "ours", 96), ("rows 96", "ours, fp8", 96),
    ("peers", "Hugging Face padded, eager", 24), ("peers", "Hugging Face packed, eager", 24),
    ("compiled peers", "Hugging Face padded, compiled", 24), ("compiled peers", "Hugging Face packed, compiled", 24),
]  # fmt: skip
FUSED_VARIANTS = [
    "ours", "ours, without fused embeddings", "ours, without fused dropout_add_layer_norm",
    "ours, without fused bias_gelu", "ours, without fused cross_entropy", "ours, without fused lamb",
    "ours, FUSED=none",
]  # fmt: skip


def read(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a results file; none without one. Raises ValueError for a file that is not one."""
    if path is None or not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path}: not a results file of gpu_all.py ({error})") from None


def document(results: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""
    steps: dict[str, Any] = {"groups": {}}
    for result in results:
        if "groups" in result:  # a later line of a group has all that an earlier one had
            steps |= {key: value for key, value in result.items() if key != "groups"}
            steps["groups"] = steps["groups"] | result["groups"]
    tables = [_step_table(steps), _fused_table(steps), _gemm_table(results), _kernel_table(results)]
    return "\n\n".join([_machine(steps), *tables])


def _machine(steps: dict[str, Any]) -> str:
    machine = steps.get("machine")
    if not machine:
        return "No GPU run is recorded yet. `python bench/gpu_all.py --tables` measures all of this and fills it in."
    described = ", ".join(f"{name} {value}" for name, value in machine.items())
    return f"Command: `python bench/gpu_all.py --tables`. {described}; ceiling {steps['ceiling_tflops']:.0f} TFLOP/s."


def _step_table(steps: dict[str, Any]) -> str:
    measured = {
        (group, one["variant"], one["rows"]): one for group, lines in steps.get("groups", {}).items() for one in lines
    }
    rows = list(EXPECTED) + [key for key in measured if key not in EXPECTED and key[0] != "kernels"]
    lines = ["| step of BERT-large | rows | ms | sequences/s | tokens/s | TFLOP/s | of the ceiling | peak GiB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for key in rows:
        group, variant, count = key
        label = variant if (group, variant, count) in EXPECTED else f"{variant} ({group})"
        one = measured.get(key)
        if one is None or "milliseconds" not in one:
            reason = f" ({one['problem'][:80]})" if one and one.get("problem") else ""
            lines.append(f"| {label} | {count} | {UNMEASURED}{reason} | | | | | |")
            continue
        lines.append(
            f"| {label} | {count} | {one['milliseconds']:.2f} | {one['sequences_per_second']:,.0f} | "
            f"{one['tokens_per_second']:,.0f} | {one['model_tflops']:.0f} | {one['share_of_ceiling']:.0%} | "
            f"{one['peak_gib']:.1f} |"
        )
    return "\n".join(lines)


def _fused_table(steps: dict[str, Any]) -> str:
    """What each fused kernel is worth: the step without it beside the whole one, of the same group."""
    measured = {one["variant"]: one for one in steps.get("groups", {}).get("kernels", [])}
    whole = measured.get("ours", {}).get("milliseconds")
    lines = ["| step of BERT-large, 24 rows, in turns | ms | of ours |", "|---|---|---|"]
    for variant in [*FUSED_VARIANTS, *(name for name in measured if name not in FUSED_VARIANTS)]:
        one = measured.get(variant, {})
        if "milliseconds" in one:
            share = f"{one['milliseconds'] / whole:.3f}" if whole else ""
            lines.append(f"| {variant} | {one['milliseconds']:.2f} | {share} |")
        else:
            reason = f" ({one['problem'][:80]})" if one.get("problem") else ""
            lines.append(f"| {variant} | {UNMEASURED}{reason} | |")
    return "\n".join(lines)


def _gemm_table(results: list[dict[str, Any]]) -> str:
    gemm = next((result for result in results if result.get("stage") == "gemm" and "tflops" in result), None)
    lines = [
        "| products of a layer, both passes | bf16 TFLOP/s | fp8 TFLOP/s, without casts | fast sums backward too |",
        "|---|---|---|---|",
    ]
    if gemm is None:
        return "\n".join([*lines, f"| 24,576 tokens | {UNMEASURED} | | |", f"| 49,152 tokens | {UNMEASURED} | | |"])
    for tokens, table in gemm["tflops"].items():
        rates = " | ".join(f"{table[kind]['layer']:.0f}" for kind in ("bf16", "fp8", "fp8_fast"))
        lines.append(f"| {int(tokens):,} tokens | {rates} |")
    return "\n".join(lines)


def _kernel_table(results: list[dict[str, Any]]) -> str:
    lines = ["| kernel, 48 rows | precision | ms a step | calls a step |", "|---|---|---|---|"]
    measured = {result["profile"]: result["top_kernels"] for result in results if "top_kernels" in result}
    for precision in ("bf16", "fp8"):
        if precision not in measured:
            lines.append(f"| all | {precision} | {UNMEASURED} | |")
        for one in measured.get(precision, []):
            name = one["kernel"].replace("|", "\\|")
            lines.append(f"| `{name[:90]}` | {precision} | {one['ms_per_step']:.3f} | {one['calls_per_step']:g} |")
    return "\n".join(lines)


def write(results: Path | None, target: Path) -> None:
    """Replaces what is between the markers of ``target``, which is written whole or not at all.

    Raises ValueError where it has no markers.
    """
    text = target.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{target}: expected the lines '{BEGIN}' and '{END}' once each")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    beside = target.with_name(f".{target.name}.partial")
    beside.write_text(f"{before}{BEGIN}\n\n{document(read(results))}\n\n{END}{after}", encoding="utf-8")
    os.replace(beside, target)


def main() -> int:
    """Writes the tables."""
    parser = Parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("bench_results/results.jsonl"), help="of gpu_all.py")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "evidence.md", help="file with the markers")
    options = parser.parse_args()
    try:
        write(options.results, options.document)
    except (OSError, ValueError) as error:
        print(f"tables: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
