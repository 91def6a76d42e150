"""Parts of the load by themselves: matrix products, copies, a read of the data disk. All ranks at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bert.data.loader import Config as DataConfig
from bert.kernels import fp8

SIZE, CPU_SIZE = 8192, 256  # of a square matrix
COPY_BYTES, CPU_COPY_BYTES = 1 << 30, 1 << 24
READ_BYTES = 1 << 24
REPEATS = 10


@dataclass(frozen=True)
class Probe:
    """name: as the record has it; amount: operations or bytes of ``run``."""

    name: str
    amount: float
    run: Callable[[], object]

    def measure(self, device: torch.device) -> float:
        """Seconds of one run among several, after one to warm up."""
        self.run()
        _wait(device)
        begin = time.perf_counter()
        for _ in range(REPEATS):
            self.run()
        _wait(device)
        return (time.perf_counter() - begin) / REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(device: torch.device, data: DataConfig, rank: int) -> list[Probe]:
    """What this device can do, on random numbers: zeros run faster, because a chip is limited by power."""
    cuda = device.type == "cuda"
    size, num_bytes = (SIZE, COPY_BYTES) if cuda else (CPU_SIZE, CPU_COPY_BYTES)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in range(2))
    found = [Probe("matmul", 2 * size**3, lambda: a @ b)]
    if cuda and torch.cuda.get_device_capability(device) >= (8, 9):
        found.append(_fp8(a, b))
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    found.append(Probe("copy", 2 * num_bytes, lambda: target.copy_(source)))  # read and written
    if cuda:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        found.append(Probe("host_copy", num_bytes, lambda: target.copy_(host, non_blocking=True)))
    return [*found, *_disk(data, rank)]


def _fp8(a: torch.Tensor, b: torch.Tensor) -> Probe:
    one = torch.ones((), device=a.device)
    left, right = a.to(fp8.FORWARD), b.to(fp8.FORWARD)
    return Probe(
        "matmul_fp8", 2 * len(a) ** 3, lambda: fp8.product(left, right.t(), one, one, None, torch.bfloat16, True)
    )


def _disk(data: DataConfig, rank: int) -> list[Probe]:
    """A read of the data set's largest file, where there is one, each rank and run at a place of its own."""
    folder: Path | None = data.datadir_packed or data.datadir
    files = sorted((path for path in folder.glob("*") if path.is_file()), key=os.path.getsize) if folder else []
    if not files:
        return []
    path, size = files[-1], os.path.getsize(files[-1])
    count = min(READ_BYTES, size)
    turn = rank

    def read() -> None:
        nonlocal turn
        turn += 1
        offset = turn * 7919 * READ_BYTES % max(size - count, 1)
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), offset, count, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
            file.seek(offset)
            file.read(count)

    return [Probe("disk", count, read)]
