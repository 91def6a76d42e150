"""What was published of the benchmark's files and of fine-tuning's, by which they are known: published.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]


def table(module: str, name: str) -> dict[str, Any]:
    """A YAML file beside a module's own."""
    content = Path(module).with_name(name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


PUBLISHED = table(__file__, "published.yaml")
NUM_PARTS: int = PUBLISHED["text_parts"]
TEXT_MD5: dict[str, str] = PUBLISHED["text_md5"]
