"""One rank of one fine-tuning run, from the environment to its exit status."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from bert.core import rundir, variables
from bert.core.dist import HangError, World
from bert.core.env import ConfigError, from_env
from bert.data.records import DataError
from bert.training.stop import TrainingError
from finetune import check
from finetune import config as settings
from finetune.train import finetune

SUCCESS, CRASHED, BAD_INPUT = 0, 1, 2


def run(environ: Mapping[str, str], check_only: bool = False) -> int:
    """Fine-tunes as ``environ`` says, or with ``check_only`` prints what would run; returns the exit status."""
    run_config = rundir.Config()
    try:
        run_config = from_env(rundir.Config, environ)
        variables.check_names(environ)
        config = settings.read(environ)
        if check_only:
            print(check.report(config, environ))
            return SUCCESS
        if config.run.run_dir is None:
            raise ConfigError("RUN_DIR is not set: give the folder for the model and the predictions")
        if config.dist.rank == 0:
            rundir.write_description(config.run, config, {"model": config.model, "seed": config.trial_seed})
        with World(config.dist) as world:
            finetune(config, environ, world)
        return SUCCESS
    except (ConfigError, DataError) as error:
        return rundir.fail(run_config, "finetune", str(error), BAD_INPUT)
    except (TrainingError, HangError) as error:
        return rundir.fail(run_config, "finetune", str(error), CRASHED)
    except Exception as error:
        traceback.print_exc()
        return rundir.fail(run_config, "finetune", f"{type(error).__name__}: {error}"[:2000], CRASHED)
