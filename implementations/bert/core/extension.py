"""A module from outside of this tree that adds optimizers, schedules, attention backends or metric
sinks: EXTENSION names it, and its import registers them.
"""

import hashlib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.env import ConfigError, env, from_env
from common.files import sources_of
from common.process import one_line


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """The module, which every rank must find."""

    module: str = env(
        "EXTENSION",
        "",
        "module on PYTHONPATH that registers parts of its own (open division, docs/train.md)",
    )

    @property
    def identity(self) -> str:
        """The module's name with a digest of its code; empty without one."""
        return f"{self.module} {code(self.module)}" if self.module else ""


def load(environ: Mapping[str, str]) -> None:
    """Imports EXTENSION, if it is set: before settings are read, whose choices it adds to.

    Raises ConfigError if it cannot be imported.
    """
    name = from_env(ExtensionConfig, environ).module
    if not name:
        return
    try:
        importlib.import_module(name)
    except Exception as error:  # of whatever the module does
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(
            f"EXTENSION={name}: {reason}: give a module that is on PYTHONPATH"
        ) from error


def code(name: str) -> str:
    """Digest of an imported module, of a package with all of its sources."""
    path = Path(sys.modules[name].__file__ or "")
    package = path.name == "__init__.py"
    files = sources_of(path.parent) if package else [path]
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.relative_to(path.parent)} ".encode() + file.read_bytes())
    return digest.hexdigest()
