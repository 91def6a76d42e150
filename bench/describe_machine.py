"""The machine of the figures: GPU, its memory, clocks and driver, and the versions. Prints one JSON line."""

from __future__ import annotations

import torch
from common import emit, gpu_state, machine

if __name__ == "__main__":
    described = {"benchmark": "machine", "machine": machine(), "clocks": gpu_state()}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        described |= {"memory_gib": round(total / 2**30, 1), "free_gib": round(free / 2**30, 1)}
    emit(described)
