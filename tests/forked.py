"""Commands of this project in processes of their own that need not import PyTorch: forked from one that has.

The import takes two seconds of a core, most of a small run. All else is as after ``python -m MODULE``: the environment,
the folder, the streams, the exit status. Where PYTHONPATH is set Python is to start in another way: there it does.
STANDS_AT in the environment is the pattern of a file at which the process is to stand still (held.py).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from . import held

PRELOADED = ["pytest", "h5py", "mlperf_logging.mllog", "bert.data.compiled", "bert.pretraining.train"]


def context() -> ForkServerContext:
    """What starts processes from the one that has imported PyTorch, one for each process of tests."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def _become(
    module: str, arguments: tuple[str, ...], environ: dict[str, str], folder: str, streams: str,
    before: Callable[[], object],
) -> None:  # fmt: skip
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(f"{streams}/{name}", "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if "STANDS_AT" in environ:
        held.stand_still(environ["STANDS_AT"])
    if "PYTHONPATH" in environ:
        os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environ)
    before()
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))  # read at the import
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Command:
    """A started ``python -m module arguments...`` with the environment ``environ`` and nothing else in it.

    before: a function of a module, called in the process first.
    """

    def __init__(
        self,
        module: str,
        environ: Mapping[str, str],
        arguments: tuple[str, ...] = (),
        before: Callable[[], object] = int,
    ) -> None:
        self.words = [sys.executable, "-m", module, *arguments]
        self._streams = tempfile.TemporaryDirectory(prefix="forked-")
        what = (module, arguments, dict(environ), os.getcwd(), self._streams.name, before)
        self._process = context().Process(target=_become, args=what)
        self._process.start()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.exitcode is None

    def finish(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Waits for its end, at most ``timeout`` seconds, after which it is killed and this fails."""
        self._process.join(timeout)
        late = self._process.exitcode is None
        self.kill()
        texts = [(Path(self._streams.name) / name).read_text() for name in ("stdout", "stderr")]
        self._streams.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self.words, timeout, *texts)
        assert self._process.exitcode is not None
        return subprocess.CompletedProcess(self.words, self._process.exitcode, *texts)

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.join()
