"""Shared fixtures. Tests that need the reference data beside the checkout skip, saying so, where it is absent."""

import contextlib
import gc
import importlib
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

# Before NumPy and PyTorch are loaded; for the commands under test too.
os.environ["OMP_NUM_THREADS"] = "1"
# A caller's narrow terminal would wrap what commands print; paths that are mounted in containers
# may have no blanks.
os.environ["COLUMNS"] = "100"
if " " in tempfile.gettempdir():
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
if os.environ.get("GPU_TESTS") != "1":  # which make test-gpu sets
    # The suite for CPUs does not depend on what machine it runs on.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

gc.disable()  # until all test modules are imported, see pytest_collection_finish

if not torch.cuda.is_available():
    # Triton's interpreter runs the GPU kernels on the CPU; it has to be asked for before Triton is
    # first imported.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and the commands under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
for package in ("bert", "review"):
    # An editable install belongs to one checkout: in another the tests would import that one's code
    # and run their own.
    found = Path(str(importlib.import_module(package).__file__))
    if not found.resolve().is_relative_to(REPOSITORY):
        raise pytest.UsageError(
            f"{package} is imported from {found.parent}, another checkout: use the .venv of this one"
        )

from . import leftovers  # noqa: E402 (of this checkout)

SHARED = Path(os.environ.get("BERT_TEST_SHARED", REPOSITORY.parent / "shared"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the tests of launch scripts, which mostly wait, among those that compute: each process of tests begins
    with an equal part of this order."""
    kinds: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kinds["tests/launch/" in item.nodeid].append(item)
    places: dict[Path, float] = {}
    for kind in kinds.values():
        for number, item in enumerate(kind):
            places.setdefault(item.path, number / len(kind))  # a module stays together
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """Exempts all that is imported from garbage collection: each pass over these million objects takes 0.3 s. What tests
    leave is looked at less often than by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Marks what runs tests: not the process that only hands them out (-n), whose children are those that do."""
    if hasattr(config, "workerinput") or getattr(config.option, "dist", "no") == "no":
        leftovers.mark()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Ends what a test that fails has started; what fixtures started before it, they end."""
    start = leftovers.now()
    try:
        return (yield)
    except BaseException:
        leftovers.end(start)
        raise


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Threads cost small tensors more than they save, and those that wait spin: on busy cores ten times the step."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def quick_python() -> Iterator[Path]:
    """The Python of shell scripts that need not import PyTorch anew (forked.py)."""
    from .forked import interpreter

    # In a short folder, as the address of a socket has to be.
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        yield interpreter(Path(folder))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the checkout; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no reference data at {SHARED} (set BERT_TEST_SHARED)")
    return SHARED
