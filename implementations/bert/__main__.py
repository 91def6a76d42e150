"""``python -m bert``: one rank of one run, configured by environment variables; with a COMMAND, what comes after it.

Any setting may be given as an option, which wins over the variable of its name: --lr 0.002 is LR=0.002.

Exit status: 0 the target was reached, 1 the run crashed, 2 bad input, 3 the run ended short of the target.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

from bert.core import variables
from bert.core.env import ConfigError
from bert.core.process import front, refuse, run_and_exit, run_command

# PyTorch takes seconds to import: what needs no run answers before that.
COMMANDS = {  # module, and what it does
    "evaluate": ("evaluate", "accuracy and losses of checkpoints, or of those of a run that is still training"),
    "export": ("export", "trained weights as Hugging Face's classes load them"),
    "fill-mask": ("fill_mask", "the likeliest words for each [MASK] of a text"),
    "compare-captures": ("compare_captures", "the first module that two runs with CAPTURE computed differently"),
    "allreduce": ("allreduce", "whether all ranks reach each other and add right, and how fast"),
    "deepspeed-config": ("deepspeed", "a DeepSpeed JSON as exports for our own engine; a .deepspeed_env file"),
    "deepspeed-checkpoint": ("deepspeed", "a checkpoint of DeepSpeed's as a step_*.pt of our own"),
}


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    if arguments and (name := arguments[0]) in COMMANDS:
        module = importlib.import_module(f"bert.commands.{COMMANDS[name][0]}")
        command = getattr(module, name.replace("-", "_"))
        try:
            return run_command(command, f"bert {name}", f"bert {name}", arguments[1:], environ)
        except KeyboardInterrupt:
            return 130
    known = "[--check] [--variables [{table,markdown}]] [--deepspeed]"
    parser = front("bert", __doc__, known, {name: text for name, (_, text) in COMMANDS.items()})
    parser.add_argument("--check", action="store_true", help="validate settings, data and weights, print, and stop")
    parser.add_argument(
        "--variables", nargs="?", const="table", choices=("table", "markdown"),
        help="list every variable, grouped, with its value in this environment or its default, and stop",
    )  # fmt: skip
    parser.add_argument("--deepspeed", action="store_true", help="ENGINE=deepspeed, as --deepspeed_config FILE implies")
    options, words = parser.parse_known_args(arguments)
    try:
        given = variables.from_options(words, [*COMMANDS, "--check", "--variables", "--deepspeed", "--help"])
        if options.deepspeed or "DEEPSPEED_CONFIG" in given:
            given["ENGINE"] = "deepspeed"
        environ = {**environ, **given}
        if options.variables:
            print(variables.table(environ) if options.variables == "table" else variables.markdown())
            return 0
        from bert.pretraining.run import Config, run

        variables.check_read(given, Config)
    except ConfigError as error:
        return refuse("bert", error, environ)
    return run(environ, options.check)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:], os.environ))
