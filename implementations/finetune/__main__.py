"""Fine-tuning, configured by environment variables like ``python -m bert``; and what one does with the result.

Without a command: one rank of one run. Exit status: 0 done, 1 the run crashed, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

# PyTorch takes seconds to import: --help answers before that.


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    predict = commands.add_parser("predict", help="answer a question, or classify a text, by a fine-tuned model")
    predict.add_argument("--question", help="SQuAD: the question")
    predict.add_argument("--context", help="SQuAD: the text that holds the answer")
    predict.add_argument("--text", action="append", help="GLUE: the text; twice for a pair")
    predict.add_argument("--n-best", type=int, default=3, help="answers to show (default %(default)s)")
    timing = commands.add_parser("benchmark", help="latency and sequences a second of a fine-tuned model")
    timing.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="(default 1 8 32)")
    timing.add_argument("--length", type=int, default=0, help="tokens of a sequence; 0: as in training")
    timing.add_argument("--batches", type=int, default=50, help="timed per batch size (default %(default)s)")
    for command in (predict, timing):
        command.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default %(default)s)")
    seeds = commands.add_parser("seeds", help="figures of a run's seeds, with mean and standard deviation")
    for command in (predict, timing, seeds):
        command.add_argument("folder", type=Path, help="of the run, results/<RUN_NAME>")
    parser.add_argument(
        "--check", action="store_true", help="validate settings, data and weights, print them, and stop"
    )
    options = parser.parse_args(arguments)
    if options.command:
        from finetune import commands as handlers

        return handlers.run(options)
    from finetune.run import run

    return run(environ, options.check)


if __name__ == "__main__":
    status = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as bert does, and for its reasons
