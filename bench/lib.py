"""Shared by all benchmarks: command line, timing in turns, machine, one JSON line. No torch."""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
# So that a plain checkout suffices; before installed packages, so that its own code is measured.
sys.path[1:1] = [str(ROOT / "implementations"), str(ROOT)]
from common.process import one_line, root_cause  # noqa: E402  (found by the line above)

PACKAGES = (
    "torch", "numpy", "numba", "scipy", "h5py", "tokenizers", "triton", "transformers",
    "mlperf-logging",
    "nvidia-dali-cuda130",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Help shows the script's docstring; errors are one line and exit status 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(
            2,
            f"{self.prog}: error: {one_line(message)}; see --help\n",
        )


def integer(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")


def explain(error: BaseException) -> str:
    """Root cause in one line; all tracebacks are printed to stderr."""
    traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    cause = root_cause(error)
    # A problem is one field of a JSON line, so it is short; stderr has the rest.
    return one_line(f"{type(cause).__name__}: {cause}")


def in_turns(
    functions: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each function, called in turns, so that other load affects all equally.

    Every other turn runs backwards, since the first function has the coldest caches.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            begin = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def output_of(*command: str) -> str:
    """Standard output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def machine() -> dict[str, Any]:
    """Hardware, commit and versions that figures depend on; the GPU only if torch is imported."""
    model = re.search(
        r"^model name\s*: (.*)", output_of("cat", "/proc/cpuinfo"), re.MULTILINE
    )
    facts: dict[str, Any] = {
        "cpu": model[1] if model else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        # A reader should see that others were using the machine.
        "load_average": round(os.getloadavg()[0], 1),
        "gpu": "none",
    }
    torch = sys.modules.get("torch")
    # A benchmark without torch must not wait seconds for its import.
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    facts["commit"] = (
        output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"
    )
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return facts


def emit(benchmark: str, figures: Mapping[str, Any], *, data: str = "") -> None:
    """Prints the result as one JSON line. data: the input, such as "Wikipedia mix (synthetic)"."""
    line: dict[str, Any] = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(
            ["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
        ),
    }
    # At once, since the process may be killed at its time limit.
    print(
        json.dumps(
            line
            | ({"data": data} if data else {})
            | dict(figures)
            | {"machine": machine()}
        ),
        flush=True,
    )
