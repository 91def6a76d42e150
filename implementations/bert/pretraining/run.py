"""One rank of one run, from the environment to its exit status: checked (``--check``) or
trained.
"""

from collections.abc import Mapping
from contextlib import suppress

from bert.core import extension, rundir, variables
from bert.core.dist import World, pick_device, why_no_gpu
from bert.data.records import DataError
from bert.deepspeed.settings import merged
from bert.pretraining import check, closed_division, identity, resume, trial
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.train import pretrain
from bert.training.mlperf import MlperfLog
from common.env import ConfigError, from_env
from common.process import say

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
        extension.load(environ)
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
        run_config = config.run
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
    # By RANK, as there is no process group yet to ask which rank logs.
    log = MlperfLog(config.mlperf, is_main, trial.log_of(config.run))
    log.init_start()
    with World(config.dist) as world:
        if before := _ended_before(config, world):
            _check_last_checkpoint(config, world)
            if is_main:
                this = f"{before.log} is of this very run, complete ({before.status})"
                say(f"bert: {this}: nothing is left")
            return _status(config, before.status == "success", is_main)
        # NCCL connects at the first collective of each kind: here, not in the first timed step.
        world.warm_up()
        try:
            ending = pretrain(config, world, log)
        except Exception as error:
            with suppress(OSError):  # a full disk, which is the error
                log.failed(f"{type(error).__name__}: {error}")
            raise
    if not ending.stopped:
        if is_main:
            identity.note(config, identity.of_trial(config))  # looks at the data
        return _status(config, ending.reached, is_main)
    if is_main:
        stopped = f"stopped at step {ending.step} ({ending.reason}); RESUME=1 continues"
        # Tells the launcher that the run is not complete.
        rundir.write_error(config.run, stopped)
        say(f"bert: {stopped}")
    return SUCCESS


def _ended_before(config: PretrainingConfig, world: World) -> trial.Ended | None:
    """How this very trial ended, if it is complete already. A collective.

    Raises ConfigError, on every rank, if RUN_DIR has another run's trial, and without RESUME=1.
    """
    problem, before = "", None
    if world.is_main:  # another node may not share RUN_DIR
        try:
            before = trial.ended(config)
        except (ConfigError, DataError) as error:
            problem = str(error)
        if before and not config.checkpoint.resume:
            problem = f"{before.log} is complete: for a new run give another RUN_DIR, or TRIAL"
    problem, before = world.objects((problem, before))[0]
    if problem:
        raise ConfigError(problem)
    return before


def _check_last_checkpoint(config: PretrainingConfig, world: World) -> None:
    """Raises ConfigError if a run that is complete has lost its last checkpoint. A collective."""
    folder = config.checkpoint.directory
    saved = resume.newest(config, world)
    if folder is not None and (saved is None or not saved["ended"]):
        raise ConfigError(
            f"CHECKPOINT_DIR={folder} lacks the last checkpoint of a run that is complete: "
            "to train that again give another RUN_DIR"
        )


def _status(config: PretrainingConfig, reached: bool, is_main: bool) -> int:
    """The exit status of a run that is complete."""
    if reached or config.rehearse or not config.evaluate.has_target:
        return SUCCESS
    reason = f"the target accuracy {config.evaluate.target} was not reached in {config.max_steps} steps"
    # All ranks end with the same status, and one gives the reason.
    return (
        rundir.fail(config.run, "bert", reason, NOT_REACHED) if is_main else NOT_REACHED
    )
