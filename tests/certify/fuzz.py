"""Mutated outputs of other tools: what a reader takes for good must be whole.

usage: python -m tests.certify.fuzz [--cases 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable

from certify import tools

from .test_tools import COPIES, PAIRS, SIZES, dcgm4, diagnosis, nccl_tests, nvbandwidth

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
    words[chance.choice(places)] = chance.choice(
        ["N/A", "nan", "inf", "-1", "0", "", "?", "Fail"]
    )
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
    "dcgmi": pretty(
        dcgm4(("memory", ["Pass", "Pass"], ""), ("pcie", ["Pass", "Pass"], ""))
    ),
}
BAD = {
    "all_reduce_perf": nccl_tests(wrong=3),
    "nvbandwidth": pretty(zeroed()),
    "dcgmi": pretty(json.loads(diagnosis([{"status": "Pass"}, {"status": "Fail"}]))),
}


def passes(name: str, text: str) -> tools.Reading | None:
    """The reading, if the tool is taken for good."""
    try:
        found = tools.read(name, 0, text, GPUS)
    except tools.ToolError:
        return None
    return None if found.faults else found


def is_whole(name: str, found: tools.Reading) -> bool:
    """Whether all that was asked for was measured, or is named as skipped."""
    rates = [one for one in found.rates if tools.is_positive(one[-1])]
    if len(rates) != len(found.rates):
        return False
    if name == "dcgmi":
        return len(found.gpus) == GPUS
    if name == "nvbandwidth":
        have = {(test, gpu, peer) for test, gpu, peer, *_ in rates}
        pairs = {(PAIRS, 0, 1), (PAIRS, 1, 0)}
        host = {
            (test, gpu, -1) for test in COPIES if test != PAIRS for gpu in range(GPUS)
        }
        return {one for one in pairs | host if one[0] not in found.skipped} <= have
    return len(rates) == len(SIZES)


def wrong_passes(cases: int, seed: int) -> list[str]:
    """Mutants that pass though they lack something, or though their original is bad."""
    chance, found = random.Random(seed), []
    for number in range(cases):
        name = chance.choice([*GOOD])
        mutation = chance.choice(MUTATIONS)
        is_bad = number % 2 == 1
        # What makes the original bad must survive: only its order and place change.
        if is_bad:
            mutation = (
                chance.choice([decimal_comma, swap]) if name != "nvbandwidth" else swap
            )
        text = mutation((BAD if is_bad else GOOD)[name], chance)
        reading = passes(name, text)
        if reading is not None and (is_bad or not is_whole(name, reading)):
            found.append(f"case {number}: {mutation.__name__} of {name}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = wrong_passes(options.cases, options.seed)
    print(*wrong, f"{len(wrong)} of {options.cases} mutants pass wrongly", sep="\n")
    raise SystemExit(bool(wrong))
