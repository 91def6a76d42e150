"""Ranks that meet a kernel at the same moment compile it once between them, and nobody ever waits for long."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from bert.kernels import compile_once, triton_support
from bert.kernels.compile_once import Compilations, lock_folder


class _Source:
    def __init__(self, name: str) -> None:
        self.name = name

    def hash(self) -> str:
        return self.name


def _ranks(folder, compile_kernel, names):
    """Calls of ranks (here threads: a lock is of an open file), each with locks of its own; what each waited for."""
    ranks = [Compilations(folder) for _ in names]

    def call(rank, name):
        with contextlib.suppress(ArithmeticError):
            rank.guarded(compile_kernel)(_Source(name))

    threads = [threading.Thread(target=call, args=pair) for pair in zip(ranks, names, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    return ranks


@pytest.fixture
def waiting(monkeypatch):
    """waiting(count): returns once so many ranks wait for a lock."""
    others, wait = threading.Semaphore(0), compile_once._wait
    monkeypatch.setattr(compile_once, "_wait", lambda lock: others.release() or wait(lock))

    def until(count):
        for _ in range(count):
            assert others.acquire(timeout=100)

    return until


def test_a_kernel_is_compiled_by_the_first_rank_and_read_by_the_others(tmp_path, waiting):
    cache, compiled = set(), []

    def compile_kernel(source):
        if source.name not in cache:
            compiled.append(source.name)
            if source.name == "a":
                waiting(2)
            time.sleep(0.1)
            cache.add(source.name)

    ranks = _ranks(tmp_path, compile_kernel, ["a", "a", "b", "a"])
    assert sorted(compiled) == ["a", "b"]
    assert all(rank.count == 1 and rank.seconds >= 0.1 for rank in ranks)
    assert str(ranks[0]).startswith("1 kernels compiled, or read from the cache, in 0.")


def test_those_who_waited_go_on_together_also_where_the_first_one_failed(tmp_path, waiting):
    turns, together, met = itertools.count(), threading.Barrier(3), []

    def compile_kernel(source):
        if next(turns) == 0:
            waiting(3)
            raise ArithmeticError
        together.wait(100)  # only where all three are inside at once
        met.append(source)

    _ranks(tmp_path, compile_kernel, ["a"] * 4)
    assert len(met) == 3


def test_a_rank_that_is_stuck_holds_up_nobody_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_once, "LONGEST_WAIT", 0.2)
    rank, source = Compilations(tmp_path), _Source("a")
    with rank.turn(source):
        begin = time.monotonic()
        assert Compilations(tmp_path).guarded(lambda source: "compiled")(source) == "compiled"
        assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize("number", ["ENOLCK", "EOPNOTSUPP"])
def test_without_locks_each_rank_compiles(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(getattr(errno, number), "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Compilations(tmp_path).guarded(lambda source: "compiled")(_Source("a")) == "compiled"
    assert Compilations(tmp_path / "absent").guarded(lambda source: "compiled")(_Source("a")) == "compiled"
    assert Compilations(None).guarded(lambda source: "compiled")("a path") == "compiled"


def test_locks_lie_in_a_folder_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_once.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = lock_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert lock_folder() is None, "somebody else may have put the link there"
    monkeypatch.setattr(compile_once.tempfile, "gettempdir", lambda: str(tmp_path / "absent"))
    assert lock_folder() is None


def test_tritons_compiler_is_guarded_from_the_first_call_on(monkeypatch):
    if triton_support.triton is None:
        pytest.skip("Triton is not installed")
    compiler = importlib.import_module("triton.compiler")
    plain = compiler.compile
    monkeypatch.setattr(compiler, "compile", plain)  # put back at the end
    compile_once.compilations.cache_clear()
    assert compile_once.compilations() is compile_once.compilations()
    assert compiler.compile.__wrapped__ is plain
    compile_once.compilations.cache_clear()


# Triton's own way from a launch to its compiler, as on a Hopper GPU, in two processes that begin at the same moment.
SCRIPT = """
import json, os, sys, time
import torch, triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from bert.kernels import bias_gelu, compile_once
class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
driver.set_active(Hopper())
compile_once.compilations()
pipes, begin = [], time.time() + 0.2
for rank in range(2):
    ours, theirs = os.pipe()
    pipes.append(ours)
    if os.fork() == 0:
        time.sleep(max(0, begin - time.time()))
        hits = []
        knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
        x, bias = torch.empty(64, 1024, dtype=torch.bfloat16, device="meta"), torch.empty(1024, device="meta")
        for _ in range(2):
            bias_gelu._forward.warmup(x, bias, x, 64, 1024, True, 4, 256, num_warps=4, grid=(64,))
        os.write(theirs, json.dumps([hits, compile_once.compilations().count]).encode())
        os._exit(0)
    os.close(theirs)
print(json.dumps([json.loads(os.read(pipe, 4096)) for pipe in pipes]))
"""


@pytest.mark.slow
def test_tritons_launches_pass_through_it(repository, tmp_path):
    if triton_support.triton is None:
        pytest.skip("Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(repository / "implementations")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    hits, counts = zip(*json.loads(done.stdout), strict=True)
    assert counts == (1, 1)
    assert sorted(hit for each in hits for hit in each) == [False, True], "one compiled it, the other read it"
    assert len(list(tmp_path.glob("bert-kernels-*/*.lock"))) == 1
