"""Runs the tasks of a stage in worker processes, with a progress line and an estimate of the time left."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TextIO, TypeVar

from bert.data.records import DataError
from input_preprocessing.stage import interrupt
from input_preprocessing.stage.cli import human_time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Task = TypeVar("Task")
Result = TypeVar("Result")


class Progress:
    """A line on stderr: share done, time passed, time left. A terminal sees it move, a log gets a few lines."""

    def __init__(self, label: str, total: float, stream: TextIO | None = None) -> None:
        self.label, self.total, self.stream = label, total, stream or sys.stderr
        self.done = 0.0
        self.started = time.monotonic()
        self.live = self.stream.isatty()
        self.interval = 0.2 if self.live else 10.0
        self.next_line = self.started + min(self.interval, 2.0)
        self.shown = False
        self.complete = False  # the last line shown said 100%

    def advance(self, amount: float) -> None:
        self.done += amount
        self.refresh()

    def refresh(self) -> None:
        """Shows the line when it is due."""
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line = now + self.interval
            self._show(now)

    def close(self) -> None:
        """Shows the last line, if any was shown before."""
        if self.shown:
            if self.live or not self.complete:
                self._show(time.monotonic())
            if self.live:
                self.stream.write("\n")
            self.stream.flush()

    def _show(self, now: float) -> None:
        share = self.done / self.total if self.total else 1.0
        elapsed = now - self.started
        left = f"{human_time(elapsed / share * (1 - share))} left" if 0 < share < 1 else ""
        line = f"{self.label:<24} {share:4.0%}  {human_time(elapsed)}  {left}"
        self.stream.write(f"\r{line:<70}" if self.live else line.rstrip() + "\n")
        self.stream.flush()
        self.shown, self.complete = True, share >= 1


def run_tasks(
    label: str, function: Callable[[Task], Result], tasks: Sequence[Task], *, jobs: int,
    weights: Iterable[float] | None = None,
) -> list[Result]:  # fmt: skip
    """Results of function(task), in the order of the tasks; `weights` tell how long each takes relative to the others.

    Raises:
        DataError: a worker was killed. What `function` raises is raised here, once the tasks under way have ended.
    """
    costs = list(weights) if weights is not None else [1.0] * len(tasks)
    progress = Progress(label, sum(costs))
    try:
        if jobs > 1 and len(tasks) > 1:
            return _run_pool(function, tasks, costs, jobs, progress)
        results = []
        for task, cost in zip(tasks, costs, strict=True):
            results.append(function(task))
            progress.advance(cost)
        return results
    except BrokenProcessPool as error:
        reason = f"{label}: a worker was killed, perhaps for memory; run again with fewer --jobs (now {jobs})"
        raise DataError(reason) from error
    finally:
        progress.close()


def _bind_to_parent(parent: int) -> None:
    """Makes a worker end with the process that started it, were that by kill -9, and at once on Ctrl-C.

    Else it would keep writing beside the next run, and then wait for tasks for ever. Linux only.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupt.SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before
            os._exit(1)


def _run_pool(
    function: Callable[[Task], Result], tasks: Sequence[Task], costs: list[float], jobs: int, progress: Progress
) -> list[Result]:
    context = multiprocessing.get_context("spawn")
    workers = min(jobs, len(tasks))
    with ProcessPoolExecutor(workers, context, initializer=_bind_to_parent, initargs=(os.getpid(),)) as pool:
        try:
            order = sorted(range(len(tasks)), key=lambda i: -costs[i])  # the long ones first
            # Signals wait, in the workers too: these inherit that until they can end without a traceback.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupt.SIGNALS)
            try:
                with interrupt.held():
                    futures = {pool.submit(function, tasks[i]): i for i in order}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            results: dict[int, Result] = {}
            waiting = set(futures)
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    results[futures[future]] = future.result()
                    progress.advance(costs[futures[future]])
                progress.refresh()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[i] for i in range(len(tasks))]
