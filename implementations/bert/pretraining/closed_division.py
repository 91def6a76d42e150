"""MLPerf Training's rules for BERT's closed division, checked before a run starts.

Sources, quoted with each rule: the training rules (training_policies/training_rules.adoc, round
5.0), the reference (BERT of mlcommons/training: modeling.py, optimization.py, run_pretraining.py,
bert_config.json) and its README, to which the rules refer by "as the reference". They leave free:
batch size, learning rate, warm-up, betas, epsilon, weight decay, number formats, and whether
gradients are clipped before or after the all-reduce.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert.checkpoint import weights
from bert.core.dist import World, pick_device
from bert.data import integrity, prepared
from bert.data.format import open_records, recorded_digest
from bert.data.hdf5 import open_hdf5
from bert.data.prepared import (
    PUBLISHED_EVALUATION,
    VOCAB_MD5,
    Manifest,
    published_digest,
)
from bert.data.records import DataError
from bert.data.shards import Shards, list_shards
from bert.model.config import BertConfig
from bert.pretraining.config import PretrainingConfig
from bert.pretraining.identity import DEFAULTS, data_digest
from common.env import ConfigError, settings
from common.files import object_of
from common.lists import first_few
from common.process import say

# Of bert_config.json, not compared: all weights come from the checkpoint; GELU by its form.
_OF_NO_RULE = "initializer_range", "hidden_act", "next_sentence"
# By the variable they fix.
RULES = {
    "OPTIMIZER": "LAMB is the benchmark's only optimizer (training rules, optimizers)",
    "LAMB_RATIO": "biases and LayerNorm have no trust ratio: decayed (reference, optimization.py)",
    "MAX_GRAD_NORM": "gradients are clipped to a norm of 1.0 (reference, optimization.py)",
    "CLIP": "the whole gradient is clipped, before or after the all-reduce (reference, optimization.py)",
    "LR_SCHEDULE": "the learning rate warms up linearly, then decays polynomially: mlperf (reference, optimization.py)",
    "END_LR": "the learning rate decays to 0 (reference, optimization.py)",
    "TARGET_MLM_ACCURACY": "the quality target is 0.720 (training rules, benchmarks)",
    "NUM_EVAL_EXAMPLES": "every evaluation takes all 10,000 evaluation samples (training rules, quality measure)",
    "EVAL_ITER_SAMPLES": "evaluations come every floor(0.05 (230.23 batch + 3,000,000) / 25,000) 25,000 samples, or at "
    "the next whole step (training rules, evaluation frequency)",
    "EVAL_ITER_START_SAMPLES": "the first evaluation comes after one interval (training rules, evaluation frequency)",
    "MAX_SEQ_LENGTH": "sequences have up to 512 tokens (reference, README)",
    "SEED": "seeds come from the clock or the system: leave it unset (training rules, random numbers)",
    "BATCHING": "data is traversed in random order: rows (training rules, training data order)",
    "NSP": "next sentences are predicted, too (reference, run_pretraining.py)",
    "MASKING": "masks are those of the prepared data: static (reference, create_pretraining_data.py)",
    "SYNTH_DATA": "the data set is Wikipedia (training rules, benchmarks)",
    "PACKING_FACTOR": "the global batch is logged in sequences: 2 for a packed row of Wikipedia, 1 for an unpacked one",
    "INIT_CHECKPOINT": "training starts from model.ckpt-28252: give the converted checkpoint (training rules, weights)",
    "EMULATE_RANKS": "one rank without the others trains no model",
    "EXTENSION": "code of one's own is no reference (training rules, divisions)",
    "SKIP_BATCHES": "all of the data are traversed (training rules, training data order)",
    "INIT_OPTIMIZER": "LAMB's moments start from 0 (reference, optimization.py)",
    "RESUME": "a run is timed from its start, and the log of a resumed one leaves out the time trained before",
}
# Allowed besides the defaults, which are the benchmark's; ``violations`` adds what depends on others.
ALSO = {"OPTIMIZER": ("apex_lamb",), "CLIP": ("before",)}

# md5 of the benchmark's files (MLCommons' retired_benchmarks/bert/dataset.md):
# model.ckpt-28252.index and its data, of tf1_ckpt or tf2_ckpt, and bert_config.json, as
# prepare_data.sh notes them beside the converted checkpoint.
_CHECKPOINTS = (
    "f97de3ae180eb8d479555c939d50d048 50797acd537880bfb5a7ade80d976129",
    "fc34dd7a54afc07f2d8e9d64471dc672 77d642b721cf590c740c762c7f476e04",
)
SOURCE_MD5 = tuple(
    hashlib.md5(f"{files} 7f59165e21b7d566db610ff6756c926b".encode()).hexdigest()
    for files in _CHECKPOINTS
)
# How the benchmark's data are made (reference, README), by the keys of prepared-*.json.
RECIPE = {
    "max_seq_length": 512, "max_predictions_per_seq": 76, "masked_lm_prob": 0.15, "short_seq_prob": 0.1,
    "random_seed": 12345, "dupe_factor": 10, "do_lower_case": True, "nsp": True, "sequences": None,
    "num_eval_samples": 10_000,
}  # fmt: skip


def rule_interval(global_batch_size: int) -> int:
    """Training samples between evaluations: floor(0.05 (230.23 GBS + 3,000,000) / 25,000) 25,000
    (training rules).
    """
    # 150,000 for a batch of 768, that of the published runs on 8 GPUs.
    return int(0.05 * (230.23 * global_batch_size + 3_000_000) / 25_000) * 25_000


def violations(config: PretrainingConfig) -> Iterator[str]:
    """Settings of a run and its model that the rules do not allow, each as NAME=VALUE (rule)."""
    data, batch = config.data, config.global_batch_size
    path = config.checkpoint.init_checkpoint
    interval = rule_interval(batch)
    # As the rule has it, or rounded up to whole steps.
    intervals = interval, -(-interval // batch) * batch
    kept = {name: (DEFAULTS[name], *ALSO.get(name, ())) for name in RULES}
    kept |= dict.fromkeys(("EVAL_ITER_SAMPLES", "EVAL_ITER_START_SAMPLES"), intervals)
    kept |= {
        # NVIDIA's logs count a packed row as 2 sequences (1.999 on average), an unpacked one as 1.
        "PACKING_FACTOR": (2 if data.packed else 1,),
        # Any path is allowed; the line is there for a path that is missing, which is "" below.
        "INIT_CHECKPOINT": (path,),
    }
    values = settings(config) | {"INIT_CHECKPOINT": path or ""}
    for name, rule in RULES.items():
        if (value := values[name]) not in kept[name]:
            if kept[name] == intervals:
                rule = f"here {interval}: {rule}"
            yield f"{name}={int(value) if isinstance(value, bool) else value} ({rule})"
    # The defaults are BERT-large's, and so the benchmark's.
    reference, model, file = BertConfig(), config.model, config.bert_config_path
    for name, fixed in vars(reference).items():
        value = getattr(model, name)
        if value != fixed and name not in _OF_NO_RULE:
            yield f"{name}={value} in {file} (the model is BERT-large: {fixed})"
    # By its form and not its name: "gelu" is tanh in Google's file, erf in Hugging Face's.
    if model.gelu_form != "tanh":
        yield f"hidden_act={model.hidden_act} in {file} (GELU is the tanh form: reference, modeling.py)"


def starting_weights(path: Path) -> dict[str, Any]:
    """Identity of the initial weights, and whether they are proved to be the published ones.

    Raises ConfigError if they are not those that were converted.
    """
    identity, note = weights.identity(path), path.with_suffix(".json")
    noted = object_of(note)
    if noted.get("tensors", identity) != identity:
        raise ConfigError(
            f"INIT_CHECKPOINT={path}: not the weights that {note} describes: convert them again"
        )
    # By what the conversion noted of its sources, of which the tensors tell nothing.
    proved = "tensors" in noted and noted.get("source") in SOURCE_MD5
    return {"weights": identity, "unproved": [] if proved else ["weights"]}


def manifest_of(source: Shards) -> Manifest | None:
    """prepare_data.sh's manifest, above the folder, that lists most of these files, or of their
    names; None if none lists one.

    Raises DataError naming a manifest that was changed.
    """
    files = _digests_of(source)

    def alike(made: Manifest) -> tuple[int, int]:
        listed = _records_of(made)
        # Packed and unpacked files may have the same names.
        same = sum(files.get(name) == digest for name, digest in listed.items())
        return same, len(files.keys() & listed)

    manifests = [
        prepared.read(path)
        for above in source.paths[0].parent.resolve().parents[:2]
        for path in sorted(above.glob("prepared-*.json"))
    ]
    best = max(manifests, key=alike, default=None)
    return best if best and any(alike(best)) else None


def _digests_of(source: Shards) -> dict[str, str]:
    return {path.name: digest for path, digest in source.recorded_digests().items()}


def _records_of(made: Manifest) -> dict[str, str]:
    return {Path(name).name: made.files[name] for name in made.records}


def prove(config: PretrainingConfig, source: Shards, world: World) -> None:
    """Compares the training data with their digests, file by file, and the evaluation samples with
    the published ones. A collective.

    For after the clock, which it would hold up; ``--check`` does it beforehand, and then it costs
    nothing here. That the evaluation set is as it was prepared is found as it is read. Raises
    DataError naming the file.
    """
    integrity.check(source.recorded_digests(), world, config.run.log_dir)
    problem = ""
    evaldir = config.evaluate.evaldir
    # With a manifest the text is the benchmark's, and the set one file.
    if world.is_main and evaldir and manifest_of(source):
        (path,) = list_shards(evaldir, "EVALDIR")
        digest = published_digest(open_records(path)[0])
        if digest != PUBLISHED_EVALUATION:
            other = f"digest {digest}, not the published {PUBLISHED_EVALUATION}"
            problem = f"{path}: its samples have the {other}: prepare it again"
    if problem := world.objects(problem)[0]:
        raise DataError(problem)


def data_sets(config: PretrainingConfig, source: Shards) -> dict[str, Any]:
    """Identity of training and evaluation data, and what of it prepare_data.sh's manifest does not
    prove.

    Raises ConfigError naming all that differs from the benchmark's recipe, or from what was
    prepared; DataError as manifest_of() does.
    """
    (folder, variable), evaldir = config.data.source, config.evaluate.evaldir
    assert evaldir is not None
    evaluation = [
        recorded_digest(open_hdf5(path)) for path in list_shards(evaldir, "EVALDIR")
    ]
    identity = source.identity()
    files, made, wrong = _digests_of(source), manifest_of(source), []
    if source.vocab_md5 and source.vocab_md5 != VOCAB_MD5:
        wrong.append(
            f"a vocabulary with md5 {source.vocab_md5}, not the benchmark's {VOCAB_MD5}"
        )
    if made:
        # Manifests older than these keys were made with these values.
        recipe = {"do_lower_case": True, "nsp": True, "sequences": None} | made.recipe
        differ = [name for name, value in RECIPE.items() if recipe.get(name) != value]
        wrong += [f"{name} {recipe.get(name)}, not {RECIPE[name]}" for name in differ]
        is_benchmarks, words = made.benchmark_text
        if not is_benchmarks:
            wrong.append(f"a text that is {words}")
        known = _records_of(made)
        if differing := sorted(
            name for name in files | known if files.get(name) != known.get(name)
        ):
            wrong.append(
                f"other record files than the {len(known)} that were prepared: {first_few(differing)}"
            )
        # In one file, and no other: each evaluation takes all of it.
        if evaluation != [made.files[name] for name in made.evaluation]:
            wrong.append(
                f"EVALDIR={evaldir} is not the evaluation set that was prepared with it"
            )
    if wrong:
        raise ConfigError(
            f"the closed division does not allow {variable}={folder}: {'; '.join(wrong)}. "
            "Prepare the data again with the defaults of prepare_data.sh, or set SUBMISSION_DIVISION=open"
        )
    facts: dict[str, Any] = {
        "training_data": data_digest(identity),
        "evaluation_data": " ".join(evaluation),
    }
    return facts | {"unproved": [] if made else list(facts)}


def starting_point(
    config: PretrainingConfig, source: Shards, first: Mapping[str, Any]
) -> dict[str, Any]:
    """Starting point of a closed run, for its log and environment; warns of what is not proved
    once the data are read.

    first: result of starting_weights(). Raises ConfigError as data_sets() does.
    """
    sets = data_sets(config, source)
    facts: dict[str, Any] = {
        **first,
        **sets,
        "unproved": [*first["unproved"], *sets["unproved"]],
    }
    if facts["unproved"]:
        names = ", ".join(name.replace("_", " ") for name in facts["unproved"])
        say(
            f"bert: warning: {names} not proved to be the benchmark's: no files of prepare_data.sh beside them"
        )
    return facts


def unread(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A starting point before ``prove``: the data say themselves what they hold."""
    sets = [name for name in facts if name.endswith("_data")]
    return {**facts, "unproved": list(dict.fromkeys([*facts["unproved"], *sets]))}


def check(config: PretrainingConfig, starts: bool) -> None:
    """Raises ConfigError naming every violation of a closed run at once; does nothing in the open
    division.

    starts: the run starts now, so that on GPUs caches must have been dropped; nobody submits a CPU
    run.
    """
    if not config.mlperf.is_closed:
        return
    # All at once: each attempt may wait hours in a queue.
    problems = list(violations(config))
    # Only at the start: --check runs before the launch scripts have dropped the caches.
    if (
        starts
        and not config.mlperf.cache_cleared
        and pick_device(config.dist).type == "cuda"
    ):
        problems.append(
            "CACHE_CLEARED=0 (page caches are dropped before each run; "
            "the launch scripts do it where sudo allows it and CLEAR_CACHES is not 0)"
        )
    if problems:
        listed = "; ".join(problems)
        raise ConfigError(
            f"the closed division does not allow {listed}. Correct this, or set SUBMISSION_DIVISION=open"
        )
