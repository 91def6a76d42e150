"""The commands predict, embed, benchmark and seeds."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import wraps

import numpy as np

from bert.core.rundir import difference
from common.env import ConfigError
from common.files import whole_file
from common.options import add_options
from common.tables import read_table
from finetune import files, glue, saved
from finetune.batches import Samples
from finetune.dialect import Reading
from finetune.tables import Layout, Rows, column_names

# Not timed: the first ones compile kernels and fill the allocator's caches.
WARM_UP_BATCHES = 3
SHOWN_ANSWERS = 3
OPTIONS = read_table(__file__, "options.yaml")


def _command(function: Callable[[argparse.Namespace], None]) -> Callable[..., None]:
    """The command of a function of its options, which bears its name."""

    @wraps(function)
    def run(
        parser: argparse.ArgumentParser, arguments: list[str], environ: object
    ) -> None:
        add_options(parser, function.__name__, OPTIONS)
        function(parser.parse_args(arguments))

    return run


@_command
def predict(options: argparse.Namespace) -> None:
    """Predicts every row of a file, or one text: its label with probabilities, a number, or an
    answer.

    The file is CSV, TSV or JSON Lines, also as .gz, with columns of text, or of question and
    context. Separator and header are found, or asked for. The output has its rows in order, with
    the predictions as additional columns; a row without text has none. For SQuAD's JSON see
    MODE=prediction.
    """
    # Before the model is loaded, which takes seconds.
    if (options.input is None) != (options.output is None):
        raise ConfigError("--input needs --output, and --output needs --input")
    model = saved.load(options.folder, options.device)
    if model.facts["task"] == "ner":
        ways = "./run_finetuning.sh ner MODE=prediction, or transformers' pipeline"
        raise ConfigError(f"{options.folder} tags words of CoNLL's files: {ways}")
    if options.input is not None:
        columns = column_names(options.text_columns)
        reading = Reading.of(options)
        files.predict(
            model, options.input, options.output, columns, options.batch_size, reading
        )
    elif model.answers:
        _print_answers(model, options)
    else:
        _print_prediction(model, options)


@_command
def embed(options: argparse.Namespace) -> None:
    """Embeds the texts of a file: the mean of each text's tokens in the last layer, unscaled.

    Of a fine-tuned model, or of any BERT in Hugging Face's layout, such as `python -m bert export`
    writes; sentence-transformers gives the same vectors of the folder. The output is NumPy's,
    float32, with a row for each row of the file; of one without text it is NaN.
    """
    if not (options.input and options.output) or options.output.suffix != ".npy":
        raise ConfigError("give --input FILE and --output X.npy")
    model = saved.load(options.folder, options.device, embeds=True)
    columns = column_names(options.text_columns)
    layout = Layout(texts=columns, reading=Reading.of(options))
    table = Rows(options.input, layout, labelled=False, num_texts=len(columns) or 1)
    texts = [table.text(row) for _, row in table]
    present = [text for text in texts if text is not None]
    files.say(f"{len(texts):,} rows, {table.describe()}, {len(present):,} with text")
    vectors = np.full((len(texts), model.model.config.hidden_size), np.nan, np.float32)
    rows = model.rows_of(present, options.batch_size)
    vectors[[text is not None for text in texts]] = [vector for vector, _ in rows]
    full = sum(is_full for _, is_full in rows)
    if note := glue.cut_note(full, len(rows), model.facts["max_seq_length"]):
        files.say(note)
    with whole_file(options.output) as partial, open(partial, "wb") as output:
        np.save(output, vectors)


def _print_answers(model: saved.Saved, options: argparse.Namespace) -> None:
    """The best answers to a question, with their probabilities."""
    if options.question is None or options.context is None:
        raise ConfigError(
            f"{options.folder} answers questions: give --question and --context, or --input FILE"
        )
    (prediction,) = model.predict([(options.question, options.context)])
    for entry in prediction["n_best"][:SHOWN_ANSWERS]:
        print(f"{entry['probability']:.4f}  {entry['text'] or '(no answer)'}")


def _print_prediction(model: saved.Saved, options: argparse.Namespace) -> None:
    """The labels of a text by probability, or its number."""
    count = model.facts["num_texts"]
    if len(options.text or ()) != count:
        raise ConfigError(f"{options.folder} takes {count} of --text, or --input FILE")
    (prediction,) = predictions = model.predict([tuple(options.text)])
    if note := model.cut_note(predictions):
        files.say(note)
    shares = prediction.get("probabilities", {})
    if not shares:
        print(prediction["prediction"])
    for name in sorted(shares, key=lambda name: -shares[name]):
        print(f"{shares[name]:.4f}  {name}")


@_command
def benchmark(options: argparse.Namespace) -> None:
    """Latency in milliseconds and sequences per second, one JSON line per batch size.

    On random tokens of one length.
    """
    model = saved.load(options.folder, options.device)
    shape = model.model.config
    length = min(
        options.length or model.facts["max_seq_length"], shape.max_position_embeddings
    )
    # Below 1,000 BERT's vocabulary holds special and
    # unused entries; the remainder serves tiny ones.
    first = 1000 % shape.vocab_size
    ids = (
        np.random.default_rng(0)
        .integers(first, shape.vocab_size, length)
        .astype(np.int32)
    )
    for size in options.batch_sizes:
        # The labels are never read.
        samples = Samples([(ids, length)] * size, {"labels": np.zeros(size)})
        milliseconds = []
        for _ in range(WARM_UP_BATCHES + options.batches):
            begin = time.perf_counter()
            # Synchronizes: the scores are copied to the host.
            model.scores(samples, size)
            milliseconds.append(1000 * (time.perf_counter() - begin))
        timed = np.array(milliseconds[WARM_UP_BATCHES:])
        figures = {
            f"p{part}": np.percentile(timed, part) for part in (50, 90, 95, 99, 100)
        }
        figures |= {"mean": timed.mean(), "std": timed.std()}
        figures["sequences_per_second"] = 1000 * size / timed.mean()
        rounded = {name: round(float(value), 3) for name, value in figures.items()}
        about = {"batch_size": size, "tokens": length, "device": model.device.type}
        print(json.dumps(about | rounded), flush=True)


@_command
def seeds(options: argparse.Namespace) -> None:
    """Table of the metrics of a run's trials, with mean and standard deviation."""
    folder = options.folder
    # By number, as model_10 sorts before model_2.
    paths = sorted(
        folder.glob("model_*/figures.json"), key=lambda path: int(path.parent.name[6:])
    )
    if not paths:
        raise ConfigError(
            f"{folder}: no model_N/figures.json: give the folder of a run"
        )
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    # The seed alone may differ: a mean over other settings or data means nothing.
    settings = [row.get("settings", {}) | {"SEED": 0} for row in rows]
    for path, other in zip(paths[1:], settings[1:], strict=True):
        if reason := difference(settings[0], other):
            raise ConfigError(
                f"{paths[0]} is {reason.replace('this one', str(path))}: different runs have no mean"
            )
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    width = max(len(name) for name in names)
    lines = {"seed": [*(str(row["seed"]) for row in rows), "mean", "std"]}
    for name in names:
        values = [row[name] for row in rows]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        shown = [*values, statistics.mean(values), deviation]
        lines[name] = [f"{value:.4f}" for value in shown]
    for name, cells in lines.items():
        print(f"{name:<{width}}  " + "  ".join(f"{cell:>10}" for cell in cells))
