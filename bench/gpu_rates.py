"""What GPUs and the networks between them do a second, as far as a model of the step needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU does a second.

    bf16, fp8_fast, fp8_exact: operations of products; memory: bytes; issue: instructions of all its warps; launches:
    kernels of a CUDA graph, one after the other.
    """

    bf16: float = 0.9 * 770e12
    fp8_fast: float = 0.9 * 1350e12
    fp8_exact: float = 0.9 * 1100e12
    memory: float
    issue: float = 0.55 * 132 * 4 * 1.755e9  # 132 multiprocessors issue 4 a clock at best; 55% of that is assumed
    launches: float = 5e5  # 2 us for the smallest is assumed


# Products: 90%, for a layer's sizes, of what large ones reach (bf16 measured on an H200, fp8 assumed); memory: 90% of
# measured copies.
# A100 and B200 are not measured: the H100's share of their published peaks (bf16: 312 and 2,250 Tflop/s, 2 and 8 TB/s;
# the B200's fp8 is twice its bf16 by the H100's ratio), their multiprocessors and clocks. An A100 has no fp8.
GPUS = {
    "h100": Rates(memory=0.9 * 3.0e12),
    "h200": Rates(memory=0.9 * 4.3e12),
    "a100": Rates(bf16=0.9 * 243e12, memory=0.9 * 1.8e12, issue=0.55 * 108 * 4 * 1.41e9),
    "b200": Rates(
        bf16=0.9 * 1750e12, fp8_fast=0.9 * 3070e12, fp8_exact=0.9 * 3070e12, memory=0.9 * 7.1e12,
        issue=0.55 * 148 * 4 * 1.965e9,
    ),
}  # fmt: skip
NETWORKS = {"nvlink": 450e9 * 0.8, "infiniband": 50e9 * 0.8}  # bytes a second and GPU each way, and the share reached
