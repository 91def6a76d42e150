"""Mutated outputs of other tools, and answers of NVML, sysfs and the kernel log: what a reader takes
for good must be whole.

usage: python -m tests.certify.fuzz [--cases 10000] [--seed 0]
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from certify import hardware, tools
from review.acceptance import coverage
from review.acceptance.faults import device_history, gpu_faults, odd_parts
from review.acceptance.schema import FIELDS, TABLES

from ..review.acceptance.made_up import make, telemetry
from .test_tools import HOST, PAIRS, SIZES, dcgm4, diagnosis, nccl_tests, nvbandwidth

GPUS = 2


def truncate(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text))]


def drop_line(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    del lines[chance.randrange(len(lines))]
    return "\n".join(lines)


def spoil(text: str, chance: random.Random) -> str:
    """Other text for one number or word: what tools print for what they do not know, or a cut."""
    words = text.split(" ")
    places = [number for number, word in enumerate(words) if word.strip()]
    others = ["N/A", "nan", "inf", "-1", "0", "", "?", "Fail"]
    words[chance.choice(places)] = chance.choice(others)
    return " ".join(words)


def decimal_comma(text: str, chance: random.Random) -> str:
    """The same in a locale that writes 3,5."""
    at = text.find(".", chance.randrange(len(text)))
    return text[:at] + "," + text[at + 1 :] if at >= 0 else text.replace(".", ",")


def repeat(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    at = chance.randrange(len(lines))
    return "\n".join([*lines[: at + 1], *lines[at:]])


def swap(text: str, chance: random.Random) -> str:
    lines = text.splitlines()
    a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


MUTATIONS: tuple[Callable[[str, random.Random], str], ...] = (
    truncate, drop_line, spoil, decimal_comma, repeat, swap
)  # fmt: skip


def pretty(document: object) -> str:
    return json.dumps(document, indent=1)


def zeroed() -> dict:
    told = nvbandwidth()
    told["nvbandwidth"]["testcases"][2]["bandwidth_matrix"][1][0] = "0"
    return told


GOOD = {
    "all_reduce_perf": nccl_tests(),
    "nvbandwidth": pretty(nvbandwidth()),
    "dcgmi": pretty(dcgm4(*((name, ["Pass"] * 2, "") for name in ("memory", "pcie")))),
}
BAD = {
    "all_reduce_perf": nccl_tests(wrong=3),
    "nvbandwidth": pretty(zeroed()),
    "dcgmi": pretty(diagnosis([{"status": "Pass"}, {"status": "Fail"}])),
}


def passes(name: str, text: str) -> tools.Reading | None:
    """The reading, if the tool is taken for good."""
    try:
        found = tools.read(name, 0, text, GPUS)
    except tools.ToolError:
        return None
    return None if found.faults else found


def is_whole(name: str, found: tools.Reading, text: str) -> bool:
    """Whether all that was asked for was measured, or is named as skipped."""
    rates = [one for one in found.rates if tools.is_positive(one[-1])]
    if len(rates) != len(found.rates):
        return False
    if name == "dcgmi":
        # Each of its two tests on each GPU, by the text itself.
        gpus = text.count('"entity_group": "GPU"')
        return gpus + len(found.skipped) >= 2 * GPUS
    if name == "nvbandwidth":
        have = {(test, gpu, peer) for test, gpu, peer, *_ in rates}
        asked = {(test, gpu, -1) for test in HOST for gpu in range(GPUS)}
        asked |= {(PAIRS, 0, 1), (PAIRS, 1, 0)}
        return {one for one in asked if one[0] not in found.skipped} <= have
    return {size for *_, size, _ in rates} == {*SIZES}


def wrong_passes(cases: int, seed: int) -> list[str]:
    """Mutants that pass though they lack something, or though their original is bad."""
    chance, found = random.Random(seed), []
    for number in range(cases):
        name = chance.choice([*GOOD])
        mutation = chance.choice(MUTATIONS)
        is_bad = number % 2 == 1
        # What makes the original bad must survive: only its order and place change.
        if is_bad:
            commas = [decimal_comma] * (name != "nvbandwidth")
            mutation = chance.choice([*commas, swap])
        text = mutation((BAD if is_bad else GOOD)[name], chance)
        reading = passes(name, text)
        if reading is not None and (is_bad or not is_whole(name, reading, text)):
            found.append(f"case {number}: {mutation.__name__} of {name}")
    return found


DEVICE = {
    "name": "NVIDIA H100 80GB HBM3", "memory MiB": 81559, "VBIOS": "96.00", "PCIe generation": 5, "PCIe lanes": 16,
    "NVLinks": 18, "ECC": 1, "power limit W": 700, "SM MHz": 1980, "serial": "1651",
}  # fmt: skip
PORT = {
    "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "hca_type": "MT4129", "fw_ver": "28.39",
}  # fmt: skip
LOG = "[    0.000000] Linux\n[  400.000000] usb 1-1: new\n"
XID = "[  500.250000] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n"
TEXTS = ["", "N/A", None]
WORSE = {  # of each kind of fact, answers that are no good ones
    **{key: [None, 0, -1, float("nan")] for key in DEVICE},
    **dict.fromkeys(("name", "VBIOS", "serial"), TEXTS),
    **{key: [None, -1, float("nan"), 3] for key in hardware.FAULTS},
    **dict.fromkeys(("state", "hca_type", "fw_ver"), TEXTS),
    "rate": ["", "N/A", None, "nan", "-1", "0 Gb/sec", "inf", "100 Gb/sec"],
    **{key: ["", "N/A", "-1", "nan", None, "7"] for key in TABLES["port_counters"]},
    **{key: [float("nan")] for key in FIELDS if key != "xid_last"},
}


class Driver:
    """Stands in for certify.telemetry.Gpus: one GPU, with these answers."""

    nvml = True

    def __init__(self, answers: dict) -> None:
        self.answers = answers

    def ask(self, question, *arguments):
        if question == "nvmlDeviceGetCount":
            return 1
        known = hardware._GPU | hardware.FAULTS
        asked = {id(ask): name for name, ask in known.items()}
        return self.answers.get(asked.get(id(question), ""), question)


def observed(folder, gpu: dict, port: dict, fields: dict, log: str):
    """Records of a node of one GPU and one port, read by the readers from these answers."""
    card = folder / "sys/class/infiniband/mlx5_0"
    for name, text in port.items():
        path = card / ("" if name in ("hca_type", "fw_ver") else "ports/1") / name
        if name in TABLES["port_counters"]:
            path = card / "ports/1/counters" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
    found = make(1, 1, rounds=3, gpu=DEVICE["name"])
    hardware._dmesg = lambda: log
    boot = folder / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True, exist_ok=True)
    boot.write_text("b0")
    before = {"boot": "b0", "first": 0.0, "last": 450.0, "lines": []}
    none = dict.fromkeys(hardware.FAULTS, 0)
    quiet = port | dict.fromkeys(TABLES["port_counters"], "0")
    counts = {name: 0 for name in quiet if name in TABLES["port_counters"]}
    found.hardware["node0"] = {
        "parts": hardware.inventory(Driver(gpu), folder),
        "before": {"GPU 0": none, "mlx5_0/1": counts},
        "after": hardware.health(Driver(gpu), folder),
        "log_before": before,
        "kernel_log": hardware.kernel_log(folder),
    }
    samples = telemetry(1, 9)
    for name, value in fields.items():
        samples[name][:] = value
    found.telemetry["node0"] = samples
    return found


def said(found) -> tuple[set[str], set[str]]:
    """Faults, and what was not tested."""
    reasons = [*gpu_faults(found), *odd_parts(found), *device_history(found)]
    left = coverage.merged(found, coverage.gaps(found, {}, True))
    return {one.text() for one in reasons}, {f"{what} ({why})" for what, why in left}


def wrong_machines(cases: int, seed: int, folder) -> list[str]:
    """Machines with an answer that is no good one, of which nothing is said; and bad ones that another answer hides."""
    chance, wrong = random.Random(seed), []
    gpu = DEVICE | dict.fromkeys(hardware.FAULTS, 0)
    port = PORT | dict.fromkeys(TABLES["port_counters"], "0")
    whole = said(observed(folder, gpu, port, {}, LOG))
    assert whole[0] == set(), whole
    for number in range(cases):
        name = chance.choice([*WORSE])
        value = chance.choice(WORSE[name])
        is_bad, log = number % 2 == 1, LOG
        if is_bad:
            mutations = decimal_comma, swap, repeat, lambda text, _: text
            log = chance.choice(mutations)(LOG + XID, chance)
        given = [one | ({name: value} if name in one else {}) for one in (gpu, port)]
        fields = {name: value} if name in FIELDS else {}
        reasons, untested = said(observed(folder, *given, fields, log))
        silent = not (reasons | untested) - (whole[0] | whole[1])
        if silent or (is_bad and not any("Xid 79" in one for one in reasons)):
            wrong.append(f"case {number}: {name}={value!r}{' beside an Xid' * is_bad}")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = wrong_passes(options.cases, options.seed)
    with tempfile.TemporaryDirectory() as name:
        wrong += wrong_machines(options.cases, options.seed, Path(name))
    print(*wrong, f"{len(wrong)} of {2 * options.cases} mutants pass wrongly", sep="\n")
    raise SystemExit(bool(wrong))
