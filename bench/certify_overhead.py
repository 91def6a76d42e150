"""What recording costs an acceptance test: steps with the marks of their parts and without, in turns.

The load is that of certify.sh: BERT-large at 16 rows on a GPU, a small model on a CPU. Beside the ratio of turns, which
a busy machine blurs, the marks of a step and a sample of telemetry are timed by themselves. Prints one JSON line.

usage: python bench/certify_overhead.py [--turns 20] [--steps 5] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as distributed
from common import TINY, device, emit, machine, synchronize

from bert.certify.load import Config, Load, Trainee
from bert.certify.meeting import Meeting
from bert.certify.recorder import Recorder
from bert.certify.telemetry import Cpus, Gpus, Sampler
from bert.config import Config as TrainerConfig
from bert.env import from_env

LARGE = {"vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
LARGE |= {"intermediate_size": 4096, "max_position_embeddings": 512}
SMALL = LARGE | {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
MARKS = ("data", "gradients", "reduced", "updated")


def make_load(folder: Path, tiny: bool) -> Load:
    """The load of one rank."""
    large = torch.cuda.is_available() and not tiny
    model = TINY if tiny else LARGE if large else SMALL
    (folder / "model.json").write_text(json.dumps(model))
    settings = {"BERT_CONFIG": str(folder / "model.json"), "BATCHSIZE": "16" if large else "2", "SYNTH_DATA": "1"}
    settings |= {"MAX_SEQ_LENGTH": str(model["max_position_embeddings"]), "LR": "1", "MAX_STEPS": "1000"}
    settings |= {"SUBMISSION_DIVISION": "open", "EVAL_ITER_SAMPLES": "100000", "CERTIFY_SECONDS": "1"}
    trainer = from_env(TrainerConfig, settings)
    return Load(from_env(Config, settings), trainer, Meeting(trainer.dist, distributed.HashStore(), "here"))


def turn(load: Load, trainee: Trainee, steps: int) -> float:
    """Seconds of some steps."""
    synchronize()
    begin = time.perf_counter()
    load.take_steps(trainee, steps)
    synchronize()
    return time.perf_counter() - begin


class Silent(Recorder):
    """Records nothing."""

    def begin(self) -> None:
        """No step begins."""

    def mark(self, name: str) -> None:
        """No part ends."""


def marks_seconds(count: int = 1000) -> float:
    """Seconds that the marks of a step take of the host."""
    recorder = Recorder(device())
    begin = time.perf_counter()
    for _ in range(count):
        recorder.begin()
        for name in MARKS:
            recorder.mark(name)
    seconds = (time.perf_counter() - begin) / count
    recorder.take()
    return seconds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn (default 5)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    options = parser.parse_args()
    count = torch.cuda.device_count()
    sampler = Sampler([Gpus([str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]), Cpus()])
    ratios, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        load = make_load(Path(folder), options.tiny)
        with load.trainee_alone() as trainee:
            load.count_steps(trainee)
            recorder, silent = trainee.recorder, Silent(device())
            for _ in range(options.turns):
                trainee.recorder, trainee.step.mark = silent, silent.mark
                without = turn(load, trainee, options.steps)
                trainee.recorder, trainee.step.mark = recorder, recorder.mark
                with_marks = turn(load, trainee, options.steps)
                recorder.take()
                ratios.append(with_marks / without)
                seconds.append(without / options.steps)
    step = statistics.median(seconds)
    begin = time.perf_counter()
    for _ in range(20):
        sampler.sample()
    sample = (time.perf_counter() - begin) / 20
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    result = {"benchmark": "certify_overhead", "turns": options.turns, "seconds_per_step": round(step, 6)}
    result |= {"ratio": round(statistics.median(ratios), 5), "ratio_quartiles": [round(one, 5) for one in quartiles]}
    marks = marks_seconds()
    result |= {"marks_microseconds": round(marks * 1e6, 2), "marks_share_of_step": round(marks / step, 7)}
    result |= {"sample_milliseconds": round(sample * 1e3, 3), "telemetry_share_of_a_cpu": round(sample, 6)}
    emit(result | {"machine": machine()})


if __name__ == "__main__":
    main()
