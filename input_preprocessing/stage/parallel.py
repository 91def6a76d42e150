"""Runs the tasks of a stage in worker processes, with a progress line and the estimated time
left.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO, TypeVar

from bert.data.records import DataError
from common.durations import duration
from common.process import end_with
from input_preprocessing.stage import interrupt

WORTH_WORKERS = 1e9  # bytes; reading fewer is faster than starting workers

Task = TypeVar("Task")
Result = TypeVar("Result")


class Progress:
    """Progress line on stderr: share done, time elapsed, time left. Redrawn on a terminal, repeated
    in a log.
    """

    def __init__(self, label: str, total: float, stream: TextIO | None = None) -> None:
        self.label, self.total, self.stream = label, total, stream or sys.stderr
        self.done = 0.0
        self.started = time.monotonic()
        self.live = self.stream.isatty()
        # A step that takes less than two seconds shows nothing in a log.
        self.next_line = self.started + (0.2 if self.live else 2.0)
        self.shown = -1.0  # the share in the last line

    def advance(self, amount: float) -> None:
        self.done += amount
        self.refresh()

    def refresh(self) -> None:
        """Shows the line if due."""
        if time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + (0.2 if self.live else 10.0)
            self._show()

    def close(self) -> None:
        """Shows the final line, if any was shown before."""
        if 0 <= self.shown < 1:
            self._show()
        if self.live and self.shown >= 0:
            self.stream.write("\n")

    def _show(self) -> None:
        self.shown = self.done / self.total if self.total else 1.0
        elapsed = time.monotonic() - self.started
        left = ""
        if 0 < self.shown < 1:
            left = f"{duration(elapsed / self.shown * (1 - self.shown))} left"
        line = f"{self.label:<24} {self.shown:4.0%}  {duration(elapsed)}  {left}"
        self.stream.write(f"\r{line:<70}" if self.live else line.rstrip() + "\n")
        self.stream.flush()


def run_tasks(
    label: str,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    jobs: int,
    weights: Iterable[float] | None = None,
    worth: float = 0,
) -> list[Result]:
    """Results of function(task), in the order of the tasks.

    weights: relative durations of the tasks; by default the bytes of the file that each is, or has
    first. worth: sum of weights above which starting workers is faster.

    The function is sent to each worker once: bind shared data to it, as with functools.partial.

    Raises:
        DataError: a worker was killed. DataError and OSError of `function` are raised here after
        the running tasks.
    """
    costs = list(map(_bytes_of, tasks) if weights is None else weights)
    progress = Progress(label, sum(costs))
    try:
        if jobs > 1 and len(tasks) > 1 and sum(costs) > worth:
            return _run_pool(function, tasks, costs, jobs, progress)
        results = []
        for task, cost in zip(tasks, costs, strict=True):
            results.append(function(task))
            progress.advance(cost)
        return results
    finally:
        progress.close()


def _bytes_of(task: Any) -> float:
    first = task[0] if isinstance(task, tuple) else task
    is_file = isinstance(first, Path) and first.is_file()
    return float(first.stat().st_size) if is_file else 1.0


def _work(pipe: Connection, parent: int) -> None:
    """A worker: reports that it is ready, receives the function, then tasks, one by one.

    It ends with its parent, even on kill -9 during a task (Linux only), or it would keep writing
    while the next run does. It ignores Ctrl-C, which the parent handles, or ignores in the
    background.
    """
    # Before interrupt.install(), which leaves an ignored signal ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.install(None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupt.SIGNALS)
    end_with(parent)
    with suppress(EOFError, ConnectionError):
        # Ready: from now on a signal ends this process without a traceback.
        pipe.send(None)
        function = pipe.recv()
        while True:
            task = pipe.recv()
            try:
                result = function(task)
            # Any other error ends the worker with a traceback.
            except (DataError, OSError) as error:
                result = error
            pipe.send(result)


def _start_workers(count: int) -> dict[Connection, BaseProcess]:
    """Workers by their pipes. Each has its own, which closes if the worker is killed.

    With the shared queues of an executor, the parent would wait forever.
    """
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    resource_tracker.ensure_running()  # starting it unblocks signals: do it before they are blocked
    # Block signals; workers inherit the mask until they can handle them without a traceback.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupt.SIGNALS)
    try:
        with interrupt.held():
            for _ in range(count):
                ours, theirs = context.Pipe()
                workers[ours] = context.Process(
                    target=_work, args=(theirs, os.getpid()), daemon=True
                )
                workers[ours].start()
                # An end left open here would keep the pipe from closing when the worker dies.
                theirs.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return workers


def _run_pool(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    costs: list[float],
    jobs: int,
    progress: Progress,
) -> list[Result]:
    workers = _start_workers(min(jobs, len(tasks)))
    # Taken from the end: longest first.
    left = sorted(range(len(tasks)), key=lambda i: costs[i])
    results: dict[int, Result] = {}
    failure: Exception | None = None
    # Task of each worker; None: starting.
    awaited: dict[Any, int | None] = dict.fromkeys(workers)
    pipe: Any
    try:
        while awaited:
            # 0.2 s: to redraw the progress line while tasks run.
            for pipe in wait(list(awaited), timeout=0.2):
                result, i = pipe.recv(), awaited.pop(pipe)
                if i is None:
                    pipe.send(function)
                elif isinstance(result, Exception):
                    failure = failure or result
                else:
                    results[i] = result
                    progress.advance(costs[i])
                # After a failure the running tasks go on to their end, and no others begin.
                if left and not failure:
                    awaited[pipe] = i = left.pop()
                    pipe.send(tasks[i])
            progress.refresh()
    except (EOFError, OSError) as error:
        # The pipe closes a moment before the exit status is known.
        workers[pipe].join(10)
        if (status := workers[pipe].exitcode) is None:
            raise
        # Negative from multiprocessing, 128 + signal from a shell.
        number = -status if status < 0 else status - 128
        ended = f"failed with status {status}, see above; run again"
        if number == signal.SIGKILL:
            ended = f"was killed, perhaps out of memory; run again with fewer --jobs (now {jobs})"
        elif number > 0:
            ended = f"was ended by {signal.Signals(number).name}; run again"
        raise DataError(f"{progress.label}: a worker {ended}") from error
    finally:
        interrupt.end(workers.values())
    if failure:
        raise failure
    return [results[i] for i in range(len(tasks))]
