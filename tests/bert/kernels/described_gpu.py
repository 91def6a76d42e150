"""Asks the real cuDNN, without a GPU, whether it has kernels for our graphs on an H200 that is
described to it.

usage: python tests/bert/kernels/described_gpu.py

It wants nvidia-cudnn-frontend and nvidia-cudnn-cu13 on PYTHONPATH, their libraries and those of
stubs() on LD_LIBRARY_PATH. Prints one JSON line: cuDNN's version and how many plans it proposes for each pass. They are not
compiled, nothing runs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

H200 = {
    "deviceName": "NVIDIA H200", "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0,
    "multiProcessorCount": 132, "smCountOrigin": 0, "warpSize": 32, "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxBlockSize": [1024, 1024, 64],
    "maxGridSize": [2147483647, 65535, 65535], "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "oversizedSharedMemoryPerBlock": 0, "totalGlobalMem": 150 * 10**9,
    "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "memoryBusWidth": 6144, "l2CacheSize": 62914560,
    "isTccDriver": 0, "supportCoopLaunch": 1,
}  # fmt: skip
# Of the driver and of cuBLAS, which cuDNN looks for before it plans; no kernel is compiled or
# started by them.
DRIVER = [
    "cuCtxGetCurrent", "cuCtxGetLimit", "cuCtxPopCurrent", "cuCtxPushCurrent",
    "cuDeviceGet", "cuDeviceGetCount", "cuGetErrorName", "cuGetErrorString",
    "cuKernelGetAttribute", "cuKernelGetFunction", "cuKernelSetAttribute", "cuLaunchCooperativeKernel",
    "cuLaunchKernel", "cuLaunchKernelEx", "cuLibraryGetKernel", "cuLibraryLoadData",
    "cuLibraryLoadFromFile", "cuLibraryUnload", "cuLinkAddData", "cuLinkComplete",
    "cuLinkCreate", "cuLinkDestroy", "cuModuleGetFunction", "cuModuleLoadData",
    "cuModuleUnload", "cuOccupancyMaxPotentialClusterSize", "cuStreamGetCtx", "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
]  # fmt: skip


def stubs(folder: Path) -> None:
    """Builds libcuda.so.1 and libcublasLt.so.13 in the folder: every call fails, but those for
    versions.
    """
    driver = "int cuInit(unsigned f) { return 0; } int cuDriverGetVersion(int *v) { *v = 13010; return 0; }"
    driver += "".join(f" int {name}(void) {{ return 100; }}" for name in DRIVER)
    cublas = "unsigned long cublasLtGetVersion(void) { return 130100; }"
    for name, code in (("libcuda.so.1", driver), ("libcublasLt.so.13", cublas)):
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-"]
        command += ["-o", str(folder / name)]
        subprocess.run(command, input=code, text=True, check=True, timeout=240)


def main() -> None:
    """Plans BERT-large's step of 48 rows."""
    import cudnn
    import torch

    from bert.kernels.attention import cudnn_frontend

    sizes = cudnn_frontend.Sizes(
        num_sequences=192,
        longest=512,
        num_tokens=24_576,
        num_heads=16,
        width=64,
        dtype=torch.bfloat16,
        dropout=0.1,
    )
    device = cudnn.create_device_properties(json.dumps(H200))
    counts = {"cudnn": cudnn.backend_version_string()}
    for name in ("forward", "backward"):
        where = {"device_property": device, "sm_version": 90}
        made = cudnn_frontend.make_graph(sizes, backward=name == "backward", **where)
        counts[name] = made.graph.get_execution_plan_count()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
