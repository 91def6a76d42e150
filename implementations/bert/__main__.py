"""``python -m bert``: one rank of one run, configured by environment variables.

Exit status: 0 the target was reached, 1 the run crashed, 2 bad input, 3 the run ended short of the target.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping

from bert.core import variables
from bert.core.process import hard_exit

# PyTorch takes seconds to import: what needs no run answers before that.
COMMANDS = {
    "evaluate": "bert.commands.evaluate",
    "export": "bert.commands.export",
    "fill-mask": "bert.commands.fill_mask",
    "compare-captures": "bert.commands.compare_captures",
    "allreduce": "bert.commands.allreduce",
    "deepspeed-config": "bert.commands.deepspeed_config",
    "deepspeed-checkpoint": "bert.commands.deepspeed_checkpoint",
}


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    if arguments and arguments[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:], environ)
        return status
    parser = argparse.ArgumentParser(
        prog="python -m bert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="validate settings, data and weights, print them, and stop"
    )
    parser.add_argument(
        "--variables",
        nargs="?",
        const="table",
        choices=("table", "markdown"),
        help="list every variable, grouped, with its value in this environment or its default, and stop",
    )
    # What the `deepspeed` launcher appends, and its users write.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help="ENGINE=deepspeed")
    parser.add_argument("--deepspeed_config", metavar="FILE", help="DEEPSPEED_CONFIG=FILE")
    options = parser.parse_args(arguments)
    if options.deepspeed or options.deepspeed_config:
        environ = {**environ, "ENGINE": "deepspeed"}
    if options.deepspeed_config:
        environ = {**environ, "DEEPSPEED_CONFIG": options.deepspeed_config}
    if options.variables:
        print(variables.table(environ) if options.variables == "table" else variables.markdown())
        return 0
    from bert.pretraining.run import run

    return run(environ, options.check)


if __name__ == "__main__":
    hard_exit(main(sys.argv[1:], os.environ))
