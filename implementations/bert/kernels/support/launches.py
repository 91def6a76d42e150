"""Launch settings of the Triton kernels: one table (launches.yaml), by kernel and architecture,
chosen from compiled counts.

``python tests/bert/kernels/ahead_of_time.py`` prints the counts for any of these architectures
without a GPU: in 16 bits no setting spills registers. The same settings in all runs, so that
results are reproducible bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch

from common.tables import read_table


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A program's settings: rows and columns of its block, warps, pipeline stages, maximum
    registers per thread.

    programs: of a persistent kernel, per multiprocessor.
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


TABLE: dict[str, dict[int, Blocks]] = {
    kernel: {since: Blocks(**values) for since, values in choices.items()}
    for kernel, choices in read_table(__file__, "launches.yaml").items()
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
