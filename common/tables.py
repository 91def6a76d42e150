"""YAML files beside the modules that own them."""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]


def read_table(module: str, name: str) -> dict[str, Any]:
    """A YAML file in the folder of the module file."""
    content = Path(module).with_name(name).read_text(encoding="utf-8")
    # The parser in C reads the rulebook in a tenth of the time; PyYAML is sometimes built without
    # it.
    return yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
