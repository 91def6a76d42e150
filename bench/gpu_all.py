"""Everything that a GPU can check and measure, in one command and under nine minutes, from a plain checkout.

Needs torch, triton, h5py and transformers (and their own dependencies); nothing is installed. Every item is a process
of its own with a time limit, in the order of what its figures are worth, so that one that hangs, dies or cannot start
takes no other's figures with it. Under <output>, as they come: every line that an item prints in stages.log, with whole
tracebacks; every result in results.jsonl, one JSON line each, an item's last one its ending. Times of steps are said on
stderr, too; a short table comes last. Exit status: 1 where an item failed, 2 where there is no GPU, at once.

usage: python bench/gpu_all.py [--output DIR] [--seconds 520] [--only steps_48 ...] [--tiny] [--tables]
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from command_line import Parser, new_folder, positive

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
KILLED = 124  # status of an item that ran past its limit
LAST = 25  # seconds from where a step benchmark begins nothing more to its limit


@dataclass(frozen=True, kw_only=True)
class Item:
    """A process: a script of this folder with its arguments, or a module (``-m``), and the seconds it may take.

    tiny: arguments of a trial run on a machine without a GPU; None: not part of one. needs: packages it is left out
    without. unless: an item that it stands in for, where that left no time of a step.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    tiny: tuple[str, ...] | None = None
    needs: tuple[str, ...] = ()
    unless: str = ""


def _steps(name: str, group: str, seconds: float, tiny: bool = False, unless: str = "") -> Item:
    once = ("--tiny", "--rounds", "1", "--steps", "1")
    return Item(
        name=name,
        command=("train_step.py", "--groups", group, "--deadline", "{deadline}"),
        seconds=seconds,
        tiny=once if tiny else None,
        unless=unless,
    )


GPU_TESTS = tuple(str(ROOT / "tests" / "bert" / name) for name in ("kernels", "test_graph.py"))
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-rA", "--durations=10", "--continue-on-collection-errors", "-m", "gpu")
ITEMS = [
    Item(name="machine", command=("describe_machine.py",), seconds=45, tiny=()),  # PyTorch is read from a cold disk
    Item(name="self_check", command=("self_check.py",), seconds=85, tiny=("--tiny",)),
    _steps("steps_48", "rows 48", 80),
    _steps("steps_48_plain", "rows 48 plain", 60, unless="steps_48"),
    _steps("steps_24", "main", 70, tiny=True),
    _steps("steps_fp8", "fp8 48", 60),
    Item(name="attention", command=("attention.py",), seconds=35),
    Item(name="gemm", command=("gemm.py",), seconds=40, tiny=("--tiny",)),
    _steps("steps_96", "rows 96", 60),
    Item(name="kernel_tests", command=(*PYTEST, *GPU_TESTS), seconds=90, needs=("pytest", "hypothesis")),
    _steps("steps_attention", "attention", 60),
    Item(name="layernorm", command=("layernorm.py", "--no-compile"), seconds=25),
    Item(name="lamb", command=("lamb.py",), seconds=25),
    Item(name="loss", command=("loss.py", "--no-compile"), seconds=25),
    Item(name="profile", command=("step_profile.py",), seconds=40, tiny=("--tiny",)),
    Item(name="convergence", command=("convergence.py",), seconds=60, tiny=("--steps", "25")),
    _steps("steps_fused", "kernels", 60),
    _steps("peers", "peers", 60, tiny=True),
    _steps("compiled_peers", "compiled peers", 90),
]


@dataclass
class Recorder:
    """Where everything goes as it comes: lines to the log, results to their file and to ``results``."""

    log: IO[str]
    file: IO[str]
    results: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def line(self, name: str, text: str) -> None:
        """One line that an item printed."""
        with self.lock:
            self.log.write(f"[{name}] {text.rstrip()}\n")
            self.log.flush()

    def result(self, name: str, values: dict[str, Any]) -> None:
        """One result of an item."""
        result = {"stage": name} | values
        with self.lock:
            self.results.append(result)
            self.file.write(json.dumps(result) + "\n")
            self.file.flush()


@dataclass
class Output:
    """What an item has printed: its results go to the recorder at once, the rest is remembered for its ending."""

    name: str
    recorder: Recorder
    num_results: int = 0
    cut: bool = False  # a line that began as a result and is none: the process ended within it
    last: list[str] = field(default_factory=list)  # lines on stderr

    def read(self, stream: IO[bytes], take: Callable[[str], None]) -> threading.Thread:
        """Reads a stream to its end in a thread."""

        def run() -> None:
            for raw in iter(stream.readline, b""):
                text = raw.decode(errors="replace")
                self.recorder.line(self.name, text)
                take(text.strip())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def take_stdout(self, text: str) -> None:
        """Records a line that is a result."""
        if not text.startswith("{"):
            return
        try:
            values = json.loads(text)
        except ValueError:
            self.cut = True
            return
        self.num_results += 1
        self.recorder.result(self.name, values)
        for group, variant, rows, milliseconds, rate, *_ in rows_of([values]):
            print(f"  {group}: {variant}, {rows} rows: {milliseconds} ms {rate}".rstrip(), file=sys.stderr, flush=True)

    def take_stderr(self, text: str) -> None:
        """Remembers the last lines."""
        if text:
            self.last = [*self.last, text][-5:]


def command_of(item: Item, limit: float, tiny: bool) -> list[str]:
    """The process of an item: guarded.py tells where it stands when the time is nearly up, and every error whole."""
    script, *arguments = item.command
    what = [script] if script == "-m" else [str(BENCH / script)]
    extra = item.tiny if tiny and item.tiny is not None else ()
    arguments = [argument.format(deadline=max(round(limit - LAST), 1)) for argument in arguments]
    return [sys.executable, "-X", "faulthandler", str(BENCH / "guarded.py"), f"{limit:.0f}", *what, *arguments, *extra]


def run(name: str, command: Sequence[str], seconds: float, recorder: Recorder) -> dict[str, Any]:
    """Runs an item to its end or its limit, and records how it ended."""
    begin = time.monotonic()
    paths = [str(ROOT / "implementations"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    output = Output(name, recorder)
    ending: dict[str, Any] = {}
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        ending = {"status": 127, "reason": f"cannot start: {error}"}
    else:
        assert process.stdout is not None
        assert process.stderr is not None
        threads = [output.read(process.stdout, output.take_stdout), output.read(process.stderr, output.take_stderr)]
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = KILLED
        _kill(process.pid)  # what it started as well, which could hold its pipes and the GPU
        process.wait()
        for thread in threads:
            thread.join(30)
        ending = {"status": status, "reason": _reason(status, output)}
    ending |= {"ended": True, "seconds": round(time.monotonic() - begin, 1), "results": output.num_results}
    recorder.result(name, ending)
    return ending


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _reason(status: int, output: Output) -> str:
    """Why an item ended as it did; empty where all is well."""
    said = " | ".join(output.last[-3:])
    if status == KILLED:
        return "ran past its limit (stages.log says where it stood)"
    if status < 0:
        return f"died by {signal.Signals(-status).name}: {said}"
    if status:
        return said or f"exit status {status}"
    return "its last line is cut short" if output.cut else ""


def rows_of(results: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Lines of the table of steps: group, variant, rows, ms, sequences/s, TFLOP/s, share of the ceiling, memory."""
    lines: dict[tuple[str, str, int], tuple[str, ...]] = {}
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
                lines[name, one["variant"], one["rows"]] = (name, one["variant"], str(one["rows"]), *figures)
    return list(lines.values())


def show(results: list[dict[str, Any]]) -> None:
    """Prints how each item went, then the steps."""
    for result in results:
        if result.get("ended"):
            verdict = "ok" if not result["status"] else f"FAILED ({result['status']})"
            print(f"{result['stage']:<14} {verdict:<14} {result['seconds']:>6} s  {result['reason']}".rstrip())
    header = ("group", "variant", "rows", "ms", "sequences/s", "TFLOP/s", "ceiling", "GiB")
    table = [header, *rows_of(results)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def has_steps(results: list[dict[str, Any]], name: str) -> bool:
    """Whether an item has timed a step."""
    groups = [group for result in results if result["stage"] == name for group in result.get("groups", {}).values()]
    return any("milliseconds" in one for group in groups for one in group)


class NoGpuError(Exception):
    """There is nothing to measure here, and why."""


def run_all(items: list[Item], end: float, tiny: bool, recorder: Recorder) -> int:
    """Runs what there is time for; how many items failed. Raises NoGpuError where a machine says that it has none."""
    failed = 0
    for item in items:
        if item.unless and has_steps(recorder.results, item.unless):
            continue
        patience = 3 if tiny else 1  # a busy CPU may be slow: nothing is measured there
        limit = min(patience * item.seconds, end - time.monotonic())
        absent = [package for package in item.needs if importlib.util.find_spec(package) is None]
        if limit < min(10, item.seconds):
            ending: dict[str, Any] = {"ended": True, "status": KILLED, "seconds": 0, "reason": "no time left"}
            recorder.result(item.name, ending)
        elif absent:
            ending = {"ended": True, "status": 0, "seconds": 0, "reason": f"left out: no {', '.join(absent)} here"}
            recorder.result(item.name, ending)
        else:
            print(f"{item.name} ...", file=sys.stderr, flush=True)
            ending = run(item.name, command_of(item, limit, tiny), limit, recorder)
        failed += bool(ending["status"])
        if not tiny:
            _require_gpu(recorder.results)
    return failed


def _require_gpu(results: list[dict[str, Any]]) -> None:
    for result in results:
        if result.get("no_gpu"):
            seen = f"; nvidia-smi sees {result['driver']}" if result.get("driver") else ""
            raise NoGpuError(f"no GPU: {result['no_gpu']}{seen}: nothing is measured; --tiny tries the command out")


@contextlib.contextmanager
def kernel_cache() -> Iterator[None]:
    """Where Triton cannot keep kernels in a home folder, one for the items of this run: without any it does nothing."""
    if os.environ.get("TRITON_CACHE_DIR") or os.access(Path.home(), os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]


def main() -> int:
    """Runs the items."""
    parser = Parser(__doc__)
    folder = os.environ.get("OUT", "bench_results")
    parser.add_argument(
        "--output", type=new_folder, default=folder, help="folder (default: OUT if set, else bench_results)"
    )
    parser.add_argument("--seconds", type=positive, default=520, help="time for all of it (default 520)")
    parser.add_argument("--only", nargs="+", choices=[item.name for item in ITEMS], help="these items")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and what runs on a CPU, to try the command out")
    parser.add_argument("--tables", action="store_true", help="write the tables in docs/evidence.md as well")
    options = parser.parse_args()
    if options.tiny and options.tables:
        parser.error("--tables writes measured figures in the document, and those of --tiny are none")
    chosen = [item for item in ITEMS if not options.only or item.name in (*options.only, "machine")]
    if options.tiny:
        chosen = [item for item in chosen if item.tiny is not None]
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.jsonl"
    with (
        open(options.output / "stages.log", "w", encoding="utf-8") as log,
        open(results, "w", encoding="utf-8") as file,
        kernel_cache(),
    ):
        recorder = Recorder(log, file)
        try:
            failed = run_all(chosen, time.monotonic() + options.seconds, options.tiny, recorder)
        except NoGpuError as error:
            print(f"gpu_all: {error}", file=sys.stderr)
            return 2
    show(recorder.results)
    if options.tables:
        import tables

        tables.write(results, ROOT / "docs" / "evidence.md")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
