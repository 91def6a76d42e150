"""Runs the official MLPerf checkers with a verdict that can be trusted.

Their exit codes cannot: the package checker exits with 0 on failure, the repository checker returns
False on success. They also log to the root logger, print, write into the tree they check, crash on
malformed input and take hours for a long line. Here each runs in a forked process with its output
captured; a crash or timeout is a failure with a reason, and callers pass a copy to the checker that
writes.
"""

import importlib
import io
import logging
import logging.handlers
import multiprocessing
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.process import limit_cpu
from review.logs.mllog import TOKEN
from review.logs.output import ReviewError

USAGE = "training"
LIMIT = 300  # CPU seconds per result; ten logs of 3,472 ranks take a tenth of it
# Seconds after which a checker waits for something that will not come, such as a lost disk.
_STUCK = 6 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Verdict of an official checker. ``messages``: its warnings and errors; ``crash``: its
    exception.
    """

    tool: str
    passed: bool
    messages: tuple[str, ...] = ()
    crash: str | None = None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"mlperf_logging.{name}")
    except ImportError as error:
        raise ReviewError(
            f"the official checkers are not installed ({error}): pip install mlperf-logging"
        ) from None


_Call = Callable[[list[logging.LogRecord]], Any]


def _run(tool: str, call: Callable[[], Any], words: str = "") -> Outcome:
    """Outcome of a call in a forked process: the first value it returns, or whether it logs
    ``words``.
    """

    def passes(records: list[logging.LogRecord]) -> bool:
        answer = call()
        return (
            any(words in record.getMessage() for record in records)
            if words
            else answer[0]
        )

    passed, messages, crash = _fork(passes)
    return Outcome(tool=tool, passed=bool(passed), messages=messages, crash=crash)


def _fork(call: _Call) -> tuple[Any, tuple[str, ...], str | None]:
    """Return value of a call in a forked process, the warnings it logs, and its crash."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(call, sender), daemon=True)
    process.start()
    # The parent's copy of the writing end: as long as it is open, a dead child gives no EOF.
    sender.close()
    try:
        # The limit of CPU time ends a busy child; this one is for a child that waits.
        if receiver.poll(_STUCK):
            return receiver.recv()
        crash = f"TimeoutError: no answer within {_STUCK} seconds"
    except EOFError:
        process.join()
        crash = f"exited with status {process.exitcode}"
        # The kernel's signal at the limit.
        if process.exitcode == -signal.SIGXCPU:
            crash = f"TimeoutError: no answer within {LIMIT} seconds of CPU time"
    finally:
        process.kill()
        process.join()
    return None, (), crash


_real_sub = re.sub


def substitute(pattern: Any, repl: Any, string: Any, *more: Any, **options: Any) -> str:
    """``re.sub``, in linear time where the checkers cut off what stands before the token."""
    # They do so thrice in each log, in half of their time: each search for another token starts
    # anew at every character.
    if more or options or (pattern, repl) != (f".*{TOKEN}", TOKEN):
        return _real_sub(pattern, repl, string, *more, **options)
    # The dot matches no end of line.
    if "\n" in string[:-1]:
        return _real_sub(pattern, repl, string)
    return string[max(string.rfind(TOKEN), 0) :]


def _child(call: _Call, sender: Connection) -> None:
    import yaml  # type: ignore[import-untyped]

    # Not of the clock: the verdict must not depend on what else runs. Also ends it if its parent
    # dies.
    limit_cpu(LIMIT)
    yaml.BaseLoader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # same loader in C
    re.sub = substitute  # type: ignore[assignment]
    root = logging.getLogger()
    collector = logging.handlers.BufferingHandler(sys.maxsize)
    # Of the child only: the checkers log to the root logger, which belongs to the caller.
    root.handlers[:] = [collector]
    root.setLevel(logging.INFO)
    # logging.disable() of the caller would hide the words that are the verdict.
    logging.disable(logging.NOTSET)
    warnings.simplefilter("ignore")
    sys.stdout, records, answer, crash = io.StringIO(), collector.buffer, None, None
    try:
        answer = call(records)
    except (Exception, SystemExit) as error:  # any exception is a verdict on this input
        crash = f"{type(error).__name__}: {error}"
    messages = tuple(
        record.getMessage().strip()
        for record in records
        if record.levelno >= logging.WARNING
    )
    sender.send((answer, messages, crash))


def check_compliance(path: Path, ruleset: str) -> Outcome:
    """Runs the compliance checker on a log."""
    module = _module("compliance_checker.mlp_compliance")
    module.enqueued_configs.clear()  # may be left over from a crash
    checker = module.make_checker(USAGE, ruleset, False, False)
    config = f"{USAGE}_{ruleset}/common.yaml"
    return _run("compliance_checker", lambda: module.main(str(path), config, checker))


def check_system(path: Path, ruleset: str) -> Outcome:
    """Runs the system description checker on a JSON file; for a pipe it would wait for the
    writer.
    """
    if path.exists() and not path.is_file():
        return Outcome(
            tool="system_desc_checker",
            passed=False,
            crash=f"{path.name} is not a regular file",
        )
    module = _module("system_desc_checker.system_desc_checker")
    return _run(
        "system_desc_checker",
        lambda: module.check_system_desc(str(path), USAGE, ruleset),
    )


def check_package(
    organization: Path, ruleset: str, train_samples: bool = False
) -> Outcome:
    """Runs the package checker on an organisation's folder, which it writes to: pass a copy.

    ``train_samples``: its --rcp-bert-train-samples.
    """
    module = _module("package_checker.package_checker")
    _module("compliance_checker.mlp_compliance").enqueued_configs.clear()
    # quiet, werror, rcp_bypass, train_samples, seed_checker_bypass, log_output: bypasses are for
    # the committee to grant, so that a result that needs one does not pass here.
    options = (
        str(organization),
        USAGE,
        ruleset,
        False,
        False,
        False,
        train_samples,
        False,
        "",
    )
    return _run(
        "package_checker",
        lambda: module.check_training_package(*options),
        "PACKAGE CHECKER FOUND NO ERRORS",
    )


def check_power(
    folder: Path, logs: Iterable[Path], ruleset: str
) -> tuple[frozenset[str], str | None]:
    """Names of the runs that the power checker rejects, which count as failed runs, and its crash.
    Writes nothing.
    """
    checker = _module("package_checker.power_checker").PowerChecker(ruleset)
    rejected, _, crash = _fork(
        # Its first value the package checker ignores, too: only the names count.
        lambda _: frozenset(checker.check_power(str(folder), list(map(str, logs)))[1])
    )
    return rejected or frozenset(), crash


def check_repository(organization: Path) -> Outcome:
    """Runs the repository checker on an organisation's folder: file names, sizes, links. Writes
    nothing.
    """
    module = _module("repo_checker.repo_checker")
    return _run(
        "repo_checker",
        lambda: module.run_checks(str(organization)),
        "ALL CHECKS PASSED",
    )
