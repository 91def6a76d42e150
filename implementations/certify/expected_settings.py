"""What a config says that its system reaches: `review certify` holds the figures of a test to it."""

from __future__ import annotations

from dataclasses import dataclass

from bert.core.env import env


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Figures of a healthy system; 0: nothing is expected. certify.expected has the same names."""

    parallel: float = env(
        "EXPECTED_SEQUENCES_PER_SECOND", 0.0, at_least=0, doc="of each rank by itself, while all of them work"
    )
    together: float = env(
        "EXPECTED_TOGETHER_SEQUENCES_PER_SECOND", 0.0, at_least=0, doc="of all ranks that train one model"
    )
    matmul: float = env("EXPECTED_TFLOPS", 0.0, at_least=0, doc="Tflop/s of a rank's matrix product; bf16 on GPUs")
    matmul_fp8: float = env("EXPECTED_FP8_TFLOPS", 0.0, at_least=0, doc="Tflop/s of a rank's matrix product in fp8")
    copy: float = env("EXPECTED_MEMORY_GBPS", 0.0, at_least=0, doc="GB/s of a rank's copy in memory, read and written")
    host_copy: float = env("EXPECTED_HOST_GBPS", 0.0, at_least=0, doc="GB/s of a rank's copy from the host")
    disk: float = env("EXPECTED_DISK_GBPS", 0.0, at_least=0, doc="GB/s of a rank's reads of the data set")
    reduce_together: float = env(
        "EXPECTED_ALLREDUCE_GBPS", 0.0, at_least=0, doc="GB/s of bus bandwidth, all ranks, as NCCL_TEST_MIN_GBPS"
    )
