"""What the telemetry says against a device: throttling and its reason, errors, a bus narrower than it could be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from certify.records import Columns, Records

# NVML's reasons that a healthy GPU in a good room does not have. Its power limit (0x4) is no fault, and left out.
REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
LEAST_SAMPLES = 5
LEAST_SHARE = 0.05  # of the seconds
# Errors that must not grow during the test, and how bad it is when they do.
COUNTERS = {
    "xid_count": ("Xid errors", "fail"),
    "ecc_uncorrected": ("uncorrected memory errors", "fail"),
    "ecc_corrected": ("corrected memory errors", "warn"),
    "nvlink_errors": ("NVLink errors", "warn"),
    "pcie_replays": ("PCIe replays", "warn"),
}


@dataclass(frozen=True)
class Fault:
    """Something wrong with a device. state: fail or warn."""

    name: str
    state: str
    reason: str

    def text(self) -> str:
        """In one line."""
        return f"{self.name}: {self.reason}"


def faults(records: Records) -> list[Fault]:
    """Of all GPUs of all nodes; nothing where a driver tells nothing."""
    found = []
    clocks = [_median(samples["sm_mhz"]) for _, samples in devices(records)]
    typical = float(np.nanmedian(clocks)) if clocks and not np.all(np.isnan(clocks)) else float("nan")
    for name, samples in devices(records):
        found += [Fault(name, state, reason) for state, reason in _of_one(samples, typical)]
    return found


def devices(records: Records) -> Iterator[tuple[str, Columns]]:
    """The samples of each GPU, by the name of the rank that it is of."""
    for place in records.places.values():
        table = records.telemetry.get(place.node)
        if table is not None:
            chosen = table["device"] == place.local_rank
            if chosen.any():
                yield place.name, {field: column[chosen] for field, column in table.items()}


def throttled(samples: Columns, typical: float = float("nan")) -> str:
    """The reasons for which a GPU throttles and how often, or nothing."""
    masks = samples["throttle"][~np.isnan(samples["throttle"])].astype(np.int64)
    if len(masks) < LEAST_SAMPLES:
        return ""
    shares = {reason: float(np.mean((masks & bit) != 0)) for bit, reason in REASONS.items()}
    said = [f"{reason} in {share:.0%} of the seconds" for reason, share in shares.items() if share >= LEAST_SHARE]
    clock = _median(samples["sm_mhz"])
    beside = f" (the median GPU {typical:,.0f})" if not np.isnan(typical) else ""
    return f"throttles: {', '.join(said)}, at {clock:,.0f} MHz{beside}" if said else ""


def _of_one(samples: Columns, typical: float) -> Iterator[tuple[str, str]]:
    if said := throttled(samples, typical):
        yield "warn", said
    for field, (words, state) in COUNTERS.items():
        more = _more(samples[field], since_zero=field == "xid_count")
        if more > 0:
            last = samples["xid_last"][-1] if field == "xid_count" else np.nan
            yield (
                state,
                f"{more:.0f} {words} during the test{'' if np.isnan(last) else f', the last one Xid {last:.0f}'}",
            )
    for field, words in (("pcie_generation", "PCIe generation"), ("pcie_width", "PCIe lanes")):
        now, most = _most(samples[field]), _most(samples[f"{field}_most"])
        if now < most:  # False where one is not known
            yield "warn", f"{words}: {now:.0f}, of {most:.0f} that GPU and slot have"


def _more(counts: np.ndarray, since_zero: bool) -> float:
    """By how much a counter has grown; it begins again where a process or a driver does."""
    known = counts[~np.isnan(counts)]
    before = np.concatenate([[0.0] if since_zero else known[:1], known[:-1]])
    return float(np.sum(np.where(known < before, known, known - before)))


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _most(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else float("nan")
