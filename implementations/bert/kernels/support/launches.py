"""Launch settings of the Triton kernels: one table, by kernel and architecture, chosen from
compiled counts.

``python tests/bert/kernels/ahead_of_time.py`` prints the counts for any of these architectures
without a GPU: in 16 bits no setting spills registers. The same settings in all runs, so that
results are reproducible bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A program's settings: rows and columns of its block, warps, pipeline stages, maximum
    registers per thread.

    For attention rows are queries (a multiple of 16) and columns keys (of 32). programs: of a
    persistent kernel, per multiprocessor.
    """

    rows: int = 1
    columns: int = 0
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    programs: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }

    def tiles(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Number of blocks of a matrix, down and in all."""
        down = -(-num_rows // self.rows)
        return down, down * -(-num_columns // self.columns)


def _attention(rows: int, columns: int, num_stages: int = 2, **others: int) -> Blocks:
    return Blocks(rows=rows, columns=columns, num_stages=num_stages, **others)


# By the lowest compute capability, times 10, for which they hold.
TABLE: dict[str, dict[int, Blocks]] = {
    # Two rows would spill in fp16 on Blackwell.
    "embeddings": {80: Blocks(rows=2, programs=3), 100: Blocks(programs=5)},
    # For rows of 1,024: 64 bytes per thread and row block in flight forward, 96 backward; barriers
    # only in row sums.
    "layer norm forward": {80: Blocks(rows=4)},
    # A multiprocessor's 65,536 registers for four programs of four warps: with the cast the
    # compiler would use some more, and the last programs would wait for the first ones to end. On
    # Blackwell it would spill.
    "layer norm backward": {
        80: Blocks(rows=2, programs=4, max_registers=128),
        100: Blocks(rows=2, programs=3, max_registers=168),
    },
    # Twice the bytes an element: with as many rows some widths spill on Hopper and Blackwell.
    "layer norm forward, fp32": {80: Blocks(rows=2)},
    "layer norm backward, fp32": {80: Blocks(programs=4)},
    # Blocks of 4 x 1,024 elements: 64 bytes per thread and input in flight; backward as many
    # programs as are resident. Four rows would spill in fp16 on sm_120 under Triton 3.9.
    "bias_gelu": {
        80: Blocks(rows=4, columns=1024, programs=5),
        120: Blocks(rows=2, columns=1024, programs=7),
    },
    # Both passes have 64 bytes per thread in flight; a program does a row forward, a block of a row
    # backward.
    "cross_entropy forward": {80: Blocks(rows=4, columns=1024)},
    "cross_entropy backward": {80: Blocks(columns=4096)},
    "lamb": {80: Blocks(columns=2048, num_warps=8)},
    # 128-byte lines of the input and of the transposed fp8, 64-byte halves of the fp8 in row order;
    # 32 elements per thread, at 60 to 74 registers three or four programs of eight warps per
    # multiprocessor.
    "cast": {80: Blocks(rows=128, columns=64, num_warps=8)},
    # Bytes; 32 words per thread in flight.
    "transpose": {80: Blocks(rows=128, columns=128)},
    # Two or three programs per multiprocessor; on Hopper wgmma in every product.
    "attention forward": {
        80: _attention(64, 32, max_registers=168),
        90: _attention(64, 64),
        120: _attention(64, 32, max_registers=168),
    },
    "attention query gradient": {
        80: _attention(64, 32),
        90: _attention(64, 64, max_registers=168),
        100: _attention(64, 64),
        120: _attention(64, 32),
    },
    "attention key gradient": {
        80: _attention(64, 32, max_registers=168),
        90: _attention(64, 64),
        100: _attention(64, 64, 1),
        120: _attention(64, 32),
    },
    # Heads wider than 64.
    "attention forward, wide": {
        80: _attention(32, 64),
        90: _attention(64, 64),
        120: _attention(32, 64),
    },
    "attention query gradient, wide": {
        80: _attention(32, 32),
        90: _attention(64, 64),
        103: _attention(64, 64, 1),
        120: _attention(32, 32),
    },
    "attention key gradient, wide": {80: _attention(64, 32)},
    # No tensor cores: a product's operands are in registers, and every tile but the keys' spills.
    "attention forward, fp32": {80: _attention(16, 32, 1, num_warps=8)},
    "attention query gradient, fp32": {80: _attention(16, 32)},
    "attention key gradient, fp32": {80: _attention(32, 32, 1)},
}

assumed = 90  # architecture without a GPU, for kernels interpreted, recorded or compiled ahead of time


def blocks(kernel: str, device: torch.device) -> Blocks:
    """Settings of a kernel on a device."""
    architecture = assumed
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        architecture = 10 * major + minor
    choices = TABLE[kernel]
    return choices[max(since for since in choices if since <= architecture)]
