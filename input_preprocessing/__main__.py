"""`python -m input_preprocessing`: lists the stages."""

from __future__ import annotations

import sys

from input_preprocessing.commands import overview

if __name__ == "__main__":
    print(overview())
    sys.exit(0 if sys.argv[1:] in ([], ["--help"], ["-h"]) else 2)
