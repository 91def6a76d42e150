"""``python -m bert``: one rank of a run, configured by environment variables; with a COMMAND, that
command.

Any setting may also be given as an option, which overrides the variable of its name: --lr 0.002 is
LR=0.002.

Exit status: 0 the target was reached, 1 the run crashed, 2 bad input, 3 the run ended short of the
target.
"""

import importlib
import os
import sys
from collections.abc import Mapping

from bert.core import variables
from bert.core.refusal import refuse
from common.env import ConfigError
from common.process import front, run_and_exit, run_command

# Modules are imported on use: PyTorch takes seconds to import.
COMMANDS = {  # module, and what the command does
    "evaluate": (
        "evaluate",
        "accuracy and losses of checkpoints, also of a run that is still training",
    ),
    "export": ("export", "export trained weights in Hugging Face's format"),
    "compare-captures": (
        "compare_captures",
        "the first module whose results differ between two runs with CAPTURE",
    ),
    "allreduce": (
        "allreduce",
        "check that all ranks reach each other and add up correctly, and how fast",
    ),
    "deepspeed-config": (
        "deepspeed",
        "a .deepspeed_env file for the deepspeed launcher",
    ),
}


def as_launched(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a rank of the config's run: a shell, where --check is typed, has no
    launcher's.
    """
    nodes, gpus = (environ.get(name, "") for name in ("DGXNNODES", "DGXNGPU"))
    is_rank = environ.get("WORLD_SIZE") or environ.get("EMULATE_RANKS", "0") != "0"
    if is_rank or not (nodes.isdecimal() and gpus.isdecimal()):
        return environ
    ranks = {"WORLD_SIZE": str(int(nodes) * int(gpus)), "LOCAL_WORLD_SIZE": gpus}
    return {**environ, **ranks}


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    if arguments and (name := arguments[0]) in COMMANDS:
        command = getattr(
            importlib.import_module(f"bert.commands.{COMMANDS[name][0]}"),
            name.replace("-", "_"),
        )
        try:
            return run_command(
                command, f"bert {name}", f"bert {name}", arguments[1:], environ
            )
        except KeyboardInterrupt:
            return 130
    known = "[--check] [--variables [{table,markdown}]] [--deepspeed]"
    parser = front(
        "bert", __doc__, known, {name: text for name, (_, text) in COMMANDS.items()}
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="validate settings, data and weights, print, and stop",
    )
    parser.add_argument(
        "--variables", nargs="?", const="table", choices=("table", "markdown"),
        help="list every variable, grouped, with its value in this environment or its default, and stop",
    )  # fmt: skip
    parser.add_argument(
        "--deepspeed",
        action="store_true",
        help="ENGINE=deepspeed, as --deepspeed_config FILE implies",
    )
    options, words = parser.parse_known_args(arguments)
    try:
        given = variables.from_options(
            words, [*COMMANDS, "--check", "--variables", "--deepspeed", "--help"]
        )
        if options.deepspeed or "DEEPSPEED_CONFIG" in given:
            given["ENGINE"] = "deepspeed"
        environ = {**environ, **given}
        if options.variables:
            print(
                variables.table(environ)
                if options.variables == "table"
                else variables.markdown()
            )
            return 0
        from bert.pretraining.run import PretrainingConfig, run

        variables.check_read(given, environ, PretrainingConfig)
    except ConfigError as error:
        return refuse("bert", error, environ)
    return run(as_launched(environ) if options.check else environ, options.check)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:], os.environ))
