"""Errors of a benchmark: whole on stderr, and in one line that names the cause and not what came of it."""

from __future__ import annotations

import sys
import traceback

from bert.core.process import root_cause


def explain(error: BaseException) -> str:
    """Prints the chain of tracebacks, and the GPU's memory where that was too small; the cause in one line."""
    traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    cause = root_cause(error)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(cause, torch.OutOfMemoryError) and torch.cuda.is_available():
        print(torch.cuda.memory_summary(), file=sys.stderr)
    sys.stderr.flush()
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]
