"""``python -m bert``: one rank of one run, configured by environment variables; ``--check`` validates and prints it.

Exit status: 0 the target was reached, 1 the run crashed, 2 bad input, 3 the run ended short of the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Mapping

import torch

from bert import check, rundir
from bert.config import Config
from bert.data.records import DataError
from bert.dist import HangError, World, pick_device
from bert.env import ConfigError, from_env
from bert.mlperf import MlperfLog
from bert.pretraining import pretrain
from bert.stop import TrainingError

SUCCESS, CRASHED, BAD_INPUT, NOT_REACHED = 0, 1, 2, 3


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m bert", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="validate settings, data and weights, print them, and stop"
    )
    parser.add_argument("--variables", action="store_true", help="list every variable with its default, and stop")
    options = parser.parse_args(arguments)
    if options.variables:
        print(check.variable_table())
        return SUCCESS
    run = rundir.Config()
    try:
        run = from_env(rundir.Config, environ)
        config = from_env(Config, environ)
        config.check()
        if options.check:
            print(check.report(config))
            return SUCCESS
        return _train(config)
    except (ConfigError, DataError) as error:
        return _fail(run, str(error), BAD_INPUT)
    except (TrainingError, HangError) as error:
        return _fail(run, str(error), CRASHED)
    except Exception as error:
        traceback.print_exc()
        return _fail(run, f"{type(error).__name__}: {error}"[:2000], CRASHED)


def _check_gpu(config: Config) -> None:
    """Raises ConfigError where a submission would quietly train on a CPU, weeks instead of minutes."""
    unseen = config.dist.device == "auto" and pick_device(config.dist).type == "cpu"
    if unseen and config.mlperf.division == "closed" and not config.data.synthetic:
        reason = "PyTorch is built without CUDA"
        if torch.backends.cuda.is_built():
            try:
                torch.cuda.init()
            except Exception as error:  # the driver's own words
                reason = str(error)
        raise ConfigError(f"no GPU is seen ({reason}): fix the driver, or set DEVICE=cpu")


def _train(config: Config) -> int:
    _check_gpu(config)
    is_main = config.dist.rank == 0
    path = config.run.run_dir / f"result_{config.run.trial}.txt" if config.run.run_dir else None
    log = MlperfLog(config.mlperf, is_main, path)
    log.init_start()
    if is_main:
        model = dataclasses.asdict(config.model) | {"gelu_form": config.model.gelu_form}
        rundir.write_description(config.run, config, {"model": model})
    with World(config.dist) as world:
        ending = pretrain(config, world, log)
    if ending.reached:
        return SUCCESS
    reason = f"the target accuracy {config.evaluate.target} was not reached in {config.max_steps} steps"
    return _fail(config.run, reason, NOT_REACHED) if is_main else NOT_REACHED


def _fail(run: rundir.Config, reason: str, status: int) -> int:
    reason = " ".join(reason.split())
    rundir.write_error(run, reason)
    print(f"bert: error: {reason}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # No exit handlers: after a failure, peers may hang in a collective that a handler would wait for; after a success,
    # threads of the communicators now and then abort a process that is torn down around them.
    os._exit(status)
