"""Runs a script or module such that its end explains itself: used by gpu_all.py for every process that it starts.

Five seconds before the limit, every thread's stack goes to stderr, since the process is killed then. An error goes
there with the whole chain of those before it: the end of a recording raises one of its own, which hides the cause.
Where the GPU's memory was too small, what lies in it follows.

usage: python -X faulthandler bench/guarded.py LIMIT (SCRIPT | -m MODULE) [ARGUMENTS ...]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import runpy
import sys
from pathlib import Path

from command_line import Parser, positive
from errors import explain

BEFORE = 5  # seconds from the stacks to the limit


def main() -> None:
    """Runs it."""
    parser = Parser(__doc__)
    parser.add_argument("limit", type=positive, help="seconds until the process is killed")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script, or -m and a module, with its arguments")
    options = parser.parse_args()
    if options.command in ([], ["-m"]):
        parser.error("nothing to run: give a script, or -m and a module")
    what, *arguments = options.command
    faulthandler.dump_traceback_later(max(options.limit - BEFORE, 1), exit=False)
    try:
        if what == "-m":
            module, *arguments = arguments
            sys.argv = [module, *arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [what, *arguments]
            sys.path[0] = str(Path(what).parent)
            runpy.run_path(what, run_name="__main__")
    except Exception as error:
        print(f"{Path(sys.argv[0]).name}: {explain(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
