"""A wrong command line, told before PyTorch is imported."""

from collections.abc import Mapping
from contextlib import suppress

from common.env import ConfigError, from_env
from common.process import say


def refuse(program: str, error: ConfigError, environ: Mapping[str, str]) -> int:
    """Reports the error in one line, also in RUN_DIR for the launcher; returns the exit status."""
    if environ.get("RUN_DIR"):
        from bert.core import rundir  # imports PyTorch, which takes seconds

        with suppress(ConfigError):  # for TRIAL
            return rundir.fail(
                from_env(rundir.RunConfig, environ), program, str(error), 2
            )
    say(f"{program}: error: {error}")
    return 2
