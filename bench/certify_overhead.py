"""Overhead of recording in an acceptance test: the same steps with and without their marks, in turns.

The load is that of certify.sh: BERT-large at 16 rows on a GPU, a small model on a CPU. Every other step is recorded,
and in the next pass over the same steps the others are, so that each step is its own pair; the ratio is the median
over all pairs, of wall time and of CPU time, with its standard error. The marks of a step are timed by themselves as
well. Prints one JSON line.

usage: python bench/certify_overhead.py [--passes 6] [--steps 100]
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as distributed
from lib import Parser, emit, integer, wall_seconds
from torch_lib import SMALL, device, synchronize

from bert.core.env import from_env
from bert.pretraining.config import Config as TrainerConfig
from certify.load import Config, Load
from certify.meeting import Meeting
from certify.recorder import Recorder


def make_load(folder: Path) -> Load:
    large = torch.cuda.is_available()
    settings = {
        "BATCHSIZE": "16" if large else "2", "SYNTH_DATA": "1", "MAX_SEQ_LENGTH": "512", "LR": "1", "MAX_STEPS": "1000",
        "SUBMISSION_DIVISION": "open", "EVAL_ITER_SAMPLES": "100000", "CERTIFY_SECONDS": "1",
    }  # fmt: skip
    if not large:
        (folder / "model.json").write_text(json.dumps(SMALL))
        settings["BERT_CONFIG"] = str(folder / "model.json")
    trainer = from_env(TrainerConfig, settings)
    return Load(from_env(Config, settings), trainer, Meeting(trainer.dist, distributed.HashStore(), "here"))


class EveryOther(Recorder):
    """Records every other step, and times them all."""

    def __init__(self) -> None:
        super().__init__(device())
        self.parity = 0
        self.times: list[tuple[float, float, bool]] = []  # wall and CPU seconds, and whether it was recorded

    def begin(self) -> None:
        synchronize()
        self.begun = time.perf_counter(), time.process_time()
        self.on = len(self.times) % 2 == self.parity
        if self.on:
            super().begin()

    def mark(self, name: str) -> None:
        if self.on:
            super().mark(name)

    def end(self, whole: bool = False) -> None:
        if self.on:
            super().end(whole)
        synchronize()
        wall, cpu = self.begun
        self.times.append((time.perf_counter() - wall, time.process_time() - cpu, self.on))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--passes", type=integer, default=6, help="over the same steps, an even number (default 6)")
    parser.add_argument("--steps", type=integer, default=100, help="of a pass (default 100)")
    options = parser.parse_args()
    if options.passes % 2:
        parser.error(f"--passes {options.passes}: expected an even number")
    recorder, passes = EveryOther(), []
    with tempfile.TemporaryDirectory() as folder:
        load = make_load(Path(folder))
        trainee = load.trainee_alone()
        trainee.recorder.settle()  # it has seen no step: all of its hooks go
        recorder.watch(trainee.model)
        trainee.recorder, trainee.step.mark = recorder, recorder.mark
        load.count_steps(trainee, load.config.rounds)
        for number in range(options.passes):
            recorder.parity, recorder.times = number % 2, []
            load.take_steps(trainee, options.steps)
            recorder.take()
            passes.append(recorder.times)
    both = zip(itertools.chain(*passes[::2]), itertools.chain(*passes[1::2]), strict=True)
    pairs = [sorted(pair, key=lambda times: times[2]) for pair in both]  # a step not recorded, and recorded
    step = statistics.median(off[0] for off, _ in pairs)
    result: dict[str, float] = {"pairs": len(pairs), "seconds_per_step": round(step, 6)}
    for column, name in enumerate(("wall", "cpu")):
        ratios = [on[column] / off[column] for off, on in pairs]
        center = statistics.median(ratios)
        spread = 1.4826 * statistics.median(abs(one - center) for one in ratios)
        error = 1.2533 * spread / len(ratios) ** 0.5
        result |= {f"{name}_ratio": round(center, 5), f"{name}_ratio_error": round(error, 5)}
    marks = Recorder(device())

    def marks_of_a_step() -> None:
        marks.begin()
        for name in ("data", "gradients", "reduced", "updated"):
            marks.mark(name)

    seconds = wall_seconds(lambda: [marks_of_a_step() for _ in range(1000)]) / 1000
    emit("certify_overhead", result | {"marks_microseconds": round(seconds * 1e6, 2)})


if __name__ == "__main__":
    main()
