"""Everything that a GPU can check and measure, in one command and under nine minutes, from a plain checkout.

Needs torch, triton, h5py and transformers (and their own dependencies); nothing is installed. Runs the tests marked gpu
where pytest and hypothesis are there, else a self-check (every fused kernel against its reference, every attention
backend, a graphed step against an eager one), then each benchmark as a process of its own with a time limit. Every
result is one line of <output>/results.jsonl, at once; a short table comes last. Exit status: 1 where a check failed or
a benchmark gave none.

usage: python bench/gpu_all.py [--output bench_results] [--minutes 8.5] [--only train_step ...] [--tiny] [--tables]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent

# name, arguments, arguments of a trial run on a machine without a GPU (None: needs a GPU), seconds at the most
STAGES: list[tuple[str, list[str], list[str] | None, int]] = [
    ("check", [], ["--tiny"], 150),
    (
        "train_step",
        ["--profile"],
        ["--tiny", "--groups", "main", "peers", "--rounds", "1", "--steps", "1", "--profile"],
        240,
    ),
    ("gemm", [], ["--tiny"], 60),
    ("convergence", [], ["--steps", "25"], 60),
    ("attention", [], None, 60),
    ("layernorm", ["--no-compile"], None, 45),
    ("lamb", [], None, 45),
    ("loss", ["--no-compile"], None, 45),
]
LAST_VARIANTS = 75  # seconds from the deadline of train_step, where nothing more begins, to its end


def command_of(name: str, arguments: list[str]) -> list[str]:
    """The process of a stage: a benchmark, or the tests."""
    if name != "check":
        return [sys.executable, str(BENCH / f"{name}.py"), *arguments]
    if importlib.util.find_spec("pytest") and importlib.util.find_spec("hypothesis") and not arguments:
        tests = [str(ROOT / "tests" / "bert" / name) for name in ("kernels", "test_graph.py")]
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *tests]
    return [sys.executable, str(BENCH / "self_check.py"), *arguments]


def run(name: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    """Runs a stage; its last JSON line, or what went wrong."""
    if name == "train_step":
        arguments = [*arguments, "--deadline", f"{max(seconds - LAST_VARIANTS, 1):.0f}"]
    begin = time.monotonic()
    paths = [str(ROOT / "implementations"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    result: dict[str, Any] = {"stage": name}
    try:
        finished = subprocess.run(
            command_of(name, arguments), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
        status, output, errors = finished.returncode, finished.stdout, finished.stderr
    except subprocess.TimeoutExpired as expired:
        status, output, errors = 124, _text(expired.stdout), _text(expired.stderr)
    for text in reversed(output.splitlines()):
        if text.startswith("{"):
            result |= json.loads(text)
            break
    else:
        result["output"] = output[-6000:]
    if status:
        result["errors"] = errors[-4000:]
    return result | {"status": status, "seconds": round(time.monotonic() - begin, 1)}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def rows_of(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Lines of the table of steps: variant, rows, ms, sequences/s, TFLOP/s, share of the ceiling, memory."""
    lines = []
    for result in results:
        for name, group in result.get("groups", {}).items():
            for one in group:
                if "problem" in one:
                    figures: tuple[str, ...] = (one["problem"][:60], "", "", "", "")
                else:
                    figures = (
                        f"{one['milliseconds']:.2f}", f"{one['sequences_per_second']:,.0f}",
                        f"{one['model_tflops']:.0f}", f"{one['share_of_ceiling']:.0%}", f"{one['peak_gib']:.1f}",
                    )  # fmt: skip
                lines.append((name, one["variant"], str(one["rows"]), *figures))
    return lines


def show(results: list[dict[str, Any]]) -> None:
    """Prints how each stage went, then the steps."""
    for result in results:
        verdict = "ok" if result["status"] == 0 else f"FAILED ({result['status']})"
        print(f"{result['stage']:<12} {verdict:<14} {result['seconds']:>6} s")
        if result["status"]:
            print("   ", " | ".join((result.get("errors") or result.get("output", "")).strip().splitlines()[-3:]))
    header = ("group", "variant", "rows", "ms", "sequences/s", "TFLOP/s", "ceiling", "GiB")
    table = [header, *rows_of(results)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def main() -> int:
    """Runs the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("bench_results"), help="folder (default bench_results)")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for all of it (default 8.5)")
    parser.add_argument("--only", nargs="+", choices=[name for name, *_ in STAGES], help="these stages")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and what runs on a CPU, to try the command out")
    parser.add_argument("--tables", action="store_true", help="write the tables in docs/performance.md as well")
    options = parser.parse_args()
    if options.tiny and options.tables:
        parser.error("--tables writes measured figures in the document, and those of --tiny are none")
    options.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results = []
    with open(options.output / "results.jsonl", "w", encoding="utf-8") as file:
        for name, arguments, tiny, seconds in STAGES:
            if (options.only and name not in options.only) or (options.tiny and tiny is None):
                continue
            limit = min(seconds, end - time.monotonic())
            if limit < 10:
                result: dict[str, Any] = {"stage": name, "status": 124, "seconds": 0, "errors": "no time left"}
            else:
                print(f"{name} ...", file=sys.stderr, flush=True)
                result = run(name, tiny if options.tiny and tiny is not None else arguments, limit)
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
    show(results)
    if options.tables:
        import tables

        tables.write(options.output / "results.jsonl", ROOT / "docs" / "performance.md")
    return int(any(result["status"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
