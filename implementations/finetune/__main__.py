"""``python -m finetune``: one rank of a run, configured by environment variables; or a COMMAND on
fine-tuned models.

Any setting may also be given as an option, which overrides the variable: --lr 3e-5 is LR=3e-5.

Exit status: 0 success, 1 crash, 2 bad input.
"""

import os
import sys
from collections.abc import Mapping

from bert.core import variables
from bert.core.refusal import refuse
from common.env import ConfigError
from common.process import front, run_and_exit, run_command

# Listed here because PyTorch takes seconds to import, and --help should not.
COMMANDS = {
    "predict": "labels, numbers or answers of a fine-tuned model for a file or a text",
    "embed": "sentence embeddings of a file's texts",
    "benchmark": "latency and sequences per second of a fine-tuned model",
    "seeds": "metrics of a run's seeds, with mean and standard deviation",
}


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns the exit status."""
    if arguments and (name := arguments[0]) in COMMANDS:
        from finetune import commands

        return run_command(
            getattr(commands, name),
            f"finetune {name}",
            "finetune",
            arguments[1:],
            environ,
        )
    parser = front("finetune", __doc__, "[--check]", COMMANDS)
    parser.add_argument(
        "--check",
        action="store_true",
        help="validate settings, data and weights, print, and stop",
    )
    options, words = parser.parse_known_args(arguments)
    try:
        given = variables.from_options(words, [*COMMANDS, "--check", "--help"])
        # Only now: PyTorch comes with it.
        from bert.training import schedule
        from finetune.train import FinetuneConfig, run

        variables.check_read(given, environ, FinetuneConfig, schedule.ScheduleConfig)
    except ConfigError as error:
        return refuse("finetune", error, environ)
    return run({**environ, **given}, options.check)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:], os.environ))
