"""How the commands put out what they found: files that appear whole or not at all, and strict JSON."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from review.logs.findings import ReviewError


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Raises ReviewError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ReviewError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise ReviewError(f"{path}: cannot be written: {error.strerror}") from None


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints strict JSON at once: numbers that JSON does not have become null. ``indent`` None: on one line."""
    print(json.dumps(_strict(value), indent=indent, default=str), flush=True)


def _strict(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
