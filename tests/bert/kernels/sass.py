"""Resources of a compiled kernel, read from its machine code with Triton's tools."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Of a multiprocessor (CUDA programming guide, technical specifications): warps, KiB of shared memory, blocks.
LIMITS = {
    80: (64, 164, 32),
    89: (48, 100, 24),
    90: (64, 228, 32),
    100: (64, 228, 32),
    120: (48, 100, 24),
}
REGISTERS = 65536
RESERVED_SHARED_BYTES = 1024  # a block


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory per thread."""
    found = dict(
        re.findall(r"(REG|STACK|LOCAL):(\d+)", _run("cuobjdump", cubin, "--dump-resource-usage"))
    )
    return {
        "registers": int(found["REG"]),
        "spilled_bytes": int(found["STACK"]) + int(found.get("LOCAL", 0)),
    }


def instructions(cubin: bytes) -> dict[str, int]:
    """Instructions in all, and in the longest loop (0: none)."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: list[tuple[int, str]] = []
    for line in _run("nvdisasm", cubin, "-c").splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            waiting.append(label[1])
        elif instruction := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            address = int(instruction[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            if not re.search(r"\bNOP\b", instruction[2]):
                found.append((address, instruction[2]))
    loops = [0]
    for address, text in found:
        target = re.search(r"\bBRA\b.*(\.L_\w+)", text)
        if target and labels[target[1]] < address:
            loops.append(sum(labels[target[1]] <= other <= address for other, _ in found))
    return {"instructions": len(found), "loop": max(loops)}


def blocks_per_multiprocessor(
    capability: int, registers: int, warps: int, shared_bytes: int
) -> int:
    """Resident blocks per multiprocessor. A warp's registers are allocated in units of 256."""
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // of_warp // warps
    most_warps, kilobytes, most_blocks = LIMITS[capability]
    by_shared = kilobytes * 1024 // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, most_warps // warps, by_shared, most_blocks)


def _run(tool: str, cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(TOOLS / tool), option, file.name], capture_output=True, text=True, check=True
        ).stdout
