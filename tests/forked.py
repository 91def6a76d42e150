"""Commands of this project in processes of their own that need not import PyTorch: forked from one
that has.

The import takes two seconds of a core, most of a small run. All else is as after ``python -m
MODULE``: the environment, the folder, the streams, the exit status. Where PYTHONPATH has other
folders Python is to start in another way: there it does. STANDS_AT in the environment is the
pattern of a file at which the process is to stand still (held.py), FIRST a script that is run
first, as a sitecustomize.py would be. ``interpreter`` makes a program of it that shell scripts can
call.
"""

import ast
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from . import held

PRELOADED = ["tests.preloaded"]
REPOSITORY = Path(__file__).resolve().parents[1]


def hidden_gpus() -> dict[str, str]:
    """The setting that hides this machine's GPUs from the suite's processes (conftest.py)."""
    name = "CUDA_VISIBLE_DEVICES"
    return {name: os.environ[name]} if os.environ.get(name) == "" else {}


def context() -> ForkServerContext:
    """What starts processes from the one that has imported PyTorch, one for each process of tests."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    folder = os.getcwd()
    os.chdir(REPOSITORY)  # where it looks for PRELOADED, and if in vain says nothing
    forkserver.ensure_running()
    os.chdir(folder)
    return made


def _set_threads(environ: Mapping[str, str]) -> None:
    """As PyTorch has read them when it was imported."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _become(
    module: str, arguments: tuple[str, ...], environ: dict[str, str], folder: str, streams: str,
    before: Callable[[], object],
) -> None:  # fmt: skip
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(f"{streams}/{name}", "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environ := hidden_gpus() | environ)
    os.chdir(folder)
    if "STANDS_AT" in environ:
        held.stand_still(environ["STANDS_AT"])
    if not {*environ.get("PYTHONPATH", "").split(os.pathsep)} <= {*sys.path, ""}:
        os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environ)
    before()
    if first := os.environ.pop("FIRST", ""):
        runpy.run_path(first)
    _set_threads(environ)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Command:
    """A started ``python -m module arguments...`` with the environment ``environ`` and nothing else
    in it.

    before: a function of a module, called in the process first.
    """

    def __init__(
        self, module: str, environ: Mapping[str, str], arguments: tuple[str, ...] = (),
        before: Callable[[], object] = int,
    ) -> None:  # fmt: skip
        self.words = [sys.executable, "-m", module, *arguments]
        self._streams = tempfile.TemporaryDirectory(prefix="forked-")
        for name in ("stdout", "stderr"):
            (Path(self._streams.name) / name).touch()
        where = os.getcwd(), self._streams.name
        what = module, arguments, dict(environ), *where, before
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

    def _said(self, stream: str) -> str:
        return (Path(self._streams.name) / stream).read_text()

    def errors(self) -> str:
        """What it has said on stderr so far."""
        return self._said("stderr")

    def finish(self, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Waits for its end, at most ``timeout`` seconds, after which it is killed and this fails."""
        self._process.join(timeout)
        status = self._process.exitcode
        self.kill()
        texts = self._said("stdout"), self._said("stderr")
        self._streams.cleanup()
        if status is None:
            raise subprocess.TimeoutExpired(self.words, timeout, *texts)
        return subprocess.CompletedProcess(self.words, status, *texts)

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.join()


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``python -m module arguments...`` in this environment, when it has ended."""
    return Command(module, os.environ, tuple(map(str, arguments))).finish()


# What a script calls: it hands its words, environment, folder and streams over, passes signals on,
# and ends as the other process does. Killed, it takes that with it, since the connection breaks.
CLIENT = """
import _signal, _socket, os, sys
words = sys.argv[1:]
def execute():
    os.execv({python!r}, [{python!r}, *words])
if words[:1] in (["-c"], ["-S"]) and "hdf5" not in words[-1]:
    execute()
signals = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGQUIT)
ignored = [int(one) for one in signals if _signal.getsignal(one) == _signal.SIG_IGN]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    server.connect({address!r})
except OSError:  # a test that failed has ended it
    execute()
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
told = repr((words, dict(os.environ), os.getcwd(), ignored, os.sched_getaffinity(0))).encode("utf-8", "surrogateescape")
server.sendmsg([len(told).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
server.sendall(told)
process = int.from_bytes(server.recv(8), "big")
for one in signals:
    if int(one) not in ignored:
        _signal.signal(one, lambda number, _: os.kill(process, number))
status = int.from_bytes(server.recv(8), "big", signed=True)
if status < 0:
    _signal.signal(-status, _signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def client_of(address: str) -> str:
    """The script that has a server at this address run its words."""
    return CLIENT.format(python=sys.executable, address=address)


def interpreter(folder: Path) -> Path:
    """A program that a shell script can call instead of Python, with a module or a script, while
    this process lives.

    Not for what is told of a process by others: its name, its group, its environment in /proc.
    """
    with _listener(folder) as listener:
        context().Process(target=serve, args=(listener,), daemon=True).start()
    return folder / "python"


@contextmanager
def interpreter_with(
    folder: Path, environ: Mapping[str, str], preloaded: list[str]
) -> Iterator[Path]:
    """The same within a ``with``, forked from a Python that is started with ``environ`` and imports ``preloaded``."""
    script = f"import {', '.join(preloaded)}\nimport socket, sys\nsys.path.append({str(Path(__file__).parents[1])!r})\n"
    with _listener(folder) as listener:
        script += f"from tests import forked\nforked.serve(socket.socket(fileno={listener.fileno()}))\n"
        command = [sys.executable, "-c", script]
        server = subprocess.Popen(command, env=environ, pass_fds=[listener.fileno()])
    try:
        yield folder / "python"
    finally:
        server.kill()
        server.wait()


def _listener(folder: Path) -> socket.socket:
    """The socket that the program connects to, which is written into the folder."""
    address, client, program = (folder / name for name in ("server", "client.py", "python"))  # fmt: skip
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    client.write_text(client_of(str(address)))
    words = shlex.join([sys.executable, "-IS", str(client)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    return listener


def serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(connection)
        connection.close()
        with suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _attend(connection: socket.socket) -> None:
    """Runs what a client asks for, in a process of its own, and tells it how that has ended."""
    size, streams, *_ = socket.recv_fds(connection, 8, 3)
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += connection.recv(1 << 20)
    text = told.decode("utf-8", "surrogateescape")
    words, environ, folder, ignored, cpus = ast.literal_eval(text)
    process = os.fork()
    if process == 0:
        connection.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        os.sched_setaffinity(0, cpus)
        os._exit(_status_of(words, environ, folder))
    for stream in streams:
        os.close(stream)
    connection.sendall(process.to_bytes(8, "big"))
    ended = os.pidfd_open(process)
    readable, *_ = select.select([connection, ended], [], [])
    if ended not in readable:  # the client was killed
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if connection not in readable:
        connection.sendall(status.to_bytes(8, "big", signed=True))
    os._exit(0)


def _status_of(words: list[str], environ: dict[str, str], folder: str) -> int:
    """Becomes ``python words...`` and returns its exit status."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    _set_threads(environ)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    while words[0] not in ("-m", "-c") and words[0].startswith("-"):
        words = words[2 if words[0] == "-X" else 1 :]
    sys.argv = words[words[0] == "-m" :]
    sys.path[:0] = environ.get("PYTHONPATH", "").split(os.pathsep)
    status: object = 0
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    return status
