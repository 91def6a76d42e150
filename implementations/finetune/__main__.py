"""``python -m finetune``: one rank of a run, configured by environment variables; with a COMMAND, what comes after it.

Any setting may be given as an option, which wins over the variable of its name: --lr 3e-5 is LR=3e-5.

Exit status: 0 done, 1 the run crashed, 2 bad input.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping

from bert.core import variables
from bert.core.env import ConfigError
from bert.core.process import front, refuse, run_and_exit, run_command

# PyTorch takes seconds to import: --help answers before that.
COMMANDS = {
    "predict": "labels, numbers or answers for a file, or one text, by a fine-tuned model",
    "benchmark": "latency and sequences a second of a fine-tuned model",
    "seeds": "figures of a run's seeds, with mean and standard deviation",
}


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    if arguments and (name := arguments[0]) in COMMANDS:
        from finetune import commands

        return run_command(getattr(commands, name), f"finetune {name}", "finetune", arguments[1:], environ)
    parser = front("finetune", __doc__, "[--check]", COMMANDS)
    parser.add_argument("--check", action="store_true", help="validate settings, data and weights, print, and stop")
    options, words = parser.parse_known_args(arguments)
    try:
        if words[:1] == ["--variables"]:
            raise ConfigError("--variables: python -m bert --variables lists them, those of fine-tuning too")
        if words and not words[0].startswith("-") and not difflib.get_close_matches(words[0], COMMANDS):
            raise ConfigError(f"{words[0]}: no such command: training needs none, only settings (--task squad ...)")
        given = variables.from_options(words, [*COMMANDS, "--check", "--help"])
        from bert.training import schedule
        from finetune.train import Config, run

        variables.check_read(given, Config, schedule.Config)
    except ConfigError as error:
        return refuse("finetune", error, environ)
    return run({**environ, **given}, options.check)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:], os.environ))
