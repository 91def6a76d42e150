"""The commands predict, benchmark and seeds."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bert.core.rundir import difference
from common.env import ConfigError
from finetune import files, saved
from finetune.batches import Samples
from finetune.dialect import Reading

# Not timed: the first ones compile kernels and fill the allocator's caches.
WARM_UP_BATCHES = 3


def predict(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> None:
    """Predicts every row of a file, or one text: its label with probabilities, a number, or an answer.

    The file is CSV, TSV or JSON Lines, also as .gz, with columns of text, or of question and context, or SQuAD's JSON.
    Separator, header and encoding are found, or asked for. The output has its rows in order, with the predictions as
    additional columns; a row without text has none. A killed command resumes when run again.
    """
    _add_model(parser)
    parser.add_argument("--input", help="file to predict; -: standard input")
    parser.add_argument(
        "--output", type=Path, help="X.csv, X.tsv or X.jsonl; for answers also X.json, as in SQuAD"
    )
    parser.add_argument(
        "--text-columns", default="", help="one or two, joined by commas (default: as in training)"
    )
    parser.add_argument(
        "--batch-size", type=natural, default=32, help="sequences per batch (default %(default)s)"
    )
    _add_reading(parser)
    parser.add_argument("--question", help="SQuAD: the question")
    parser.add_argument("--context", help="SQuAD: the text that contains the answer")
    parser.add_argument("--text", action="append", help="the text; twice for a pair")
    parser.add_argument(
        "--n-best", type=natural, default=3, help="answers to show (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    # Before the model is loaded, which takes seconds.
    if (options.input is None) != (options.output is None):
        raise ConfigError("--input needs --output, and --output needs --input")
    model = saved.load(options.folder, options.device)
    if options.input is not None:
        columns = tuple(name.strip() for name in options.text_columns.split(",") if name.strip())
        files.predict(
            model, options.input, options.output, columns, options.batch_size, _reading(options)
        )
    elif model.answers:
        if options.question is None or options.context is None:
            raise ConfigError(
                f"{options.folder} answers questions: give --question and --context, or --input FILE"
            )
        if not options.context.strip():
            raise ConfigError("--context is empty: give the text that contains the answer")
        (found,) = model.predict([(options.question, options.context)], n_best=options.n_best)
        for entry in found["n_best"]:
            print(f"{entry['probability']:.4f}  {entry['text'] or '(no answer)'}")
    else:
        count = model.facts.get("num_texts") or len(options.text or ())
        if not options.text or len(options.text) > 2 or len(options.text) != count:
            raise ConfigError(f"{options.folder} takes {count or 1} of --text, or --input FILE")
        (found,) = model.predict([tuple(options.text)])
        if "probabilities" not in found:
            print(found["prediction"])
        for name, share in sorted(
            found.get("probabilities", {}).items(), key=lambda pair: -pair[1]
        ):
            print(f"{share:.4f}  {name}")


def benchmark(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> None:
    """Latency in milliseconds and sequences per second, one JSON line per batch size.

    On random tokens of one length; with --input on the texts of a file, including tokenization.
    """
    _add_model(parser)
    parser.add_argument(
        "--batch-sizes", type=natural, nargs="+", default=[1, 8, 32], help="(default 1 8 32)"
    )
    parser.add_argument(
        "--length", type=natural, help="tokens of a sequence; unset: as in training"
    )
    parser.add_argument("--input", type=Path, help="file of texts, as predict takes them")
    _add_reading(parser)
    parser.add_argument(
        "--batches", type=natural, default=50, help="timed per batch size (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    model = saved.load(options.folder, options.device)
    shape = model.model.config
    length = min(options.length or model.facts["max_seq_length"], shape.max_position_embeddings)
    ids = (
        np.random.default_rng(0)
        # Below 1,000 BERT's vocabulary holds special and
        # unused entries; the remainder serves tiny ones.
        .integers(1000 % shape.vocab_size, shape.vocab_size, length)
        .astype(np.int32)
    )
    texts: list[tuple[str, ...]] = []
    if options.input:
        rows = files.read_rows(model, options.input, (), _reading(options))
        if not (texts := [text for _, _, text in rows if text is not None]):
            raise ConfigError(f"{options.input}: has no rows")
    for size in options.batch_sizes:
        # The labels are never read; their name makes it a batch of classes.
        samples, milliseconds = Samples([(ids, length)] * size, {"labels": np.zeros(size)}), []
        for number in range(WARM_UP_BATCHES + options.batches):
            chosen = [texts[(number * size + i) % len(texts)] for i in range(size)] if texts else []
            begin = time.perf_counter()
            if texts:
                model.predict(chosen, size)
            else:
                model.scores(samples, size)  # synchronizes: the scores are copied to the host
            if number >= WARM_UP_BATCHES:
                milliseconds.append(1000 * (time.perf_counter() - begin))
        figures = {
            f"p{percent}": float(np.percentile(milliseconds, percent))
            for percent in (50, 90, 95, 99, 100)
        }
        mean = float(np.mean(milliseconds))
        figures |= {
            "mean": mean,
            "std": float(np.std(milliseconds)),
            "sequences_per_second": 1000 * size / mean,
        }
        rounded = {name: round(value, 3) for name, value in figures.items()}
        source = {"input": str(options.input)} if texts else {"tokens": length}
        print(
            json.dumps({"batch_size": size, **source, "device": model.device.type, **rounded}),
            flush=True,
        )


def seeds(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> None:
    """Table of the metrics of a run's trials, with mean and standard deviation."""
    parser.add_argument("folder", type=Path, help="folder of the run, results/<RUN_NAME>")
    folder = parser.parse_args(arguments).folder
    # By number, as model_10 sorts before model_2.
    paths = sorted(folder.glob("model_*/figures.json"), key=lambda path: int(path.parent.name[6:]))
    if not paths:
        raise ConfigError(f"{folder}: no model_N/figures.json: give the folder of a run")
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    # The seed alone may differ: a mean over other settings or data means nothing.
    settings = [
        {name: value for name, value in row.get("settings", {}).items() if name != "SEED"}
        for row in rows
    ]
    for path, other in zip(paths[1:], settings[1:], strict=True):
        if reason := difference(settings[0], other):
            raise ConfigError(
                f"{paths[0]} is {reason.replace('this one', str(path))}: different runs have no mean"
            )
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    width = max(len(name) for name in names)
    print(
        f"{'seed':<{width}}  "
        + "  ".join(f"{row['seed']:>10}" for row in rows)
        + f"  {'mean':>10}  {'std':>10}"
    )
    for name in names:
        values = [row[name] for row in rows if name in row]
        shown = [
            *values,
            statistics.mean(values),
            statistics.stdev(values) if len(values) > 1 else 0.0,
        ]
        print(f"{name:<{width}}  " + "  ".join(f"{value:>10.4f}" for value in shown))


def natural(text: str) -> int:
    """A positive integer option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least 1")
    return int(text)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Options that say how --input is written, where the file alone does not."""
    parser.add_argument(
        "--separator", default="", help="a character, tab, or none: a text per line"
    )
    parser.add_argument("--encoding", default="", help="(default UTF-8, or UTF-16 with its mark)")
    parser.add_argument("--no-header", action="store_true", help="the first line is a row")


def _reading(options: argparse.Namespace) -> Reading:
    return Reading(
        separator=options.separator, encoding=options.encoding, no_header=options.no_header
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of the run, results/<RUN_NAME>")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default %(default)s)"
    )
