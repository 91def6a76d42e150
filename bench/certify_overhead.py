"""Overhead of recording in an acceptance test: the same steps with and without their marks, in turns.

The load is that of certify.sh: BERT-large at 16 rows on a GPU, a small model on a CPU. Every other step is recorded,
and in the next pass over the same steps the others are, so that each step is its own pair; the ratio is the median
over all pairs, of wall time and of CPU time, with its standard error. The marks of a step and a sample of telemetry are
timed by themselves as well. Prints one JSON line.

usage: python bench/certify_overhead.py [--passes 6] [--steps 100] [--tiny]
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
from torch_lib import SMALL, TINY, device, synchronize

from bert.core.env import from_env
from bert.pretraining.config import Config as TrainerConfig
from certify.load import Config, Load
from certify.meeting import Meeting
from certify.recorder import Recorder
from certify.telemetry import Cpus, Gpus, Sampler

LARGE = SMALL | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def make_load(folder: Path, tiny: bool) -> Load:
    large = torch.cuda.is_available() and not tiny
    model = TINY if tiny else LARGE if large else SMALL
    (folder / "model.json").write_text(json.dumps(model))
    settings = {"BERT_CONFIG": str(folder / "model.json"), "BATCHSIZE": "16" if large else "2", "SYNTH_DATA": "1"}
    settings |= {"MAX_SEQ_LENGTH": str(model["max_position_embeddings"]), "LR": "1", "MAX_STEPS": "1000"}
    settings |= {"SUBMISSION_DIVISION": "open", "EVAL_ITER_SAMPLES": "100000", "CERTIFY_SECONDS": "1"}
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


def run_passes(load: Load, passes: int, steps: int) -> list[list[tuple[float, float, bool]]]:
    """Times of each step, by pass; which steps are recorded alternates from pass to pass."""
    found = []
    recorder = EveryOther()
    trainee = load.trainee_alone()
    trainee.recorder.settle()  # it has seen no step: all of its hooks go
    recorder.watch(trainee.model)
    trainee.recorder, trainee.step.mark = recorder, recorder.mark
    load.count_steps(trainee, load.config.rounds)
    for number in range(passes):
        recorder.parity, recorder.times = number % 2, []
        load.take_steps(trainee, steps)
        recorder.take()
        found.append(recorder.times)
    return found


def ratio(passes: list[list[tuple[float, float, bool]]], column: int) -> tuple[float, float]:
    """The median over steps of recorded over not recorded, of a pass and the next, and its standard error."""
    ratios = []
    for pair in zip(itertools.chain(*passes[::2]), itertools.chain(*passes[1::2]), strict=True):
        off, on = sorted(pair, key=lambda times: times[2])
        ratios.append(on[column] / off[column])
    center = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(one - center) for one in ratios)
    return center, 1.2533 * spread / len(ratios) ** 0.5


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--passes", type=integer, default=6, help="over the same steps, an even number (default 6)")
    parser.add_argument("--steps", type=integer, default=100, help="of a pass (default 100)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    if options.passes % 2:
        parser.error(f"--passes {options.passes}: expected an even number")
    count = torch.cuda.device_count()
    sampler = Sampler([Gpus([str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]), Cpus()])
    with tempfile.TemporaryDirectory() as folder:
        passes = run_passes(make_load(Path(folder), options.tiny), options.passes, options.steps)
    step = statistics.median(wall for times in passes for wall, _, recorded in times if not recorded)
    sample = wall_seconds(lambda: [sampler.sample() for _ in range(20)]) / 20
    result: dict[str, float] = {"pairs": options.passes // 2 * options.steps, "seconds_per_step": round(step, 6)}
    for column, name in enumerate(("wall", "cpu")):
        center, error = ratio(passes, column)
        result |= {f"{name}_ratio": round(center, 5), f"{name}_ratio_error": round(error, 5)}
    recorder = Recorder(device())

    def marks_of_a_step() -> None:
        recorder.begin()
        for name in ("data", "gradients", "reduced", "updated"):
            recorder.mark(name)

    marks = wall_seconds(lambda: [marks_of_a_step() for _ in range(1000)]) / 1000
    result |= {"marks_microseconds": round(marks * 1e6, 2), "marks_share_of_step": round(marks / step, 7)}
    result |= {"sample_milliseconds": round(sample * 1e3, 3), "telemetry_share_of_a_cpu": round(sample, 6)}
    emit("certify_overhead", result)


if __name__ == "__main__":
    main()
