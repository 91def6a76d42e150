"""The commands beside training: predict, benchmark, seeds."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from bert.core.env import ConfigError
from bert.data.records import DataError
from finetune import saved
from finetune.squad.answers import Rules


def run(options: argparse.Namespace) -> int:
    """Runs a command; its exit status."""
    try:
        return {"predict": predict, "benchmark": benchmark, "seeds": seeds}[options.command](options)
    except (ConfigError, DataError) as error:
        print(f"finetune: error: {error}", file=sys.stderr)
        return 2


def predict(options: argparse.Namespace) -> int:
    """Answers a question about a context, or classifies a text or a pair."""
    model = saved.load(options.folder, options.device)
    if model.finds_spans:
        if options.question is None or options.context is None:
            raise ConfigError(f"{options.folder} answers questions: give --question and --context")
        rules = Rules(n_best=options.n_best, version_2=model.facts["squad_version"] == "2.0")
        for entry in saved.answer(model, options.question, options.context, rules):
            print(f"{entry['probability']:.4f}  {entry['text'] or '(no answer)'}")
        return 0
    if not options.text or len(options.text) > 2:
        raise ConfigError(f"{options.folder} classifies texts: give --text, twice for a pair")
    (shares,) = saved.classify(model, [tuple(options.text)])
    for name, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        print(f"{share:.4f}  {name}")
    return 0


def benchmark(options: argparse.Namespace) -> int:
    """One line of JSON a batch size."""
    model = saved.load(options.folder, options.device)
    length = min(options.length or model.facts["max_seq_length"], model.model.config.max_position_embeddings)
    for size in options.batch_sizes:
        figures = saved.benchmark(model, size, length, options.batches)
        rounded = {name: round(value, 3) for name, value in figures.items()}
        print(json.dumps({"batch_size": size, "tokens": length, "device": model.device.type, **rounded}), flush=True)
    return 0


def seeds(options: argparse.Namespace) -> int:
    """A table of a run's trials, with mean and standard deviation."""
    paths = sorted(options.folder.glob("model_*/figures.json"), key=lambda path: int(path.parent.name[6:]))
    if not paths:
        raise ConfigError(f"{options.folder}: no model_N/figures.json: name the folder of a run")
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    width = max(len(name) for name in names)
    print(f"{'seed':<{width}}  " + "  ".join(f"{row['seed']:>10}" for row in rows) + f"  {'mean':>10}  {'std':>10}")
    for name in names:
        values = [row[name] for row in rows if name in row]
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        shown = [*values, statistics.mean(values), std]
        print(f"{name:<{width}}  " + "  ".join(f"{value:>10.4f}" for value in shown))
    return 0
