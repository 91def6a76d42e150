"""``python -m finetune``: one rank of one fine-tuning run, configured by environment variables.

Exit status: 0 done, 1 the run crashed, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

# PyTorch takes seconds to import: --help answers before that.


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    from finetune.run import run

    return run(environ)


if __name__ == "__main__":
    status = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as bert does, and for its reasons
