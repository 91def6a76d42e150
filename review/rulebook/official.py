"""The official MLPerf checkers, run in this process, with a verdict that can be trusted.

Their exit codes cannot: the package checker exits 0 on failure, the repository checker returns False on success. They
also log to the root logger, print, write into the tree they check and crash on malformed input. Here each one runs with
its output captured, a crash is a failure with its reason, and the caller passes a copy where one writes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import logging.handlers
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from review.logs.output import ReviewError

USAGE = "training"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one official checker said. ``messages`` are its warnings and errors; ``crash`` its exception."""

    tool: str
    passed: bool
    messages: tuple[str, ...] = ()
    crash: str | None = None


@contextlib.contextmanager
def _captured() -> Iterator[list[logging.LogRecord]]:
    """Collects what goes to the root logger, and silences stdout and warnings."""
    import yaml  # type: ignore[import-untyped]

    root, collector = logging.getLogger(), logging.handlers.BufferingHandler(sys.maxsize)
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    root.handlers[:] = [collector]
    root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    loader, yaml.BaseLoader = yaml.BaseLoader, getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the same in C
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield collector.buffer
    finally:
        yaml.BaseLoader = loader
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"mlperf_logging.{name}")
    except ImportError as error:
        raise ReviewError(f"the official checkers are not installed ({error}): pip install mlperf-logging") from None


def _run(tool: str, call: Callable[[list[logging.LogRecord]], bool]) -> Outcome:
    crash = None
    with _captured() as records:
        try:
            passed = bool(call(records))
        except (Exception, SystemExit) as error:  # whatever an official tool raises is its verdict on this input
            passed, crash = False, f"{type(error).__name__}: {error}"
    messages = tuple(record.getMessage().strip() for record in records if record.levelno >= logging.WARNING)
    return Outcome(tool=tool, passed=passed, messages=messages, crash=crash)


def check_compliance(path: Path, ruleset: str) -> Outcome:
    """The compliance checker on one log."""
    module = _module("compliance_checker.mlp_compliance")
    module.enqueued_configs.clear()  # a crash leaves them behind for the next file
    checker = module.make_checker(USAGE, ruleset, False, False)
    config = f"{USAGE}_{ruleset}/common.yaml"
    return _run("compliance_checker", lambda _: module.main(str(path), config, checker)[0])


def check_system(path: Path, ruleset: str) -> Outcome:
    """The system description checker on one JSON file."""
    module = _module("system_desc_checker.system_desc_checker")
    return _run("system_desc_checker", lambda _: module.check_system_desc(str(path), USAGE, ruleset)[0])


def check_package(organization: Path, ruleset: str, train_samples: bool = False) -> Outcome:
    """The package checker on an organisation's folder, which it writes into: pass a copy.

    ``train_samples``: its --rcp-bert-train-samples.
    """
    module = _module("package_checker.package_checker")
    _module("compliance_checker.mlp_compliance").enqueued_configs.clear()

    def call(records: list[logging.LogRecord]) -> bool:
        module.check_training_package(str(organization), USAGE, ruleset, False, False, False, train_samples, False, "")
        return _said(records, "PACKAGE CHECKER FOUND NO ERRORS")

    return _run("package_checker", call)


def check_repository(organization: Path) -> Outcome:
    """The repository checker on an organisation's folder: file names, sizes, links. It only reads."""
    module = _module("repo_checker.repo_checker")

    def call(records: list[logging.LogRecord]) -> bool:
        module.run_checks(str(organization))
        return _said(records, "ALL CHECKS PASSED")

    return _run("repo_checker", call)


def _said(records: list[logging.LogRecord], words: str) -> bool:
    return any(words in record.getMessage() for record in records)
