"""Items of bench/gpu_all.py, run by it, while one call of a library fails: each place that calls one,
in turn, by the rules of STAND_IN_TORCH. Run where the stand-in GPU is installed. Items are forked.

usage: every_item.py FOLDER MOST [ITEM ...]    so many places of an item, evenly spread
Prints one line of JSON: by item the calls, their places, outcomes and what must never be.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace

import stand_in_gpu

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench")]
import convergence  # noqa: F401, E402  so that no item imports it
import gpu_all  # noqa: E402
import kernels  # noqa: F401, E402
import transformers.models.bert.modeling_bert  # noqa: F401, E402

from bert.kernels.attention import benchmark  # noqa: E402

cuda, INJECTED = stand_in_gpu.cuda, stand_in_gpu.cuda_rules.INJECTED
OURS = tuple(str(ROOT / part) for part in ("bench", "implementations", "tests/self"))
LAUNCHES = 4  # that fail, of each item
FOLDER, MOST = Path(sys.argv[1]), int(sys.argv[2])


def place():
    """Of the code of ours that calls the library."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


class Forked:
    """subprocess.Popen of an item. fail_at: the number of the call that fails in the next one."""

    fail_at = None

    def __init__(self, command, *, stdout, **_):
        self.status, fails, Forked.fail_at = None, Forked.fail_at, None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for stream in (1, 2):
                os.dup2(stdout.fileno(), stream)
            self.become(command[3:], fails)

    def become(self, command, fails):
        made, call = [], cuda.call

        def told(name):
            made.append((name, place()))
            call(name)

        cuda.calls.clear()
        cuda.call, cuda.fail_at, cuda.counts_all, sys.argv = told, fails, True, command
        status = 0
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        cuda.fail_at = None
        gc.collect()
        (FOLDER / "calls.json").write_text(json.dumps(made))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def wait(self, limit):
        end = time.monotonic() + limit
        while self.status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise TimeoutExpired("item", limit)
            time.sleep(0.01)
        return self.status

    def send_signal(self, signum):
        os.kill(self.pid, signum)


def attempt(item, fail_at):
    """(ending, its lines, calls) of an item in which a call fails; the next one must end well."""
    Forked.fail_at = fail_at
    recorder = gpu_all.Recorder(FOLDER)
    items = [item, gpu_all.ITEMS[0]] if fail_at else [item]
    gpu_all.run_all(items, time.monotonic() + 600, True, recorder)
    lines = [one for one in recorder.results if one["stage"] == item.name]
    calls = json.loads((FOLDER / "calls.json").read_text()) if fail_at is None else []
    assert recorder.results[-1]["status"] == 0, recorder.results[-1]
    recorder.log.close()
    recorder.file.close()
    return lines[-1], lines[:-1], calls


def outcome_of(ending, lines, undisturbed):
    """What became of the failure; "fault": nobody is told, or not in a line."""
    told = ending["reason"] + json.dumps(lines)
    if INJECTED in told and len(ending["reason"].splitlines()) < 2:
        return "told, and measured" if len(lines) == len(undisturbed) else "told"
    if ending["status"] >= 0 and len(lines) == len(undisturbed):
        return "measured"
    return "fault"


def spread(numbers, most):
    return numbers[:: -(-len(numbers) // most) or 1]


def swept(item):
    ending, undisturbed, calls = attempt(item, None)
    numbers, launches = {}, []
    for number, (name, where) in enumerate(calls, 1):
        if name == "launch":
            launches.append(number)
        else:
            numbers.setdefault((name, where), number)
    chosen = spread([*numbers.values()], MOST) + spread(launches, LAUNCHES)
    outcomes, faults = collections.Counter(), []
    for number in chosen:
        found, lines, _ = attempt(item, number)
        outcome = outcome_of(found, lines, undisturbed)
        outcomes[outcome] += 1
        if outcome == "fault" or found["status"] in (gpu_all.KILLED, -signal.SIGABRT):
            faults.append([*calls[number - 1], found])
    counts = {"calls": len(calls) - len(launches), "launches": len(launches)}
    counts |= {"places": len(numbers), "failed": len(chosen)}
    return counts | {"status": ending["status"], "outcomes": outcomes, "faults": faults}


def main():
    gpu_all.subprocess = SimpleNamespace(Popen=Forked, TimeoutExpired=TimeoutExpired)
    # In the item itself, so that its calls count, too.
    benchmark.attempts = lambda names, device, heads: [
        benchmark.attempt(name, device, heads) for name in names
    ]
    wanted = sys.argv[3:]
    items = [one for one in gpu_all.ITEMS if one.name in wanted or not wanted]
    print(json.dumps({item.name: swept(item) for item in items}))


if __name__ == "__main__":
    main()
