"""Runs all GPU checks and benchmarks in one command and under ten minutes, from a plain checkout.

Needs torch, triton, h5py and transformers with their dependencies; installs nothing. Every
item is a separate process with a time limit, the most valuable first, so that one that hangs, dies
or cannot start loses no other item's figures. At its limit an item dumps every thread's stack.
Written to <output> as they arrive: all output of the items in stages.log, with full tracebacks;
all results in results.jsonl, one JSON line each, the last of an item being its exit. How each item
ended, the tables of docs/evidence.md and the best settings of this GPU come last, also after
SIGTERM and SIGHUP, which end the item that runs. What self_check has not found right is "unmeasured".
Exit status: 1 if an item failed or found a fault, 2, at once, if there is no GPU, 128 and more
after a signal.

usage: python bench/gpu_all.py [--output DIR] [--seconds 570] [--only steps_48 ...] [--tiny]
       python bench/gpu_all.py machine    prints GPU, clocks, driver and versions
"""

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import ROOT, Parser, emit, integer, output_of

BENCH = Path(__file__).resolve().parent
# As timeout(1) has it.
KILLED = 124  # exit status of an item that exceeded its limit
STACKS = 5  # seconds that a process may take to dump its stacks
STUCK = 10  # and to end when killed: one that is stuck in the driver does not
STEPS = "train_step.py"
SELF_CHECK = str(ROOT / "tests" / "self_check.py")


@dataclass(frozen=True)
class Item:
    """A process: a script of this folder with arguments, and its time limit in seconds.

    tiny: more arguments in a --tiny run. on_cpu: has something to do there.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    tiny: tuple[str, ...] = ("--tiny",)
    on_cpu: bool = False


# In this order: what runs, then whether it is right, then how fast. All limits together are the
# time of a run, so that an item that hangs takes no other's but for the seconds it takes to end
# it; what earlier items leave is added to a limit. They are estimates: PyTorch is read from a cold
# disk, self_check compiles most kernels, and reads the trials of attention that were kept.
ITEMS = [
    Item("machine", ("gpu_all.py", "machine"), 40, tiny=(), on_cpu=True),
    Item("attention", ("kernels.py", "attention"), 45),
    Item("self_check", (SELF_CHECK,), 150, on_cpu=True),
    Item("steps_48", (STEPS, "--group", "rows 48"), 50),
    Item("profile", (STEPS, "--profile"), 30, on_cpu=True),
    Item("steps_96", (STEPS, "--group", "rows 96"), 35),
    Item("trials", (STEPS, "--group", "trials"), 35),
    Item("peers", (STEPS, "--group", "peers"), 65, on_cpu=True),
    Item("gemm", ("kernels.py", "gemm"), 25, on_cpu=True),
    Item("steps_24", (STEPS, "--group", "rows 24"), 55, on_cpu=True),
    Item("convergence", ("convergence.py",), 40, ("--steps", "25"), on_cpu=True),
]
SECONDS = sum(item.seconds for item in ITEMS)
# Of the table: the figure of train_step.py, and its format.
COLUMNS = {
    "ms": ("milliseconds", ".2f"),
    "sequences/s": ("sequences_per_second", ",.0f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "TFLOP/s": ("model_tflops", ".0f"),
    "of the ceiling": ("share_of_ceiling", ".0%"),
    "peak GiB": ("peak_gib", ".1f"),
}


class Recorder:
    """Collects results, also in <folder>/results.jsonl; the items' output goes to stages.log.

    process: the item that runs; signum: of the signal that ended the run, or 0.
    """

    process: subprocess.Popen[bytes] | None = None
    signum = 0

    def __init__(self, folder: Path) -> None:
        self.results: list[dict[str, Any]] = []
        # Open until the process ends. The items append to the log themselves; without a buffer,
        # to keep the order of lines.
        self.log = open(folder / "stages.log", "w+b", buffering=0)  # noqa: SIM115
        self.file = (folder / "results.jsonl").open("w", encoding="utf-8", buffering=1)

    def result(self, name: str, values: dict[str, Any]) -> None:
        self.results.append({"stage": name} | values)
        try:
            self.file.write(json.dumps(self.results[-1]) + "\n")
        except OSError as error:  # a full disk: the table is printed all the same
            print(f"gpu_all: results.jsonl: {error}", file=sys.stderr)

    def end(self, signum: int, _: object) -> None:
        """Handler of a signal: the item that runs ends with its children."""
        self.signum = signum
        if self.process is not None:
            kill(self.process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends an item and what it started, which could hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def exit_status(process: subprocess.Popen[bytes], limit: float) -> int:
    """Of an item that has ended or reached its limit; nothing of it is left."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        # Faulthandler dumps the stacks of all threads.
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STACKS)
        return KILLED
    finally:
        kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STUCK)


def run(item: Item, limit: float, tiny: bool, recorder: Recorder) -> dict[str, Any]:
    """Runs an item until it ends or exceeds its limit; returns how it ended."""
    script, *arguments = item.command
    command = [sys.executable, "-X", "faulthandler", str(BENCH / script), *arguments]
    begin, before = time.monotonic(), len(recorder.results)
    recorder.log.write(f"=== {item.name}\n".encode())
    start = recorder.log.tell()
    process = subprocess.Popen(
        [*command, *(item.tiny if tiny else ())],
        cwd=ROOT,
        start_new_session=True,  # to kill an item together with its children
        stdout=recorder.log,
        stderr=recorder.log,
    )
    recorder.process = process
    if recorder.signum:  # it came while the process was started
        kill(process)
    status = exit_status(process, limit)
    recorder.process = None
    output = (
        Path(recorder.log.name)
        .read_bytes()[start:]
        .decode(errors="replace")
        .splitlines()
    )
    for line in output:
        # Other lines of its output are for the log only, as is one that a kill has cut off.
        with contextlib.suppress(ValueError):
            if line.startswith("{"):
                recorder.result(item.name, json.loads(line))
    # The last lines of its output: usually the error.
    said = [
        line.strip() for line in output if line.strip() and not line.startswith("{")
    ]
    reason = " | ".join(said[-3:])
    faults = faults_in(recorder.results[before:])
    if recorder.signum:
        status = 128 + recorder.signum
        reason = f"ended by {signal.Signals(recorder.signum).name}"
    elif status == KILLED:
        reason = "exceeded its limit (stages.log has the stacks)"
    elif status < 0:
        reason = f"killed by {signal.Signals(-status).name}: {reason}"
    elif status:
        reason = reason or f"exit status {status}"
    # An item may end well although a variant could not be measured.
    elif faults:
        status, reason = 1, "; ".join(faults)[:200]
    else:
        reason = ""
    seconds = round(time.monotonic() - begin, 1)
    return {"status": status, "reason": reason, "ended": True, "seconds": seconds}


def run_all(items: list[Item], end: float, tiny: bool, recorder: Recorder) -> int:
    """Runs the items as time allows, without a GPU none or tiny ones; returns how many failed."""
    failed, due = 0, time.monotonic()
    for item in items:
        missing = no_gpu(recorder.results)
        if recorder.signum or (missing and not tiny):
            break
        if missing and not item.on_cpu:
            continue
        # A busy CPU may be slow, and nothing is measured there.
        patience = 3 if tiny else 1
        due += patience * item.seconds
        limit = min(due, end) - time.monotonic()
        # Less than 10 s would only import PyTorch.
        if limit < min(10, item.seconds / 2):
            ending = {
                "status": KILLED,
                "reason": "no time left",
                "ended": True,
                "seconds": 0,
            }
        else:
            print(f"{item.name} ...", file=sys.stderr)
            try:
                ending = run(item, limit, tiny, recorder)
            except (
                OSError
            ) as error:  # no process, a full disk: the next may be measured
                reason = f"gpu_all: {error}"
                ending = {"status": 1, "reason": reason, "ended": True, "seconds": 0}
        recorder.result(item.name, ending)
        failed += bool(ending["status"])
    return failed


def no_gpu(results: list[dict[str, Any]]) -> str:
    """Why there is no GPU, as the item machine, the first, has found; else empty."""
    return next((one["no_gpu"] for one in results if one.get("no_gpu")), "")


def steps_in(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if "variant" in result]


def faults_in(results: list[dict[str, Any]]) -> list[str]:
    """What an item could not measure although it ended well."""
    faults = [result["problem"] for result in results if "problem" in result]
    times = [
        step["milliseconds"] for step in steps_in(results) if "milliseconds" in step
    ]
    return faults + [f"{time} ms" for time in times if not math.isfinite(time)]


def doubt(results: list[dict[str, Any]]) -> str:
    """Why figures of our kernels do not count: self_check has not found them right; else empty."""
    checks = [result for result in results if result["stage"] == "self_check"]
    if any(check.get("ended") and not check["status"] for check in checks):
        return ""
    return "unverified: self_check did not succeed"


def problem_of(step: dict[str, Any], doubts: str) -> str:
    """Why a step has no valid figures; else empty. doubts: about our own variants."""
    if reason := step.get("problem") or step.get("left_out"):
        return str(reason)[:80]
    if not math.isfinite(step["milliseconds"]):
        return f"{step['milliseconds']} ms"
    # Fast and wrong is not a figure.
    return doubts if step["variant"].startswith("ours") else ""


def table(results: list[dict[str, Any]]) -> str:
    """Table of the steps in Markdown."""
    rows = [["group", "step of BERT-large", "rows", *COLUMNS], ["---"] * 9]
    doubts = doubt(results)
    for step in steps_in(results):
        figures = [f"unmeasured ({problem_of(step, doubts)})", *[""] * 5]
        if not problem_of(step, doubts):
            figures = [format(step[key], how) for key, how in COLUMNS.values()]
        rows.append([step["group"], step["variant"], str(step["rows"]), *figures])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def best_settings(results: list[dict[str, Any]]) -> str:
    """Exports for the fastest of our steps; empty if none has valid figures."""
    doubts = doubt(results)
    valid = [step for step in steps_in(results) if not problem_of(step, doubts)]
    rates = [
        (step["sequences_per_second"], step["settings"])
        for step in valid
        # A trial is fast before it is known to be accurate.
        if "settings" in step and step["group"] != "trials"
    ]
    if not rates:
        return ""
    rate, chosen = max(rates, key=lambda pair: pair[0])
    exports = " ".join(f"{name}={value}" for name, value in chosen.items())
    return f"# best settings of this GPU: {rate:,.0f} sequences/s\nexport {exports}\n"


def show(results: list[dict[str, Any]]) -> None:
    """Prints how each item ended, the steps, and the best settings."""
    for result in results:
        if result.get("ended"):
            verdict = "ok" if not result["status"] else f"FAILED ({result['status']})"
            line = f"{result['stage']:<14} {verdict:<14} {result['seconds']:>6} s  {result['reason']}"
            print(line.rstrip())
    print(f"\n{table(results)}\n\n{best_settings(results)}", end="")


def machine() -> int:
    Parser(__doc__).parse_args()
    from torch_lib import gpu_state

    from bert.core.dist import why_no_gpu

    # Used memory is that of other processes.
    driver = output_of(
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,memory.used",
        "--format=csv,noheader",
        "--id=0",
    )
    why = why_no_gpu()
    if why and driver:
        why += f"; nvidia-smi sees {driver}"
    emit("machine", {"driver": driver, "no_gpu": why, "clocks": gpu_state()})
    return 0


def main() -> int:
    if sys.argv[1:2] == ["machine"]:
        del sys.argv[1]
        return machine()
    parser = Parser(__doc__)
    folder = os.environ.get("OUT", "bench_results")
    parser.add_argument(
        "--output",
        type=Path,
        default=folder,
        help="(default: $OUT, else bench_results)",
    )
    parser.add_argument(
        "--seconds",
        type=integer,
        default=SECONDS,
        help=f"total time limit (default {SECONDS})",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[item.name for item in ITEMS],
        help="run only these items",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny sizes, on a CPU too; to try out the command",
    )
    options = parser.parse_args()
    items = [
        item
        for item in ITEMS
        # machine always runs: it says what the figures were measured on.
        if not options.only or item.name in (*options.only, "machine")
    ]
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        recorder = Recorder(options.output)
    except OSError as error:
        parser.error(f"--output {options.output}: {error.strerror}")
    # An item that dies leaves no file of its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The machine may be taken away at any moment: what was measured is still shown.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, recorder.end)
    failed = run_all(items, time.monotonic() + options.seconds, options.tiny, recorder)
    missing = no_gpu(recorder.results)
    if missing and not options.tiny:
        said = "nothing was measured; --tiny tries out the command"
        print(f"gpu_all: no GPU: {missing}: {said}", file=sys.stderr)
        return 2
    show(recorder.results)
    return 128 + recorder.signum if recorder.signum else int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
