"""How full packed rows are on Wikipedia's mix of lengths (synthetic), and how long packing takes: offline and online.

usage: python bench/packing.py [--sequences 1000000] [--buffers 64 128 256 512 1024 4096]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import result
from command_line import Parser, at_least, integer

from bert.data.online_packing import OnlinePacker
from bert.data.packing import pack
from bert.data.synthetic import wikipedia_like_lengths

_LENGTH = 512


def fullness(lengths: np.ndarray, num_rows: int) -> float:
    """Share of real tokens."""
    return float(lengths.sum() / (num_rows * _LENGTH))


def stream(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """All sequences again and again, a file an epoch."""
    for epoch in itertools.count():
        yield epoch, np.arange(count)


def online(lengths: np.ndarray, max_sequences: int, buffer_size: int) -> dict[str, float]:
    """Fullness, rate and longest wait of the online packer over one epoch."""
    packer = OnlinePacker(
        stream(len(lengths)), lambda _, numbers: lengths[numbers], _LENGTH, max_sequences, buffer_size
    )
    rows_wanted = int(lengths.sum() / _LENGTH)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    seconds = result.cpu_seconds(lambda: found.append(packer.rows(rows_wanted)))
    files, numbers, _ = found[0]
    arrived = files * len(lengths) + numbers
    return {
        "fullness": round(fullness(lengths[numbers], rows_wanted), 6),
        "sequences_per_cpu_second": round(len(numbers) / seconds),
        "longest_wait_in_sequences": int((np.maximum.accumulate(arrived) - arrived).max()),
    }


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--sequences", type=at_least(1000), default=1_000_000, help="(default %(default)s)")
    parser.add_argument("--buffers", type=integer, nargs="+", default=[64, 128, 256, 512, 1024, 4096])
    options = parser.parse_args()
    lengths = wikipedia_like_lengths(options.sequences, _LENGTH, np.random.default_rng(0))
    figures: dict[str, object] = {"sequences": len(lengths), "mean_length": round(float(lengths.mean()), 2)}
    for most in (3, 4):
        times = result.in_turns({"pack": lambda most=most: pack(lengths, _LENGTH, most)}, 3)
        rows = len(pack(lengths, _LENGTH, most)[1]) - 1
        figures[f"fullness_at_{most}"] = round(fullness(lengths, rows), 6)
        figures[f"cpu_seconds_at_{most}"] = round(result.medians(times)["pack"], 2)
        for size in options.buffers:
            figures[f"online_at_{most}_buffer_{size}"] = online(lengths, most, size)
        figures[f"online_fullness_at_{most}"] = online(lengths, most, 512)["fullness"]
    targets = {
        "fullness_at_3": (0.999, True),
        "fullness_at_4": (0.9995, True),
        "cpu_seconds_at_3": (10.0, False),
        "online_fullness_at_3": (0.988, True),
        "online_fullness_at_4": (0.9995, True),
    }
    result.emit("packing", figures, data="Wikipedia mix (synthetic)", targets=targets)


if __name__ == "__main__":
    main()
