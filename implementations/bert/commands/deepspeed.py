"""The `deepspeed` launcher's file of variables."""

import argparse
from collections.abc import Iterator, Mapping

from bert.core import variables
from common.env import ConfigError

# Set by DeepSpeed's launcher.
PLACE_OF_A_RANK = {
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def deepspeed_config(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """A .deepspeed_env file, by which the `deepspeed` launcher hands what is set here to its nodes.

    python -m bert deepspeed-config --environment >.deepspeed_env
    """
    parser.add_argument(
        "--environment",
        action="store_true",
        required=True,
        help="NAME=value of what is set here",
    )
    parser.parse_args(arguments)
    for line in _environment(environ):
        print(line)
    return 0


def _environment(environ: Mapping[str, str]) -> Iterator[str]:
    """NAME=value of every variable of a run that is set, except the launcher's own.

    The launcher puts values in double quotes on a command line parsed by pdsh and a shell, and
    strips white space. Raises ConfigError for a value that would not arrive unchanged.
    """
    for entries in variables.groups().values():
        for entry in entries:
            value = environ.get(entry.name, "").strip()
            if value and entry.name not in PLACE_OF_A_RANK:
                if odd := sorted(set(value) & set('\n"$`\\%')):
                    character = "a line break" if odd[0] == "\n" else odd[0]
                    raise ConfigError(
                        f"{entry.name} has {character} in it, which DeepSpeed's launcher does not hand on"
                    )
                yield f"{entry.name}={value}"
