"""`python -m input_preprocessing STAGE`: runs a stage, with one-line messages on signals; --help
lists the stages.
"""

import sys

from common.process import status_of
from input_preprocessing import STAGES
from input_preprocessing.stage import interrupt


def overview() -> str:
    """Usage and a summary of every stage."""
    lines = [
        f"  {name:{max(map(len, STAGES))}}  {summary}"
        for name, (_, summary) in STAGES.items()
    ]
    usage = "usage: python -m input_preprocessing STAGE [options]   (--help after a stage lists its options)"
    return "\n".join([usage, "", *lines])


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(overview())
    elif name not in STAGES:
        hint = "python -m input_preprocessing --help lists them"
        print(
            f"python -m input_preprocessing: no stage {name!r}; {hint}", file=sys.stderr
        )
        # Like argparse for wrong usage; errors of a stage itself end with 1.
        sys.exit(2)
    else:
        del sys.argv[1]
        interrupt.install(f"python -m input_preprocessing {name}")
        # Imported after install(), as it takes time.
        from input_preprocessing.stage.cli import run_stage

        run_stage(name)


if __name__ == "__main__":
    sys.exit(status_of(main))
