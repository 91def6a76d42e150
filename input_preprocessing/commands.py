"""The stages by the names that users give them: `python -m input_preprocessing.NAME`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

_USAGE = "usage: python -m input_preprocessing.STAGE [options]   (--help after a stage lists its options)"


@dataclass(frozen=True)
class Stage:
    """Where a stage is, and what it does, in a line."""

    module: str  # within input_preprocessing; its main() is the command
    summary: str


STAGES = {
    "prepare": Stage("dataset.prepare", "all steps below that a data set needs; prepare_data.sh runs it"),
    "download": Stage("dataset.download", "fetch and check the benchmark's public files"),
    "corpus": Stage("text.corpus", "sentences, vocabulary and model size from a text of your own"),
    "extract": Stage("wiki.extract", "articles out of Wikipedia's dumps"),
    "clean": Stage("wiki.clean", "sentences out of the articles' mark-up"),
    "split": Stage("wiki.split", "articles into part files and evaluation text"),
    "instances": Stage("instances.make", "tokenise, pair and mask one text file"),
    "evalset": Stage("records.evalset", "choose the evaluation samples"),
    "shuffle": Stage("records.shuffle", "instances into shuffled shards"),
    "pack": Stage("records.pack", "instances into shards of packed rows"),
    "bins": Stage("records.bins", "instances into bins of similar length"),
    "import_records": Stage("records.import_records", "TFRecord files and NVIDIA's HDF5 shards into records"),
    "convert_checkpoint": Stage("checkpoints.convert", "TensorFlow and PyTorch checkpoints into one another"),
    "verify": Stage("verify.verdict", "check a prepared data set"),
}


def start(name: str) -> None:
    """Runs the stage's command line."""
    importlib.import_module(f"input_preprocessing.{STAGES[name].module}").main()


def overview() -> str:
    """Every stage with a line of what it does, in the order of a preparation."""
    width = max(map(len, STAGES))
    return "\n".join([_USAGE, "", *(f"  {name:{width}}  {stage.summary}" for name, stage in STAGES.items())])
