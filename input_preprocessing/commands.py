"""The stages by the names that users give them: `python -m input_preprocessing.NAME`."""

from __future__ import annotations

import importlib

from input_preprocessing.stage import interrupt

_USAGE = "usage: python -m input_preprocessing.STAGE [options]   (--help after a stage lists its options)"


# Name: module within input_preprocessing, whose main() is the command, and what it does. In the order of a preparation.
STAGES = {
    "prepare": ("dataset.prepare", "all steps below that a data set needs; prepare_data.sh runs it"),
    "download": ("dataset.download", "fetch and check the benchmark's public files"),
    "finetuning": ("dataset.finetuning", "fetch and check SQuAD or a task of GLUE, for run_finetuning.sh"),
    "corpus": ("text.corpus", "sentences, vocabulary and model size from a text of your own"),
    "extract": ("wiki.extract", "articles out of Wikipedia's dumps"),
    "clean": ("wiki.clean", "sentences out of the articles' mark-up"),
    "split": ("wiki.split", "articles into part files and evaluation text"),
    "instances": ("instances.command", "tokenise, pair and mask one text file"),
    "evalset": ("records.evalset", "choose the evaluation samples"),
    "shuffle": ("records.shuffle", "instances into shuffled shards"),
    "pack": ("records.pack", "instances into shards of packed rows"),
    "bins": ("records.bins", "instances into bins of similar length"),
    "import_records": ("records.import_records", "TFRecord files and NVIDIA's HDF5 shards into records"),
    "export_records": ("records.export_records", "records into TFRecord files and NVIDIA's HDF5 shards"),
    "convert_checkpoint": ("checkpoints.convert", "TensorFlow and PyTorch checkpoints into one another"),
    "data_card": ("dataset.data_card", "write DATA_CARD.md of a prepared data set"),
    "verify": ("verify.verdict", "check a prepared data set"),
}


def start(name: str) -> None:
    """Runs the stage's command line, which a signal ends with one line."""
    with interrupt.reported():
        interrupt.install(f"python -m input_preprocessing.{name}")
        importlib.import_module(f"input_preprocessing.{STAGES[name][0]}").main()


def overview() -> str:
    """Every stage with a line of what it does, in the order of a preparation."""
    width = max(map(len, STAGES))
    return "\n".join([_USAGE, "", *(f"  {name:{width}}  {summary}" for name, (_, summary) in STAGES.items())])
