"""``python -m bert deepspeed-config``: a DeepSpeed JSON as exports for our own engine, and a .deepspeed_env file.

    python -m bert deepspeed-config ds.json --ranks 8        what to export instead of ENGINE=deepspeed
    python -m bert deepspeed-config --environment            what is set here, for the `deepspeed` launcher's nodes

Exit status: 0, or 2 where the JSON says what our own engine does not do.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bert.core import variables
from bert.core.env import ConfigError
from bert.deepspeed import ds_config


def exports(path: Path, ranks: int) -> Iterator[str]:
    """Lines of shell. Raises ConfigError, naming the entry, for what our own engine does not do."""
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}: expected at least 1")
    found = ds_config.read(path)
    meanings, zero = ds_config.meanings(found, ranks), found.get("zero_optimization", {})
    if zero.get("stage") == 3 or ds_config.offloads(zero):
        raise ConfigError(
            f"{path}: zero_optimization: our own engine has no stage 3 and no offload: set ENGINE=deepspeed"
        )
    for key, name, value, explicit in meanings:
        yield f"export {name}={shlex.quote(value)} # {key}{'' if explicit else ', the default'}"
    for key in ds_config.deepspeed_only(found):
        yield f"# {key}: DeepSpeed's alone, without a variable here"


def environment(environ: Mapping[str, str]) -> Iterator[str]:
    """NAME=value of every variable of a run that is set, but for those that tell a rank its place.

    The launcher puts values between double quotes on a command line that pdsh and a shell read, and drops white space
    around them. Raises ConfigError for a value that would not arrive as it is.
    """
    for entries in variables.groups().values():
        for entry in entries:
            value = environ.get(entry.name, "").strip()
            if value and entry.name not in PLACE_OF_A_RANK:
                if odd := sorted(set(value) & set('\n"$`\\%')):
                    what = "a line break" if odd[0] == "\n" else odd[0]
                    raise ConfigError(f"{entry.name} has {what} in it, which DeepSpeed's launcher does not hand on")
                yield f"{entry.name}={value}"


PLACE_OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # DeepSpeed's launcher sets them


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Prints the lines; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bert deepspeed-config",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, help="DeepSpeed's JSON")
    what.add_argument("--environment", action="store_true", help="NAME=value of what is set here, for .deepspeed_env")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of the run, by which train_batch_size is divided")
    options = parser.parse_args(arguments)
    try:
        lines = list(environment(environ) if options.environment else exports(options.file, options.ranks))
    except ConfigError as error:
        print(f"bert deepspeed-config: error: {error}", file=sys.stderr)
        return 2
    if lines:  # an empty one is more than the launcher can read
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
