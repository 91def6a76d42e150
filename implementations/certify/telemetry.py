"""Clocks, power, temperatures and errors of a node's GPUs and CPUs, once a second beside the load.

GPUs by nvidia-ml-py, where it and a driver are there; CPUs by what the system tells in /proc and /sys. What a driver or
a system leaves out is nan.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from certify.schema import CPUS, FIELDS, SAMPLE

MOST_SAMPLES = 20_000  # at twice as many every other one is dropped, and then every other second is sampled
_NVLINKS, _NVLINK_COUNTERS = 18, 4
_NAN = float("nan")


class Gpus:
    """The GPUs of this node, as NVML tells of them. Empty where it does not."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """uuids: of the GPU of each local rank, as PyTorch writes them; without the GPU- that NVML puts before."""
        self.nvml: Any = None
        self.devices: list[Any] = []
        self._events: list[Any] = []
        self._xid: list[list[float]] = []
        with contextlib.suppress(ImportError):
            self.nvml = importlib.import_module("pynvml")
        if self.nvml is None or self._ask(self._initialized) is not True:
            return
        for uuid in uuids:
            self.devices.append(self._ask(self.nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}".encode()))
            self._events.append(self._ask(self._listen, self.devices[-1]))
            self._xid.append([0.0, _NAN])

    def _initialized(self) -> bool:
        self.nvml.nvmlInit()
        return True

    def _listen(self, device: Any) -> Any:
        events = self.nvml.nvmlEventSetCreate()
        self.nvml.nvmlDeviceRegisterEvents(device, self.nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers; None where this driver, this GPU or this nvidia-ml-py has no answer."""
        try:
            return function(*arguments)
        except (self.nvml.NVMLError, AttributeError):
            return None

    def _number(self, name: str, *arguments: Any, factor: float = 1.0) -> float:
        function = getattr(self.nvml, name, None)
        answer = None if function is None else self._ask(function, *arguments)
        return _NAN if answer is None else float(answer) * factor

    def sample(self) -> Iterator[dict[str, float]]:
        """A row of each GPU; of one that NVML does not know, its number alone."""
        for number, device in enumerate(self.devices):
            yield {"device": number} | (self._read(number, device) if device is not None else {})

    def _read(self, number: int, device: Any) -> dict[str, float]:
        nvml, ask = self.nvml, self._number
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", device)
        if np.isnan(reasons):
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", device)  # its name until R535
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, device)
        count, last = self._errors(number)
        return {
            "sm_mhz": ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_SM),
            "memory_mhz": ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_MEM),
            "watts": ask("nvmlDeviceGetPowerUsage", device, factor=1e-3),
            "celsius": ask("nvmlDeviceGetTemperature", device, nvml.NVML_TEMPERATURE_GPU),
            "memory_celsius": self._field(device, "NVML_FI_DEV_MEMORY_TEMP"),
            "throttle": reasons,
            "busy": _NAN if busy is None else busy.gpu / 100,
            "ecc_corrected": self._ecc(device, "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
            "ecc_uncorrected": self._ecc(device, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
            "xid_count": count,
            "xid_last": last,
            "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", device),
            "pcie_generation_most": ask("nvmlDeviceGetMaxPcieLinkGeneration", device),
            "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", device),
            "pcie_width_most": ask("nvmlDeviceGetMaxPcieLinkWidth", device),
            "pcie_replays": ask("nvmlDeviceGetPcieReplayCounter", device),
            "nvlink_errors": self._nvlink(device),
        }

    def _ecc(self, device: Any, kind: str) -> float:
        """Errors since the driver was loaded."""
        nvml = self.nvml
        return self._number("nvmlDeviceGetTotalEccErrors", device, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC)

    def _field(self, device: Any, name: str) -> float:
        """A field value, whose own status says whether it is one."""
        identifier = getattr(self.nvml, name, None)
        values = None if identifier is None else self._ask(self.nvml.nvmlDeviceGetFieldValues, device, [identifier])
        if values is None or values[0].nvmlReturn != self.nvml.NVML_SUCCESS:
            return _NAN
        return float(values[0].value.uiVal)

    def _nvlink(self, device: Any) -> float:
        """Errors of all links that are up, of all kinds."""
        total = _NAN
        for link in range(_NVLINKS):
            if not self._ask(self.nvml.nvmlDeviceGetNvLinkState, device, link):
                continue
            for counter in range(_NVLINK_COUNTERS):
                errors = self._number("nvmlDeviceGetNvLinkErrorCounter", device, link, counter)
                total = errors if np.isnan(total) else total + np.nan_to_num(errors)
        return total

    def _errors(self, number: int) -> tuple[float, float]:
        """Xid errors since the start, and the number of the last one."""
        if self._events[number] is None:
            return _NAN, _NAN
        wait = getattr(self.nvml, "nvmlEventSetWait_v2", None) or self.nvml.nvmlEventSetWait
        while (event := self._ask(wait, self._events[number], 0)) is not None:
            self._xid[number][0] += 1
            self._xid[number][1] = float(event.eventData)
        count, last = self._xid[number]
        return count, last


class Cpus:
    """The CPUs of this node: mean clock, hottest sensor, share of the time since the last sample that they work."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self._before = self._times()

    def sample(self) -> Iterator[dict[str, float]]:
        """One row."""
        before, self._before = self._before, self._times()
        idle, total = self._before[0] - before[0], self._before[1] - before[1]
        celsius = self._numbers("class/thermal/thermal_zone*/temp") or self._numbers("class/hwmon/hwmon*/temp*_input")
        yield {
            "device": CPUS,
            "sm_mhz": self._clock(),
            "celsius": max(celsius) / 1e3 if celsius else _NAN,
            "busy": 1 - idle / total if total > 0 else _NAN,
        }

    def _clock(self) -> float:
        clocks = [kilohertz / 1e3 for kilohertz in self._numbers("devices/system/cpu/cpu*/cpufreq/scaling_cur_freq")]
        if not clocks:
            with contextlib.suppress(OSError, ValueError):
                lines = (self.proc / "cpuinfo").read_text().splitlines()
                clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        return sum(clocks) / len(clocks) if clocks else _NAN

    def _numbers(self, pattern: str) -> list[float]:
        found = []
        for path in self.sys.glob(pattern):
            with contextlib.suppress(OSError, ValueError):
                found.append(float(path.read_text()))
        return found

    def _times(self) -> tuple[float, float]:
        """Jiffies (idle, all) since the start of the machine."""
        try:
            with open(self.proc / "stat", encoding="ascii") as file:
                times = [float(word) for word in file.readline().split()[1:9]]
            return times[3] + times[4], sum(times)
        except (OSError, ValueError, IndexError):
            return _NAN, _NAN


class Sampler:
    """Samples on a thread of its own, from ``start`` to ``stop``; its memory is bounded."""

    def __init__(
        self, sources: Sequence[Gpus | Cpus], interval: float = 1.0, earlier: np.ndarray | None = None
    ) -> None:
        """earlier: rows of an earlier process, which stay in front."""
        self.sources, self.interval = sources, interval
        self._samples: list[np.ndarray] = []
        if earlier is not None and len(earlier):
            self._samples = np.split(earlier, np.flatnonzero(np.diff(earlier["time"])) + 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> np.ndarray:
        """Ends it; all rows (SAMPLE)."""
        self._over.set()
        self._thread.join(self.interval + 30)
        return self.rows()

    def rows(self) -> np.ndarray:
        """What was sampled so far."""
        return np.concatenate([np.empty(0, SAMPLE), *self._samples])

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            self.sample()

    def sample(self) -> None:
        """One row of every device."""
        found = [values for source in self.sources for values in source.sample()]
        now = time.time()
        table = [(now, values["device"], *(values.get(name, _NAN) for name in FIELDS)) for values in found]
        self._samples.append(np.array(table, SAMPLE))
        if len(self._samples) >= 2 * MOST_SAMPLES:
            self._samples = self._samples[::2]
            self.interval *= 2
