"""Clocks, power, temperatures and errors of a node's GPUs, sampled once a second during the load.

Through nvidia-ml-py, if it and a driver are installed. Values that a driver does not report are
nan.
"""

import contextlib
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from review.acceptance.schema import FIELDS, SAMPLE

# At one a second, samples are first thinned after 11 hours.
# At twice as many, every other sample is dropped and the interval doubles.
MAX_SAMPLES = 20_000
PATIENCE = 30.0  # seconds for a sample that hangs
# Links of an H100; errors of a link: replay, recovery, CRC of flits and of data.
_NVLINKS, _NVLINK_COUNTERS = 18, 4
_NAN = float("nan")
ECC_ERRORS = "nvmlDeviceGetTotalEccErrors NVML_MEMORY_ERROR_TYPE"
# A function of NVML with the constants that it is given, or one of ours that is given NVML.
Question: TypeAlias = str | Callable[..., Any]


class Gpus:
    """GPUs of this node through NVML; none without nvidia-ml-py or a driver."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """uuids: of each local rank's GPU, as PyTorch writes them, without NVML's prefix GPU-."""
        self.nvml: Any = None
        with contextlib.suppress(ImportError):
            # The module of the package nvidia-ml-py.
            nvml = importlib.import_module("pynvml")
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
                self.nvml = nvml
        # One handle for each local rank, in its order, which may differ from NVML's.
        handles = (f"GPU-{uuid}".encode() for uuid in uuids if self.nvml)
        self.devices = [
            self.ask("nvmlDeviceGetHandleByUUID", handle) for handle in handles
        ]
        self._events = [
            None if device is None else self.ask(_listen, device)
            for device in self.devices
        ]
        # Count since the start, and the last one.
        self._xid = [[0.0, _NAN] for _ in self.devices]

    def ask(self, question: Question, *arguments: Any) -> Any:
        """NVML's answer; None if the driver, the GPU or nvidia-ml-py does not support the
        question.
        """
        try:
            if isinstance(question, str):
                name, *constants = question.split()
                values = (getattr(self.nvml, constant) for constant in constants)
                return getattr(self.nvml, name)(*arguments, *values)
            return question(self.nvml, *arguments)
        except (self.nvml.NVMLError, AttributeError):
            return None

    def sample(self) -> Iterator[dict[str, float]]:
        """A row per GPU; only its number if NVML does not know it."""
        for number, device in enumerate(self.devices):
            row: dict[str, float] = {"device": number}
            if device is not None:
                for name, question in _QUESTIONS.items():
                    answer = self.ask(question, device)
                    row[name] = _NAN if answer is None else float(answer)
            events = self._events[number]
            if events is not None:
                # Waits 0 ms, so that the loop ends at the first time-out with all that has come.
                while (event := self.ask("nvmlEventSetWait", events, 0)) is not None:
                    self._xid[number] = [
                        self._xid[number][0] + 1,
                        float(event.eventData),
                    ]
                row["xid_count"], row["xid_last"] = self._xid[number]
            yield row


def _listen(nvml: Any, device: Any) -> Any:
    events = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
    return events


def _throttle(nvml: Any, device: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
    except (nvml.NVMLError, AttributeError):
        # Its name until R535.
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


def _nvlink_errors(nvml: Any, device: Any) -> int | None:
    """Errors of all kinds on all active links."""
    errors = []
    for link, counter in itertools.product(range(_NVLINKS), range(_NVLINK_COUNTERS)):
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(device, link):
                errors.append(
                    nvml.nvmlDeviceGetNvLinkErrorCounter(device, link, counter)
                )
    return sum(errors) if errors else None


_QUESTIONS: dict[str, Question] = {
    "sm_mhz": "nvmlDeviceGetClockInfo NVML_CLOCK_SM",
    "watts": lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
    "celsius": "nvmlDeviceGetTemperature NVML_TEMPERATURE_GPU",
    "throttle": _throttle,
    # Volatile: since the driver was loaded.
    "ecc_corrected": f"{ECC_ERRORS}_CORRECTED NVML_VOLATILE_ECC",
    "ecc_uncorrected": f"{ECC_ERRORS}_UNCORRECTED NVML_VOLATILE_ECC",
    "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_generation_most": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_width_most": "nvmlDeviceGetMaxPcieLinkWidth",
    "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
    "nvlink_errors": _nvlink_errors,
}


class Sampler:
    """Samples in a background thread, from ``start`` to ``stop``, in bounded memory."""

    def __init__(
        self,
        gpus: Gpus,
        interval: float = 1.0,
        earlier: np.ndarray | None = None,
    ) -> None:
        """earlier: rows of an earlier process, kept in front."""
        self.gpus, self.interval = gpus, interval
        self._samples: list[np.ndarray] = []
        if earlier is not None and len(earlier):
            # Sample by sample again, so that thinning treats old and new rows alike.
            self._samples = np.split(
                earlier, np.flatnonzero(np.diff(earlier["time"])) + 1
            )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> np.ndarray:
        """Ends the thread; returns all rows (SAMPLE), the last of them without values if sampling
        had already ended.
        """
        failed = not self._thread.is_alive()
        self._over.set()
        # A driver that hangs must not hold up the record; the thread is a daemon.
        self._thread.join(self.interval + PATIENCE)
        if failed or self._thread.is_alive():
            # The verdict takes the time since the last values for the GPUs' silence.
            self._add({"device": number} for number in range(len(self.gpus.devices)))
        return self.rows()

    def rows(self) -> np.ndarray:
        return np.concatenate([np.empty(0, SAMPLE), *self._samples])

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            self.sample()

    def sample(self) -> None:
        """Takes a row of every GPU."""
        self._add(self.gpus.sample())

    def _add(self, rows: Iterable[Mapping[str, float]]) -> None:
        now = time.time()
        table = [
            (now, values["device"], *(values.get(name, _NAN) for name in FIELDS))
            for values in rows
        ]
        self._samples.append(np.array(table, SAMPLE))
        if len(self._samples) >= 2 * MAX_SAMPLES:
            self._samples = self._samples[::2]
            self.interval *= 2
