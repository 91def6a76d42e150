"""The whole preparation, text to packed shards, on a made-up corpus: CPU seconds of each step, memory, disk.

Extrapolates to the real corpus (13.2 GB in 501 files, 156.7 million sequences, 4,320 shards) on 64 cores by what each
further byte costs, beyond a run on a small part of the corpus: tasks of a step go round by round, a last round of few
costs as much as a full one, and the last step counts as one process alone. Run it twice to leave the compilation out,
which each machine does once.

usage: python bench/prepare.py [--megabytes 108] [--jobs 2] [--keep FOLDER]
"""

from __future__ import annotations

import math
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import corpus
import result
from command_line import Parser, integer, new_folder, positive

_SHARD_BYTES = 27_000_000
_REAL_BYTES, _REAL_FILES, _REAL_SEQUENCES, _REAL_SHARDS, _CORES = 13_233e6, 501, 156_726_829, 4320, 64
_SMALL_BYTES = 2_000_000
_SEQUENCES_PER_GROUP = 1_200_000  # input_preprocessing.deal


class DiskWatch(threading.Thread):
    """The most bytes a folder held, looked at every half second."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.most, self.ended = folder, 0, threading.Event()

    def run(self) -> None:
        """Looks until asked to end."""
        while not self.ended.wait(0.5):
            self.most = max(self.most, size_of(self.folder))


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder but the downloads."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and "download" not in path.parts else 0
        except OSError:
            continue  # renamed meanwhile
    return total


def step(outputdir: Path, jobs: int, *options: str) -> Callable[[], object]:
    """A step of the preparation as a process of its own."""
    command = [sys.executable, "-m", "input_preprocessing", "prepare", "--outputdir", str(outputdir), "--skip-download"]
    command += ["--packed-data", "--jobs", str(jobs), *options]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(outputdir: Path, jobs: int, size: int) -> dict[str, float]:
    """CPU seconds of each step, wall of all, peak memory of a process and disk of all, for `size` bytes of text."""
    shards = ("--shards", str(max(2, round(_REAL_SHARDS * size / _REAL_BYTES))))
    watch = DiskWatch(outputdir)
    watch.start()
    started = time.perf_counter()
    figures: dict[str, float] = {"bytes_of_text": size}
    for name in ("start", "instances", "shards"):
        figures[f"cpu_seconds_{name}"] = round(result.cpu_seconds(step(outputdir, jobs, *shards, "--only", name)), 1)
    figures["cpu_seconds_finish"] = round(result.cpu_seconds(step(outputdir, jobs, *shards)), 1)
    figures["wall_seconds"] = round(time.perf_counter() - started, 1)
    watch.ended.set()
    watch.join()
    figures["peak_gigabytes_of_a_worker"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 2)
    figures["peak_disk_megabytes"] = round(watch.most / 1e6)
    figures["output_megabytes"] = round(size_of(outputdir) / 1e6)
    return figures


def small_part(outputdir: Path, target: Path) -> int:
    """Copies a corpus of one short file; bytes of text."""
    source, download = outputdir / "download", target / "download"
    shutil.copytree(source, download, ignore=shutil.ignore_patterns("part-*", "eval.txt"))
    total = 0
    for name, found, most in (("part-00000-of-00001", "part-00000-*", _SMALL_BYTES), ("eval.txt", "eval.txt", 40_000)):
        data = next((source / "results4").glob(found)).read_bytes()
        data = data[: data.find(b"\n\n", most) + 2]
        (download / "results4" / name).write_bytes(data)
        total += len(data)
    return total


def extrapolate(small: dict[str, float], large: dict[str, float]) -> dict[str, float]:
    """Minutes on 64 cores and gigabytes of disk for the real corpus."""
    scale = _REAL_BYTES / (large["bytes_of_text"] - small["bytes_of_text"])
    cpu = {name: (large[name] - small[name]) * scale for name in large if name.startswith("cpu_seconds")}
    num_groups = _REAL_SEQUENCES / _SEQUENCES_PER_GROUP
    files = math.ceil(_REAL_FILES / _CORES) * cpu["cpu_seconds_instances"] / _REAL_FILES
    groups = math.ceil(num_groups / _CORES) * cpu["cpu_seconds_shards"] / num_groups
    disk = (large["peak_disk_megabytes"] - small["peak_disk_megabytes"]) * scale
    return {
        "real_corpus_minutes_on_64_cores": round((files + groups + cpu["cpu_seconds_finish"]) / 60, 1),
        "real_corpus_gigabytes_of_disk": round(disk / 1e3),
    }


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--megabytes", type=positive, default=108, help="of text, up to 1000 (default %(default)s)")
    parser.add_argument("--jobs", type=integer, default=2, help="(default %(default)s)")
    parser.add_argument("--keep", type=new_folder, help="folder that keeps the corpus for the next time")
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    with tempfile.TemporaryDirectory() as name:
        outputdir = options.keep or Path(name)
        if not (outputdir / "download" / "bert_config.json").is_file():
            corpus.make(outputdir, size, max(1, round(size / _SHARD_BYTES)))
        size = sum(path.stat().st_size for path in (outputdir / "download" / "results4").iterdir())
        small_size = small_part(outputdir, Path(name) / "small")
        small = measure(Path(name) / "small", options.jobs, small_size)
        large = measure(outputdir, options.jobs, size)
    figures = {"jobs": options.jobs, "small_part": small, **large, **extrapolate(small, large)}
    targets = {
        "real_corpus_minutes_on_64_cores": (45.0, False),
        "real_corpus_gigabytes_of_disk": (300.0, False),
        "peak_gigabytes_of_a_worker": (2.0, False),
    }
    result.emit("prepare", figures, data="made-up corpus, see bench/corpus.py", targets=targets)


if __name__ == "__main__":
    main()
