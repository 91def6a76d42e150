"""Telemetry through NVML's structures from a stand-in library: missing values are nan, never an error."""

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from certify.telemetry import MAX_SAMPLES, Gpus, Sampler
from review.acceptance.schema import FIELDS

from ..waiting import wait_until

SOURCE = Path(__file__).with_name("fake_nvml.c")
FUNCTIONS = re.findall(r"^ANSWER\((\w+)", SOURCE.read_text(), re.M)
GPU = {
    "sm_mhz": 1980, "watts": 700.5, "celsius": 65, "throttle": 4,
    "ecc_corrected": 0, "ecc_uncorrected": 3, "xid_count": 2, "xid_last": 79, "pcie_generation": 5,
    "pcie_generation_most": 5, "pcie_width": 16, "pcie_width_most": 16, "pcie_replays": 4, "nvlink_errors": 52,
}  # fmt: skip


@pytest.fixture(params=["driver", "old driver"])
def nvml(request, tmp_path, monkeypatch):
    """nvidia-ml-py with a stand-in for the driver's library."""
    module = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("no compiler for the stand-in library")
    library = tmp_path / "libnvidia-ml.so.1"
    options = ["-DOLD_DRIVER"] if request.param == "old driver" else []
    command = ["gcc", "-shared", "-fPIC", "-o", library, *options, SOURCE]
    subprocess.run(command, check=True, timeout=240)
    monkeypatch.setattr(module, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(module, "_nvmlGetFunctionPointer_cache", {})
    return module


@pytest.mark.usefixtures("nvml")
def test_every_field_of_a_gpu_is_read():
    first, second = Gpus(["0", "1"]).sample()
    assert set(GPU) == set(FIELDS)
    assert first == {"device": 0} | GPU
    others = {"device": 1, "sm_mhz": 1380, "throttle": 0x40, "pcie_width": 8}
    assert others.items() <= second.items()


@pytest.mark.parametrize("missing", FUNCTIONS)
def test_missing_fields_are_nan_and_the_rest_is_read(nvml, monkeypatch, missing):
    monkeypatch.setenv("FAKE_NVML_MISSING", missing)
    (found,) = Gpus(["0"]).sample()
    gone = [name for name in FIELDS if np.isnan(found.get(name, np.nan))]
    renamed = missing.startswith("nvmlDeviceGetCurrentClocks")
    lacking = renamed and not hasattr(nvml.nvmlLib, missing)
    assert (0 if lacking else 1) <= len(gone) <= 4
    read = {name: value for name, value in GPU.items() if name not in gone}
    assert read.items() <= found.items()


def test_an_unsupported_driver_or_unknown_gpu_gives_rows_of_nan(nvml, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_MISSING", "all")
    sampler = Sampler(Gpus(["0", "7"]))
    sampler.sample()
    rows = sampler.rows()
    assert rows["device"].tolist() == [0, 1]
    assert all(np.isnan(rows[name]).all() for name in FIELDS)


@pytest.mark.parametrize("fault", ["hangs", "raises", "none"])
def test_a_driver_that_ends_the_sampling_leaves_an_empty_last_row(monkeypatch, fault):
    released, taken = threading.Event(), []

    def sample():
        taken.append(1)
        if fault != "none" and len(taken) > 1:
            assert fault == "hangs"  # else the thread ends here
            released.wait(60)
        return [{"device": 0, "watts": 300.0}]

    monkeypatch.setattr("certify.telemetry.PATIENCE", 0.1)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    gpus = SimpleNamespace(devices=[None], sample=sample)
    sampler = Sampler(gpus, interval=0.01)
    sampler.start()
    wait_until(lambda: len(taken) > 1)
    if fault == "raises":
        sampler._thread.join(60)
    rows = sampler.stop()
    released.set()
    assert rows["watts"][0] == 300
    assert np.isnan(rows["watts"][-1]) == (fault != "none")


def test_without_nvidia_ml_py_or_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert list(Gpus(["0"]).sample()) == []
    monkeypatch.undo()
    if not Path("/dev/nvidiactl").exists():
        assert list(Gpus(["0"]).sample()) == []


def test_the_memory_of_samples_is_bounded():
    sampler = Sampler(Gpus([]))
    sampler.sample()
    sampler._samples *= 2 * MAX_SAMPLES - 1
    sampler.sample()
    assert len(sampler._samples) == MAX_SAMPLES
    assert sampler.interval == 2.0
