"""What identifies a run, compared before its checkpoints or its folder are used again.

It stands in two places. ``identity_<TRIAL>.json`` in the run's folder is the trial's: written before
its log is opened, and again with the digests of its data when it is complete, so that a kill leaves
a trial that has begun. Each checkpoint has what a resumption must not change, and whose it is, as
it outlives that folder and is moved without it. Neither is derived from config.json, which
describes the first trial of a folder to its readers, nor from .writer, which says who writes there
now (``core/claim.py``).
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from bert.checkpoint.save import noted_before
from bert.core import rundir
from bert.data.records import SUFFIXES
from bert.data.shards import INDEX
from bert.kernels.precision import resolved
from bert.pretraining.config import PretrainingConfig
from common.env import ConfigError, settings, variables
from common.files import object_of, write_json

# May change where their product, a step's rows, does not.
_ROWS = "WORLD_SIZE", "BATCHSIZE", "GRADIENT_STEPS"
# What a resumed run may change; all other variables must stay (``run_identity``). How work is
# divided and computed: losses then differ by rounding and by dropout's random numbers.
ROUNDING = {
    "DEVICE",
    "FUSED",
    "ATTENTION",
    "CUDA_GRAPH",
    "RECOMPUTE_LAYERS",
    "SHARD_OPTIMIZER",
    "SHARD_GROUP",
    "ENGINE",
    *_ROWS,
}
# Output, length and evaluation of a run, machine and log, which do not affect its weights.
FREE = rundir.OUTPUT | {
    "DATA_LOADER",
    "NUM_EVAL_EXAMPLES",
    "EVAL_BATCHSIZE",
    "INIT_OPTIMIZER",
    "EVAL_ITER_START_SAMPLES",
    "EVAL_ITER_SAMPLES",
    "TARGET_MLM_ACCURACY",
    "MAX_STEPS",
    "MAX_SAMPLES_TERMINATION",
    "REHEARSAL",
    "SKIP_BATCHES",
    "SUSTAINED_TRAINING_TIME",
    "SUBMISSION_DIVISION",
    "SUBMISSION_ORG",
    "SUBMISSION_PLATFORM",
    "SUBMISSION_STATUS",
    "DGXSYSTEM",
    "DGXNNODES",
}


_WEIGHTS, _CHECKPOINTS = "bytes of the starting weights", "folder of checkpoints"
# Also what a run had of a setting that is newer than its checkpoint: a default means "as before".
DEFAULTS = {
    variable.name: field.default for field, variable, _ in variables(PretrainingConfig)
}


def pick_seed(seed: int | None, saved: dict[str, Any] | None) -> int:
    """SEED; unset: the resumed run's, or one from the system."""
    if seed is not None:
        return seed
    # 32 bits from the system: the rules want seeds from the clock or the system.
    return (
        int(saved["run"]["SEED"]) if saved else int.from_bytes(os.urandom(4), "little")
    )


def run_identity(config: PretrainingConfig, seed: int) -> dict[str, Any]:
    """What must not change between a run and its resumption, by variable."""
    return _without(config, ROUNDING.difference(_ROWS) | FREE) | {
        "SEED": seed,
        "MASKING": None if config.data.masking == "static" else config.data.masking,
        # Not MAX_STEPS: a run may become longer than its schedule.
        "LR_DECAY_STEPS": config.schedule.length,
    }


def check_identity(
    config: PretrainingConfig, seed: int, saved: Mapping[str, Any]
) -> str:
    """Raises ConfigError if the saved run is another one; describes changes of ROUNDING."""
    mine = run_identity(config, seed)
    before = _in_todays_names(saved["run"])
    # Rows depend on step and rank alone, and no micro-batch of a rank is clipped by itself.
    can_move = not config.data.for_unpacked and config.optim.clip == "after"
    rows, rows_before = (
        math.prod(identity[name] for name in _ROWS) for identity in (mine, before)
    )
    for name, value in mine.items():
        earlier = before.get(name, DEFAULTS.get(name))
        if earlier == value or (name in _ROWS and can_move and rows == rows_before):
            continue
        cure = "use the same settings"
        if name in _ROWS and can_move:
            cure = f"{' x '.join(_ROWS)} must stay {rows_before}, and is {rows}: change another of them"
        if name == "LR_DECAY_STEPS":
            cure = f"set LR_DECAY_STEPS={earlier}, whatever MAX_STEPS"
        differs = f"a run with {name} {earlier}, this one has {value}"
        raise _of_another(config, differs, f"{cure}, or use another CHECKPOINT_DIR")
    if gone := sorted(before.keys() - mine.keys()):
        differs = f"an earlier version, with the setting {gone[0]}, which is gone"
        cure = "use it as INIT_CHECKPOINT, or continue with the version that wrote it"
        raise _of_another(config, differs, cure)
    now = computed(config)
    earlier = saved["computed"] | {name: before[name] for name in _ROWS}
    changed = [
        f"{name} {earlier.get(name)} -> {value}"
        for name, value in now.items()
        if earlier.get(name) != value
    ]
    if not changed:
        return ""
    cause = "rounding, and by what dropout draws"
    if earlier["BATCHSIZE"] != now["BATCHSIZE"]:
        # A micro-batch's loss is the mean over its own masked tokens, whose number differs.
        cause = f"the weight of each token in its micro-batch, more than by {cause}"
    return f"{', '.join(changed)}: losses differ by {cause}"


def _of_another(config: PretrainingConfig, differs: str, cure: str) -> ConfigError:
    return ConfigError(
        f"RESUME=1: the checkpoint in {config.checkpoint.directory} is of {differs}: {cure}"
    )


def computed(config: PretrainingConfig) -> dict[str, Any]:
    return {name: value for name, value in settings(config).items() if name in ROUNDING}


def _in_todays_names(before: Mapping[str, Any]) -> dict[str, Any]:
    """The identity in a checkpoint of any version."""
    # The schedule's length once had the name of the setting that it came from.
    names = {"MAX_STEPS": "LR_DECAY_STEPS"}
    return {names.get(name, name): value for name, value in before.items()}


def data_digest(identity: Mapping[str, Any]) -> str:
    """Digest of all files, by ``RowSource.identity``."""
    return hashlib.md5(json.dumps(identity).encode()).hexdigest()


def _without(config: PretrainingConfig, names: Set[str]) -> dict[str, Any]:
    """The settings of a run by name, and its model, but these."""
    values = settings(config) | {
        "BERT_CONFIG": config.model.identity,
        "EXTENSION": config.extension.identity,
        # As it is computed: auto is one of the others.
        "PRECISION": resolved(config.precision.precision, config.device),
    }
    return {name: values[name] for name in values if name not in names}


def settings_of(config: PretrainingConfig) -> dict[str, Any]:
    """Settings of a trial."""
    return _without(config, rundir.OUTPUT)


def that_stays(config: PretrainingConfig) -> dict[str, Any]:
    """Those of them that a run may not change while it lasts, and its trials have in common."""
    return _without(config, ROUNDING | FREE | {"LR_DECAY_STEPS"})


_NOTED_IN = "identity_{}.json"


def note(config: PretrainingConfig, facts: Mapping[str, Any]) -> None:
    """Writes a trial's identity, if there is a folder for it."""
    run, checkpoints = config.run, config.checkpoint.directory
    if run.folder is not None:
        where = {_CHECKPOINTS: checkpoints and str(checkpoints.absolute())}
        write_json(run.folder / _NOTED_IN.format(run.trial), {**facts, **where})


def noted(run: rundir.RunConfig, trial: int | str) -> dict[str, Any]:
    """The identity that a trial of the run's folder has noted; empty without one."""
    if run.folder is None:
        return {}
    known = object_of(run.folder / _NOTED_IN.format(trial))
    # Earlier versions noted it unresolved, which says nothing; the checkpoint has what it was.
    if known.get("PRECISION") == "auto":
        del known["PRECISION"]
    return known


def has_begun(config: PretrainingConfig) -> bool:
    """Whether this very trial has begun before, with its folder of checkpoints."""
    run, checkpoints = config.run, config.checkpoint.directory
    if checkpoints is None:
        return False
    begun_with = noted(run, run.trial).get(_CHECKPOINTS)
    before = noted_before(checkpoints)
    return begun_with == str(checkpoints.absolute()) or run.owns(before)


def is_whole(facts: Mapping[str, Any]) -> bool:
    """Whether a trial noted ``of_trial``, at its end, or an earlier version nothing."""
    return not facts or _WEIGHTS in facts


def of_trial(config: PretrainingConfig) -> dict[str, Any]:
    """What identifies a trial that is complete: settings, model and digests of data."""
    facts, path = settings_of(config), config.checkpoint.init_checkpoint
    facts[_WEIGHTS] = path and path.stat().st_size
    if not config.data.synthetic:
        facts["training data"] = contents(config.data.source[0])
    if config.evaluates and config.evaluate.evaldir is not None:
        facts["evaluation data"] = contents(config.evaluate.evaldir)
    return facts


def contents(path: Path) -> str:
    """Digest of names and sizes of record files, and of their folder's index, which has a digest of
    each.
    """
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [
        file
        for file in found
        if file.is_file()
        and (file == path or (file.suffix in SUFFIXES and file.name[0] != "."))
    ]
    sizes = [(file.name, file.stat().st_size) for file in files]
    digest = hashlib.sha256(str(sizes).encode())
    for folder in sorted({file.parent for file in files}):
        # By way of the index the digest covers contents too, without reading the records.
        if (folder / INDEX).is_file():
            digest.update((folder / INDEX).read_bytes())
    return digest.hexdigest()[:16]
