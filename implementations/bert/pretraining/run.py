"""One rank of one run, from the environment to its exit status: checked (``--check``) or
trained.
"""

import dataclasses
import sys
from collections.abc import Mapping

from bert.core import rundir, variables
from bert.core.dist import World, pick_device, why_no_gpu
from bert.deepspeed.settings import merged
from bert.pretraining import check, closed_division
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.train import pretrain
from bert.training.mlperf import MlperfLog
from common.env import ConfigError, from_env

SUCCESS, NOT_REACHED = 0, 3


def run(environ: Mapping[str, str], check_only: bool = False) -> int:
    """Trains as configured by ``environ``, or with ``check_only`` describes the run; returns the
    exit status.
    """
    # A check leaves nothing in the folder that it judges.
    run_config = rundir.RunConfig()
    try:
        if not check_only:
            run_config = from_env(rundir.RunConfig, environ)
        # Before values are read: a misspelt name explains what is missing after it.
        variables.check_names(environ)
        config = from_env(PretrainingConfig, merged(environ))
        config.check()
        closed_division.check(config, starts=not check_only)
        if not check_only:
            _check_gpu(config)
        # After the rules: a rehearsal must pass as the closed run whose start it trains.
        config = config.rehearsed().emulated().of_trial()
        if check_only:
            print(check.report(config))
            return SUCCESS
        rank, directory = config.dist.rank, config.checkpoint.directory
        with config.run.claims(environ, rank, directory):
            return _train(config)
    except Exception as error:
        return rundir.failed(run_config, "bert", error)


def _check_gpu(config: PretrainingConfig) -> None:
    """Raises ConfigError if a submission would silently train on a CPU, for weeks instead of
    minutes.
    """
    unseen = config.dist.device == "auto" and pick_device(config.dist).type == "cpu"
    if unseen and config.mlperf.is_closed and not config.data.synthetic:
        raise ConfigError(
            f"no GPU is seen ({why_no_gpu()}): fix the driver, or set DEVICE=cpu"
        )


def _train(config: PretrainingConfig) -> int:
    is_main = config.dist.rank == 0
    path = (
        config.run.run_dir / f"result_{config.run.trial}.txt"
        if config.run.run_dir
        else None
    )
    # By RANK, as there is no process group yet to ask which rank logs.
    log = MlperfLog(config.mlperf, is_main, path)
    log.init_start()
    if is_main:
        model = dataclasses.asdict(config.model) | {"gelu_form": config.model.gelu_form}
        rundir.write_description(config.run, config, {"model": model})
    with World(config.dist) as world:
        # NCCL connects at the first collective of each kind: here, not in the first timed step.
        world.warm_up()
        ending = pretrain(config, world, log)
    if is_main and not ending.stopped:
        check.write_identity(config)  # off the clock: it looks at the data
    if ending.stopped and is_main:
        stopped = f"stopped at step {ending.step} ({ending.reason}); RESUME=1 continues"
        # Tells the launcher that the run is not complete.
        rundir.write_error(config.run, stopped)
        print(f"bert: {stopped}", file=sys.stderr)
    if (
        ending.reached
        or ending.stopped
        or config.rehearse
        or not config.evaluate.has_target
    ):
        return SUCCESS
    reason = f"the target accuracy {config.evaluate.target} was not reached in {config.max_steps} steps"
    # All ranks end with the same status, and one gives the reason.
    return (
        rundir.fail(config.run, "bert", reason, NOT_REACHED) if is_main else NOT_REACHED
    )
