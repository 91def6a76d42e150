"""Cost of a checkpoint: pause for its copy, steps while it is written, and a blocking write.

A model of BERT-1.5B's width with fewer layers, one process, fp32; measured in turns. On a GPU the
copies cross the bus. Prints one JSON line.

usage: python bench/checkpoint.py [--layers 1] [--repeats 3]
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from lib import ROOT, Parser, emit, integer, medians, wall_seconds
from torch_lib import TINY, device, new_model, new_step, packed_batches, synchronize

from bert.checkpoint.save import CheckpointConfig, Writer, save_checkpoint
from bert.checkpoint.sharded import num_bytes
from bert.kernels.precision import PrecisionConfig
from bert.model.config import BertConfig


def measure(config: BertConfig, folder: Path, repeats: int) -> dict[str, Any]:
    """Median seconds of each part; GB of the state."""
    # fp32: weights and two moments of 4 bytes each are written.
    step = new_step(new_model(config).to(device()), PrecisionConfig(precision="fp32"))
    short = dataclasses.replace(config, max_position_embeddings=128)
    batches = [batch.to(device()) for batch in packed_batches(1, 1, short)]
    writer, settings = (
        Writer(CheckpointConfig(directory=folder, keep=1)),
        CheckpointConfig(directory=folder, keep=1),
    )

    def take_steps() -> None:
        for _ in range(2):
            step(batches, 1e-6)
        synchronize()

    def start_writing() -> None:
        writer.start(1, step.state_dict())

    take_steps()
    start_writing()  # later copies reuse its memory
    writer.wait()
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, run in {
            "write_and_wait": lambda: save_checkpoint(settings, 2, step.state_dict()),
            "two_steps": take_steps,
            "two_steps_while_it_is_written": take_steps,
            "pause": start_writing,
        }.items():
            # Outside of the timing: the pause is a figure of its own.
            if name == "two_steps_while_it_is_written":
                start_writing()
            times.setdefault(name, []).append(wall_seconds(run))
            writer.wait()
    figures = {name: round(seconds, 3) for name, seconds in medians(times).items()}
    return {
        "gigabytes": round(num_bytes(step.state_dict()) / 1e9, 2),
        "seconds": figures,
    }


def main() -> None:
    parser = Parser(__doc__)
    # Fewer layers of the full width: times are proportional to bytes.
    parser.add_argument(
        "--layers",
        type=integer,
        default=1,
        help="of BERT-1.5B's 48 (default 1: 5 GB of memory)",
    )
    parser.add_argument("--repeats", type=integer, default=3, help="turns (default 3)")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, to try out the script"
    )
    options = parser.parse_args()
    shape = json.loads(
        (ROOT / "configs" / "models" / "bert_1.5b.json").read_text(encoding="utf-8")
    )
    shape |= (
        TINY | {"max_position_embeddings": 128}
        if options.tiny
        else {"num_hidden_layers": options.layers}
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bert_config.json").write_text(json.dumps(shape), encoding="utf-8")
        figures = measure(
            BertConfig.from_json(Path(folder, "bert_config.json")),
            Path(folder),
            options.repeats,
        )
    emit(
        "checkpoint",
        figures,
        data="BERT-1.5B's width" if not options.tiny else "a tiny model",
    )


if __name__ == "__main__":
    main()
