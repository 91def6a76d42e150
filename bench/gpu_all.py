"""Runs all GPU checks and benchmarks in one command and under nine minutes, from a plain checkout.

Needs torch, triton, h5py and transformers with their dependencies; installs nothing. Every item is a separate process
with a time limit, the most valuable first, so that one that hangs, dies or cannot start loses no other item's figures.
Written to <output> as they arrive: all output of the items in stages.log, with full tracebacks; all results in
results.jsonl, one JSON line each, the last of an item being its exit. Step times also go to stderr; a short table and
the best settings of this GPU, as exports, come last, also after SIGTERM, which ends the item that runs. Exit status: 1
if an item failed or found a fault, 2, at once, if there is no GPU, 128 and more after a signal.

--tables updates the GPU tables in docs/evidence.md, between their markers; missing figures, those of a group killed in
its first turn, and those of kernels that fail self_check read "unmeasured". --config writes a config with the best
settings; --results uses the file of an earlier run for both. machine prints GPU, clocks, driver and versions.
Items run under this script's guard: five seconds before the process is killed at its limit, it dumps every thread's
stack to stderr; errors are printed with the whole chain, root cause last (ending a CUDA graph capture raises another
error, which hides the cause).

usage: python bench/gpu_all.py [--output DIR] [--seconds 520] [--only steps_48 ...] [--tiny] [--tables] [--config FILE]
       python bench/gpu_all.py --results bench_results/results.jsonl [--tables] [--config configs/config_MINE.sh]
       python bench/gpu_all.py machine
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lib import ROOT, Parser, emit, explain, file, new_folder, output_of, positive

from common.files import write_text

BENCH = Path(__file__).resolve().parent
# As timeout(1) has it.
KILLED = 124  # exit status of an item that exceeded its limit
LAST = 25  # seconds before its limit at which a step benchmark starts nothing more
BEFORE = 5  # seconds before the limit at which stacks are dumped
CONFIG_PARTS = ("begin.sh", "global_batch_768.sh", "common.sh")
BEGIN, END = (
    "<!-- gpu tables: begin (bench/gpu_all.py writes what is between) -->",
    "<!-- gpu tables: end -->",
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A process: a script of this folder or a module (``-m``) with arguments, and its time limit in seconds.

    tiny: more arguments in a --tiny run; None: not part of it. needs: skipped without these packages. unless: runs only
    if that item timed no step.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    tiny: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    unless: str = ""


def _steps(name: str, group: str, seconds: float, tiny: bool = False, unless: str = "") -> Item:
    once = ("--tiny", "--rounds", "1", "--steps", "1") if tiny else None
    # The limit is known only at the start, when other items have used their time.
    command = ("train_step.py", "--groups", group, "--deadline", "{deadline}")
    return Item(name=name, command=command, seconds=seconds, tiny=once, unless=unless)


GPU_TESTS = tuple(
    str(ROOT / "tests" / "bert" / name) for name in ("kernels", "training/test_graph.py")
)
PYTEST = (
    "-m",
    "pytest",
    "-v",
    "--tb=short",
    "-rA",
    "--durations=10",
    "--continue-on-collection-errors",
    "-m",
    "gpu",
)
# In this order as time allows: what runs, then whether it is right, then how fast.
ITEMS = [
    Item(
        name="machine", command=("gpu_all.py", "machine"), seconds=45, tiny=()
    ),  # PyTorch is read from a cold disk
    Item(
        name="self_check",
        command=(str(ROOT / "tests" / "self_check.py"),),
        seconds=85,
        tiny=("--tiny",),
    ),
    _steps("steps_48", "rows 48", 80),
    _steps("steps_48_plain", "rows 48 plain", 60, unless="steps_48"),
    Item(name="profile", command=("train_step.py", "--profile"), seconds=45, tiny=("--tiny",)),
    _steps("steps_96", "rows 96", 60),
    _steps("peers", "peers", 120, tiny=True),
    Item(name="attention", command=("kernels.py", "attention"), seconds=35),
    Item(name="gemm", command=("kernels.py", "gemm"), seconds=40, tiny=("--tiny",)),
    _steps("steps_fp8", "fp8 48", 60),
    _steps("steps_24", "main", 70, tiny=True),
    Item(
        name="kernel_tests",
        command=(*PYTEST, *GPU_TESTS),
        seconds=90,
        needs=("pytest", "hypothesis"),
    ),
    Item(name="operations", command=("kernels.py", "operations"), seconds=60),
    _steps("steps_attention", "attention", 60),
    Item(name="convergence", command=("convergence.py",), seconds=60, tiny=("--steps", "25")),
    _steps("steps_fused", "kernels", 60),
]


class Recorder:
    """Writes results to <folder>/results.jsonl as they arrive, and the items' output to stages.log.

    defaults: environment variables of the items, unless set. process: the item that runs; signum: of the signal that
    ended the run, or 0.
    """

    process: subprocess.Popen[bytes] | None = None
    signum = 0

    def __init__(self, folder: Path, defaults: dict[str, str] | None = None) -> None:
        self.defaults, self.results = defaults or {}, list[dict[str, Any]]()
        # Without a buffer, since the items write into the same file.
        self.log = open(folder / "stages.log", "w+b", buffering=0)  # noqa: SIM115 (open until the process ends)
        self.file = open(folder / "results.jsonl", "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def result(self, name: str, values: dict[str, Any]) -> None:
        self.results.append({"stage": name} | values)
        self.file.write(json.dumps(self.results[-1]) + "\n")

    def end(self, signum: int, _: object) -> None:
        """Handler of a signal: the item that runs ends with its children, which could hold the GPU."""
        self.signum = signum
        if self.process is not None:
            kill(self.process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends an item and what it started, which could hold its pipes and the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def command_of(item: Item, limit: float, tiny: bool) -> list[str]:
    script, *arguments = item.command
    arguments = [argument.format(deadline=max(round(limit - LAST), 1)) for argument in arguments]
    # faulthandler also prints the stacks of a segmentation fault.
    command = [sys.executable, "-X", "faulthandler", __file__, "guard", f"{limit:.0f}"]
    command.append(script if script == "-m" else str(BENCH / script))
    return [*command, *arguments, *((item.tiny if tiny else None) or ())]


def run(item: Item, limit: float, tiny: bool, recorder: Recorder) -> dict[str, Any]:
    """Runs an item until it ends or exceeds its limit; returns how it ended."""
    paths = [str(ROOT / "implementations"), os.environ.get("PYTHONPATH", "")]
    # Unbuffered, so that lines are here before a kill.
    environment = recorder.defaults | os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    begin, before, cut, over = time.monotonic(), len(recorder.results), False, threading.Event()
    recorder.log.write(f"=== {item.name}\n".encode())
    start = recorder.log.tell()

    def read(stream: IO[bytes]) -> None:
        nonlocal cut
        for raw in stream:
            # A grandchild that still writes into the pipe must not mix into the next item.
            if over.is_set():
                return
            recorder.log.write(raw)
            # Other lines of its output are for the log only.
            if raw.startswith(b"{"):
                try:
                    values = json.loads(raw)
                except ValueError:  # the process ended within the line
                    cut = True
                    continue
                recorder.result(item.name, values)
                for (group, variant, rows), one in steps_in([values]).items():
                    figures = " ms ".join(filter(None, figures_of(one | {"early": False})[:2]))
                    print(
                        f"  {group}: {variant}, {rows} rows: {figures}", file=sys.stderr, flush=True
                    )

    try:
        process = subprocess.Popen(
            # A session of its own, to kill an item together with its children.
            command_of(item, limit, tiny), cwd=ROOT, env=environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=recorder.log,
        )  # fmt: skip
    except OSError as error:
        # As a shell has it for a command that it does not find.
        status, reason = 127, f"cannot start: {error}"
    else:
        thread = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        thread.start()
        recorder.process = process
        if recorder.signum:  # it came while the process was started
            kill(process)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = KILLED
        recorder.process = None
        kill(process)
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # a process stuck in the driver cannot be killed
            process.wait(10)
        thread.join(5)  # a process in another session may hold the pipe: its further output is lost
        over.set()
        output = Path(recorder.log.name).read_bytes()[start:].decode(errors="replace").splitlines()
        # The last lines of its output: usually the error.
        reason = " | ".join(
            [line.strip() for line in output if line.strip() and not line.startswith("{")][-3:]
        )
        faults = faults_in(recorder.results[before:])
        if recorder.signum:
            status, reason = 128 + recorder.signum, signal.Signals(recorder.signum).name
            reason = f"ended by {reason}"
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
            reason = "its last line is truncated" if cut else ""
    seconds = round(time.monotonic() - begin, 1)
    count = len(recorder.results) - before
    return {"status": status, "reason": reason, "ended": True, "seconds": seconds, "results": count}


def steps_in(results: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Steps by (group, variant, rows); a later line of a group includes all of the earlier ones."""
    groups = [group for result in results for group in result.get("groups", {}).items()]
    return {(name, one["variant"], one["rows"]): one for name, group in groups for one in group}


def faults_in(results: list[dict[str, Any]]) -> list[str]:
    """What an item could not measure although it ended well: its own problem, and those of variants of the step."""
    faults = [str(result["problem"]) for result in results if "problem" in result]
    for (_, variant, rows), step in steps_in(results).items():
        if "problem" in step:
            faults.append(f"{variant}, {rows} rows: {step['problem']}")
        elif not math.isfinite(step.get("milliseconds", 0.0)):
            faults.append(f"{variant}, {rows} rows: {step['milliseconds']} ms")
    return faults


STEP_COLUMNS = ("ms", "sequences/s", "tokens/s", "TFLOP/s", "of the ceiling", "peak GiB")


def doubt(results: list[dict[str, Any]]) -> str:
    """Why figures of our kernels do not count: what self_check found wrong, or that it did not finish; else empty."""
    # Fast and wrong is not a figure: until self_check has passed, our kernels have none.
    checks = [result for result in results if result["stage"] == "self_check"]
    ended = next((result for result in checks if result.get("ended")), None)
    if ended is not None and not ended["status"]:
        return ""
    wrong = [
        name
        for check in checks
        for name, found in check.items()
        if isinstance(found, dict) and name != "machine"
    ]
    return f"unverified: self_check {'failed: ' + ', '.join(dict.fromkeys(wrong)) if wrong else 'did not succeed'}"


def figures_of(step: dict[str, Any], doubts: str = "") -> list[str]:
    """Values of STEP_COLUMNS, or why there are none. doubts: about our own variants, see ``doubt``."""
    reason = step.get("problem", "")
    if "milliseconds" in step:
        reason = f"only one turn, {step['milliseconds']:.1f} ms" if step.get("early") else ""
        reason = reason or (doubts if step["variant"].startswith("ours") else "")
        if not math.isfinite(step["milliseconds"]):
            reason = f"{step['milliseconds']} ms"
    # A word instead of a number: a table must not show what was not measured whole.
    if reason or "milliseconds" not in step:
        return [
            f"unmeasured{f' ({reason[:80]})' if reason else ''}",
            *[""] * (len(STEP_COLUMNS) - 1),
        ]
    return [
        f"{step['milliseconds']:.2f}", f"{step['sequences_per_second']:,.0f}", f"{step['tokens_per_second']:,.0f}",
        f"{step['model_tflops']:.0f}", f"{step['share_of_ceiling']:.0%}", f"{step['peak_gib']:.1f}",
    ]  # fmt: skip


def show(results: list[dict[str, Any]]) -> None:
    """Prints how each item ended, the steps, and the best settings."""
    for result in results:
        if result.get("ended"):
            verdict = "ok" if not result["status"] else f"FAILED ({result['status']})"
            print(
                f"{result['stage']:<14} {verdict:<14} {result['seconds']:>6} s  {result['reason']}".rstrip()
            )
    table = [("group", "variant", "rows", *STEP_COLUMNS)]
    doubts = doubt(results)
    table += [(*map(str, key), *figures_of(one, doubts)) for key, one in steps_in(results).items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
    with contextlib.suppress(ValueError):  # nothing to choose from
        chosen, words = best_settings(results)
        print(
            f"# best settings of this GPU: {words}\nexport {' '.join(f'{k}={v}' for k, v in chosen.items())}"
        )


class NoGpuError(Exception):
    """No GPU to measure; the message says why."""


def run_all(items: list[Item], end: float, tiny: bool, recorder: Recorder) -> int:
    """Runs the items as time allows; returns how many failed. Raises NoGpuError if the machine item finds no GPU."""
    failed = 0
    for item in items:
        if recorder.signum:
            break
        # The plain variants are there for the case that the fused ones do not run.
        replaced = steps_in(
            [result for result in recorder.results if result["stage"] == item.unless]
        )
        if any("milliseconds" in one for one in replaced.values()):
            continue
        patience = 3 if tiny else 1  # a busy CPU may be slow, and nothing is measured there
        limit = min(patience * item.seconds, end - time.monotonic())
        absent = [package for package in item.needs if importlib.util.find_spec(package) is None]
        ending: dict[str, Any] = {"ended": True, "seconds": 0}
        # Less than 10 s would only import PyTorch.
        if limit < min(10, item.seconds):
            ending |= {"status": KILLED, "reason": "no time left"}
        elif absent:
            ending |= {"status": 0, "reason": f"skipped: {', '.join(absent)} not installed"}
        else:
            print(f"{item.name} ...", file=sys.stderr, flush=True)
            ending = run(item, limit, tiny, recorder)
        recorder.result(item.name, ending)
        failed += bool(ending["status"])
        # Told by the item machine, the first: the others would all fail for the same reason.
        for result in recorder.results:
            if result.get("no_gpu") and not tiny:
                seen = f"; nvidia-smi sees {result['driver']}" if result.get("driver") else ""
                raise NoGpuError(
                    f"no GPU: {result['no_gpu']}{seen}: nothing was measured; --tiny tries out the command"
                )
    return failed


def row(*cells: object) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in map(str, cells))


def document(results: list[dict[str, Any]]) -> str:
    """Tables as Markdown, with all rows of a complete run (train_step.py)."""
    from train_step import groups

    steps: dict[str, Any] = {}
    for result in results:
        steps |= result if "groups" in result else {}
    intro = "No GPU run is recorded yet. `python bench/gpu_all.py --tables` measures this and fills it in."
    if steps.get("machine"):
        described = ", ".join(f"{name} {value}" for name, value in steps["machine"].items())
        ceiling = f"{steps['ceiling_tflops']:.0f} TFLOP/s"
        intro = f"Command: `python bench/gpu_all.py --tables`. {described}; ceiling {ceiling}."
    measured, known, doubts = steps_in(results), groups(on_gpu=True), doubt(results)
    wanted = [
        (group, one) for group in ("main", "rows 48", "rows 96", "peers") for one in known[group]
    ]
    expected = [
        (group, one.name, one.rows) for group, one in wanted if one.peer or group != "peers"
    ]
    lines = [
        intro,
        "",
        row("step of BERT-large", "rows", *STEP_COLUMNS),
        "|---" * (2 + len(STEP_COLUMNS)) + "|",
    ]
    # Expected rows keep their place even without a figure.
    for key in dict.fromkeys([*expected, *(key for key in measured if key[0] != "kernels")]):
        group, variant, count = key
        label = variant if key in expected else f"{variant} ({group})"
        lines.append(row(label, count, *figures_of(measured.get(key, {}), doubts)))
    # Step without each fused kernel, relative to the full step of the same group.
    fused = {variant: one for (group, variant, _), one in measured.items() if group == "kernels"}
    timed = {name: figures_of(one, doubts)[0] for name, one in fused.items()}
    # Only turns of the same group share the chip's temperature and clocks.
    whole = fused["ours"]["milliseconds"] if timed.get("ours", "u")[0] != "u" else None
    lines += ["", row("step of BERT-large, 24 rows, in turns", "ms", "of ours"), "|---|---|---|"]
    for name in dict.fromkeys([*(variant.name for variant in known["kernels"]), *fused]):
        figure = timed.get(name, "unmeasured")
        share = f"{fused[name]['milliseconds'] / whole:.3f}" if whole and figure[0] != "u" else ""
        lines.append(row(name, figure, share))
    return "\n".join(lines)


def write_tables(results: list[dict[str, Any]], target: Path) -> None:
    """Replaces the text between the markers of ``target``. Raises ValueError if they are missing."""
    text = target.read_text(encoding="utf-8")
    # With the markers damaged, replacing would delete text of the page.
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{target}: expected the lines '{BEGIN}' and '{END}' once each")
    before, _, rest = text.partition(BEGIN)
    write_text(target, f"{before}{BEGIN}\n\n{document(results)}\n\n{END}{rest.partition(END)[2]}")


def best_settings(results: list[dict[str, Any]]) -> tuple[dict[str, str], str]:
    """Exports for the fastest of our fully timed variants, and its description.

    Raises ValueError if nothing was timed.
    """
    from train_step import Variant, groups

    known = {
        (group, one.name, one.rows): one
        for group, some in groups(on_gpu=True).items()
        for one in some
    }
    doubts, rates = doubt(results), {}
    for key, step in steps_in(results).items():
        variant = known.get(key) or (
            Variant(name=key[1], rows=key[2]) if key[0] == "attention" else None
        )
        if variant and not variant.peer and not figures_of(step, doubts)[0].startswith("u"):
            rates[key] = step["sequences_per_second"], variant
    if not rates:
        raise ValueError(
            f"no step of ours was fully timed: no settings to choose{f' ({doubts})' if doubts else ''}"
        )
    rate, best = max(rates.values(), key=lambda found: found[0])
    tried = [
        one
        for result in results
        for one in result.get("tried_attention", [])
        if one["milliseconds"]
    ]
    # A fixed backend saves every run the trials; the fastest here is the fastest there.
    backend = best.attention
    if backend == "auto" and tried:
        backend = min(tried, key=lambda one: one["milliseconds"])["name"]
    chosen = {
        "PRECISION": best.precision,
        "BATCHSIZE": str(best.rows),
        "ATTENTION": backend,
        "FUSED": best.fused,
    }
    if not best.graph:
        chosen["CUDA_GRAPH"] = "0"
    words = f"{rate:,.0f} sequences/s, {best.name}"
    return {name: value for name, value in chosen.items() if value != "auto"}, words


def config_of(results: list[dict[str, Any]]) -> str:
    """A config for one GPU with its best settings and a global batch of 768. Raises ValueError as best_settings."""
    chosen, words = best_settings(results)
    rows = int(chosen.pop("BATCHSIZE"))
    machines = [result["machine"] for result in results if result.get("machine")]
    gpu = machines[-1]["gpu"] if machines else "one GPU"
    exports = " ".join(f"{name}={value}" for name, value in chosen.items())
    here = '"$(dirname -- "${BASH_SOURCE[0]}")'
    begin, batch, common = (
        f'# shellcheck source=configs/{part}\nsource {here}/{part}"' for part in CONFIG_PARTS
    )
    # A global batch of 768 sequences is 384 rows of two (PACKING_FACTOR).
    return f"""#!/usr/bin/env bash
# {gpu}: 1 node, 1 GPU, {rows} packed rows x {384 // rows} accumulated, global batch 768 sequences.
# Measured by bench/gpu_all.py: {words}.
{begin}
export DGXNNODES=1 DGXNGPU=1 BATCHSIZE={rows} GRADIENT_STEPS={384 // rows}
export {exports}
export WALLTIME_RUNANDTIME=120
{batch}
{common}
"""


def machine() -> int:
    Parser(__doc__).parse_args()
    import torch
    from torch_lib import gpu_state

    from bert.core.dist import why_no_gpu

    driver = output_of(
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total",
        "--format=csv,noheader",
        "--id=0",
    )
    described: dict[str, Any] = {"driver": driver, "no_gpu": why_no_gpu()}
    if not described["no_gpu"]:
        free, total = torch.cuda.mem_get_info()
        described |= {"memory_gib": round(total / 2**30, 1), "free_gib": round(free / 2**30, 1)}
    emit("machine", described | {"clocks": gpu_state()})
    return 0


def guard() -> int:
    limit, what, *arguments = sys.argv[1:]
    # The stacks show where it hangs; afterwards there would be no process to ask.
    faulthandler.dump_traceback_later(max(float(limit) - BEFORE, 1), exit=False)
    try:
        if what == "-m":
            sys.argv, sys.path[0] = arguments, os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [what, *arguments], str(Path(what).parent)
            runpy.run_path(what, run_name="__main__")
    # The cause in one line at the end, where the parent looks for the reason.
    except Exception as error:
        print(f"{Path(sys.argv[0]).name}: {explain(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def main() -> int:
    commands = {"machine": machine, "guard": guard}
    if sys.argv[1:2] and sys.argv[1] in commands:
        return commands[sys.argv.pop(1)]()
    parser = Parser(__doc__)
    folder = os.environ.get("OUT", "bench_results")
    parser.add_argument(
        "--output", type=new_folder, default=folder, help="(default: $OUT, else bench_results)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=520, help="total time limit (default 520)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[item.name for item in ITEMS], help="run only these items"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny sizes, items that run on a CPU; to try out the command",
    )
    parser.add_argument("--results", type=file, help="measure nothing, use this results.jsonl")
    parser.add_argument("--tables", action="store_true", help="also write the tables in --document")
    parser.add_argument(
        "--document", type=file, default=ROOT / "docs" / "evidence.md", help="file with the markers"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="write a config with the best settings"
    )
    options = parser.parse_args()
    if options.tiny and (options.tables or options.config):
        parser.error("--tables and --config need measured figures, which --tiny does not give")
    failed = signum = 0
    try:
        if options.results:
            try:
                lines = options.results.read_text(encoding="utf-8").splitlines()
                results = [json.loads(line) for line in lines if line.strip()]
            except ValueError as error:
                raise ValueError(
                    f"{options.results}: not a results file of gpu_all.py ({error})"
                ) from None
        else:
            chosen = [
                item
                for item in ITEMS
                # machine always runs: it says what the figures were measured on.
                if not options.only or item.name in (*options.only, "machine")
            ]
            items = [item for item in chosen if item.tiny is not None or not options.tiny]
            options.output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
                # Triton needs a writable cache: without a home, use a temporary one.
                homeless = not os.access(Path.home(), os.W_OK)
                recorder = Recorder(options.output, {"TRITON_CACHE_DIR": cache} if homeless else {})
                # The machine may be taken away at any moment: what was measured is still shown.
                ends = signal.SIGTERM, signal.SIGINT
                before = [signal.signal(number, recorder.end) for number in ends]
                end = time.monotonic() + options.seconds
                try:
                    failed = run_all(items, end, options.tiny, recorder)
                finally:
                    for number, handler in zip(ends, before, strict=True):
                        signal.signal(number, handler)
            results, signum = recorder.results, recorder.signum
        show(results)
        if signum:  # --results makes tables and config of what there is
            return 128 + signum
        if options.tables:
            write_tables(results, options.document)
        if options.config:
            write_text(options.config, config_of(results))
    except (NoGpuError, OSError, ValueError) as error:
        print(f"gpu_all: {error}", file=sys.stderr)
        return 2
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
