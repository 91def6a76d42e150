"""The closed division refuses every value that its rules fix, before anything starts and all at once."""

import json

import h5py
import pytest
import torch
import torch.nn.functional as F

from bert.__main__ import main
from bert.checkpoint import weights
from bert.data import prepared as manifests
from bert.data.format import open_records
from bert.data.records import DataError
from bert.data.shards import Shards, list_shards, write_index
from bert.model.config import BertConfig
from bert.pretraining import closed_division, identity
from bert.pretraining.config import PretrainingConfig
from bert.training.evaluate import Evaluator
from common.env import ConfigError, from_env

from ..plain import alone

LARGE = {
    "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "hidden_act": "gelu", "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def closed(tmp_path):
    """closed(model_changes, **variables) -> the Config of a closed run of 8 x 48 packed rows, with these changes."""

    def make(model: dict | None = None, **changes: str) -> PretrainingConfig:
        (tmp_path / "bert_config.json").write_text(json.dumps(LARGE | (model or {})))
        (tmp_path / "weights.pt").touch()
        names = (
            "CHECKPOINTDIR_PHASE1",
            "DATADIR_PHASE2_PACKED",
            "DATADIR_PHASE2",
            "EVALDIR",
        )
        environ = dict.fromkeys(names, str(tmp_path)) | {
            "INIT_CHECKPOINT": str(tmp_path / "weights.pt"), "DEVICE": "cpu", "PACKED": "1", "PACKING_FACTOR": "2",
            "BATCHSIZE": "48", "WORLD_SIZE": "8", "LR": "0.00096", "MAX_STEPS": "3680",
            "EVAL_ITER_START_SAMPLES": "150000", "EVAL_ITER_SAMPLES": "150000",
        }  # fmt: skip
        config = from_env(PretrainingConfig, environ | changes)
        config.check()
        return config

    return make


WRONG = {
    "MAX_GRAD_NORM": "2.0", "LAMB_RATIO": "all", "CLIP": "bucket", "LR_SCHEDULE": "poly", "END_LR": "1e-05",
    "EMULATE_RANKS": "8", "TARGET_MLM_ACCURACY": "0.5", "NUM_EVAL_EXAMPLES": "100", "MAX_SEQ_LENGTH": "128",
    "EVAL_ITER_SAMPLES": "1000", "EVAL_ITER_START_SAMPLES": "300000", "EXTENSION": "mine", "SKIP_BATCHES": "3",
    "SEED": "42", "BATCHING": "bins", "NSP": "0", "MASKING": "dynamic", "OPTIMIZER": "adamw", "RESUME": "1",
    "INIT_OPTIMIZER": "1", "INIT_CHECKPOINT": "", "SYNTH_DATA": "1", "PACKING_FACTOR": "1",
}  # fmt: skip
# What some of them need besides.
BESIDE = {
    "CLIP": "SHARD_OPTIMIZER=1", "EMULATE_RANKS": "WORLD_SIZE=1", "RESUME": "CHECKPOINT_DIR=/tmp",
    "BATCHING": "PACKED=0 PACKING_FACTOR=1 BIN_COUNTS=1:1",
}  # fmt: skip
WRONG_MODEL = {
    "num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0, "hidden_size": 512,
    "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 2048, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 1024, "type_vocab_size": 3, "layer_norm_large_model": True, "hidden_act": "gelu_erf",
}  # fmt: skip


def variables(words: str) -> dict[str, str]:
    """As they are set before a command."""
    return dict(word.split("=", 1) for word in words.split())


def refused(config: PretrainingConfig, starts: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        closed_division.check(config, starts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_the_rules_fix_is_refused_with_its_rule(closed, name):
    changes = variables(BESIDE.get(name, "")) | {name: WRONG[name]}
    reason = refused(closed(**changes))
    said = f"the closed division does not allow {name}={WRONG[name]} ("
    assert reason.startswith(said)
    assert closed_division.RULES[name] in reason
    assert reason.endswith("Correct this, or set SUBMISSION_DIVISION=open")
    closed_division.check(closed(**changes, SUBMISSION_DIVISION="open"), starts=True)


@pytest.mark.parametrize("name", WRONG_MODEL)
def test_another_model_is_refused(closed, name):
    value = WRONG_MODEL[name]
    changes = {name: value}
    if name == "layer_norm_large_model":
        changes["hidden_act"] = "gelu_new"
    assert f"{name}={value} in " in refused(closed(changes))
    closed_division.check(closed(changes, SUBMISSION_DIVISION="open"), starts=True)


def test_the_gelu_of_hugging_face_is_another(closed):
    model = {"model_type": "bert", "hidden_act": "gelu"}
    assert "GELU is the tanh form" in refused(closed(model))


def test_all_violations_are_in_one_message(closed):
    # Unpacked rows count once; the clock's seed may not be 0 either.
    words = "SEED=0 END_LR=1e-6 EVAL_ITER_SAMPLES=1000 PACKED=0"
    reason = refused(closed({"num_hidden_layers": 2}, **variables(words)))
    interval = f"EVAL_ITER_SAMPLES=1000 (here 150000: {closed_division.RULES['EVAL_ITER_SAMPLES']}"
    packing = "PACKING_FACTOR=2 ("
    for said in (
        "SEED=0 (",
        "END_LR=1e-06 (",
        "num_hidden_layers=2 in ",
        interval,
        packing,
    ):
        assert said in reason


def test_every_rule_has_a_wrong_value_among_the_tests():
    assert WRONG.keys() == closed_division.RULES.keys()
    assert (
        WRONG_MODEL.keys() | set(closed_division._OF_NO_RULE)
        >= vars(BertConfig()).keys()
    )


def test_the_defaults_are_the_benchmarks():
    fixed = {
        "OPTIMIZER": "lamb", "LAMB_RATIO": "decayed", "MAX_GRAD_NORM": 1.0, "CLIP": "after", "LR_SCHEDULE": "mlperf",
        "END_LR": 0.0, "TARGET_MLM_ACCURACY": 0.72, "NUM_EVAL_EXAMPLES": 10_000, "MAX_SEQ_LENGTH": 512, "SEED": None,
        "BATCHING": "rows", "NSP": True, "MASKING": "static", "SYNTH_DATA": False, "EMULATE_RANKS": 0, "EXTENSION": "",
        "SKIP_BATCHES": "", "INIT_OPTIMIZER": False, "RESUME": False,
    }  # fmt: skip
    of_others = {"EVAL_ITER_SAMPLES", "EVAL_ITER_START_SAMPLES", "PACKING_FACTOR"}
    free = fixed.keys() | of_others | {"INIT_CHECKPOINT"}
    assert free == closed_division.RULES.keys()
    assert {name: identity.DEFAULTS[name] for name in fixed} == fixed


FREE = """
    LR=0.002
    WARMUP_STEPS=100
    OPT_LAMB_BETA_1=0.6
    OPT_LAMB_BETA_2=0.9
    WEIGHT_DECAY_RATE=0.1
    CLIP=before
    MAX_STEPS=10
    GRADIENT_STEPS=2
    MAX_SAMPLES_TERMINATION=9000
    LR_DECAY_STEPS=4000
    PACKED=0 PACKING_FACTOR=1 EXCHANGE_GROUP=8
    EVAL_ITER_SAMPLES=150528 EVAL_ITER_START_SAMPLES=150528
"""  # the last: 196 whole steps of 768


def test_what_the_rules_leave_free_is_allowed(closed):
    for words in FREE.strip().splitlines():
        closed_division.check(closed(**variables(words)), starts=True)


def test_a_gpu_run_starts_only_with_dropped_caches(closed, monkeypatch):
    monkeypatch.setattr(closed_division, "pick_device", lambda _: torch.device("cuda"))
    said = "CACHE_CLEARED=0 (page caches are dropped before each run"
    assert said in refused(closed(), starts=True)
    # --check comes before they are dropped.
    closed_division.check(closed(), starts=False)
    closed_division.check(closed(CACHE_CLEARED="1"), starts=True)
    closed_division.check(closed(SUBMISSION_DIVISION="open"), starts=True)


@pytest.mark.parametrize(
    ("batch_size", "interval"),
    [(448, 150_000), (768, 150_000), (3072, 175_000), (4608, 200_000), (8192, 225_000), (16384, 325_000)],
)  # fmt: skip
def test_the_evaluation_interval_is_the_rules(batch_size, interval):
    assert closed_division.rule_interval(batch_size) == interval


@pytest.mark.parametrize(
    ("arguments", "rehearsal"), [(["--check"], "0"), ([], "0"), ([], "1")]
)
def test_the_command_stops_before_it_reads_data_or_weights(
    closed, tmp_path, capfd, arguments, rehearsal
):
    (tmp_path / "bert_config.json").write_text(json.dumps(LARGE))
    folders = {"CHECKPOINTDIR_PHASE1": str(tmp_path), "RUN_DIR": str(tmp_path / "run")}
    words = "SYNTH_DATA=1 BATCHSIZE=48 LR=1 MAX_STEPS=9 DEVICE=cpu"
    every = "EVAL_ITER_START_SAMPLES=1 EVAL_ITER_SAMPLES=1"
    environ = folders | variables(f"{words} {every} REHEARSAL={rehearsal}")
    assert main(arguments, environ) == 2
    said = "bert: error: the closed division does not allow EVAL_ITER_SAMPLES=1 ("
    assert said in capfd.readouterr().err
    # A check leaves nothing in the folder that it judges.
    left = [] if arguments else ["error_0.txt"]
    assert [path.name for path in tmp_path.glob("run/*")] == left


def test_weights_are_known_by_the_note_of_their_conversion_whatever_their_names_and_padding(
    tmp_path,
):
    torch.manual_seed(0)
    words, bias = torch.randn(6, 4), torch.randn(4)
    table, plain = "bert.embeddings.word_embeddings.weight", "bert.pooler.dense.bias"
    torch.save({table: words, plain: bias}, tmp_path / "plain.pt")
    fused = "bert.pooler.dense_act.bias"
    padded = {fused: bias, table: F.pad(words, (0, 0, 0, 2))}
    path, note = tmp_path / "w.pt", tmp_path / "w.json"
    torch.save({"model": padded}, path)
    known = weights.identity(tmp_path / "plain.pt")

    def unproved():
        found = closed_division.starting_weights(path)
        assert found["weights"] == known
        return found["unproved"]

    assert unproved() == ["weights"]
    for source in closed_division.SOURCE_MD5:  # tf1_ckpt and tf2_ckpt
        noted = {"source": source, "target": "", "tensors": known}
        note.write_text(json.dumps(noted))
        assert unproved() == []
    note.write_text(json.dumps({"source": "0" * 32, "tensors": known}))
    assert unproved() == ["weights"], "of another checkpoint"
    torch.save(padded | {fused: bias + 1e-3}, path)
    said = r"w.pt: not the weights that .*w.json describes: convert them again"
    with pytest.raises(ConfigError, match=said):
        closed_division.starting_weights(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"w.pt: not a readable checkpoint"):
        closed_division.starting_weights(path)


@pytest.fixture
def manifest(prepared, tmp_path, monkeypatch):
    """manifest(**changes) writes the prepared-packed.json of the benchmark's data, with these changes."""
    paths = list(tmp_path.glob("*/*.hdf5"))
    digests = [open_records(path)[1].content_digest for path in paths]
    names = [str(path.relative_to(tmp_path)) for path in paths]
    files = dict(zip(names, digests, strict=True))
    parts = {f"part-{i:05d}-of-00500": "0" * 32 for i in range(500)}
    texts = parts | manifests.TEXT_MD5
    write_index(tmp_path / "packed", sorted((tmp_path / "packed").glob("*.hdf5")))

    samples = open_records(tmp_path / "eval" / "part_eval_10k.hdf5")[0]
    published = manifests.published_digest(samples)
    monkeypatch.setattr(closed_division, "PUBLISHED_EVALUATION", published)
    monkeypatch.setattr(closed_division, "VOCAB_MD5", "0" * 32)

    def write(name="packed", **changes):
        right = {"files": files, "texts": texts, "recipe": closed_division.RECIPE}
        empty = {"text": "", "multiset_digest": "", "versions": {}, "sources": {}}
        counts = dict.fromkeys(("sequences", "rows", "tokens", "eval_samples"), 1)
        made = {key: value | changes.get(key, {}) for key, value in right.items()}
        made = manifests.Manifest(**made, **counts, **empty)
        manifests.write(tmp_path / f"prepared-{name}.json", made)

    return write


def _run(prepared):
    """The configuration of a run and its training data."""
    config = from_env(PretrainingConfig, prepared)
    return config, Shards(list_shards(*config.data.source), 48)


def _sets(prepared):
    return closed_division.data_sets(*_run(prepared))


def test_data_are_known_by_what_prepare_data_left(prepared, manifest, capfd):
    unknown = _sets(prepared)
    assert unknown["unproved"] == ["training_data", "evaluation_data"]
    manifest()
    known = _sets(prepared)
    assert known == unknown | {"unproved": []}
    first = {"weights": "ab", "unproved": ["weights"]}
    facts = closed_division.starting_point(*_run(prepared), first)
    assert facts == known | first
    said = "bert: warning: weights not proved to be the benchmark's"
    assert capfd.readouterr().err.startswith(said)
    before = closed_division.unread(facts)["unproved"]
    assert before == ["weights", "training_data", "evaluation_data"]


def _other(name):
    return {"files": {f"{name}.hdf5": "1" * 32}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {"dupe_factor": 5}}, "dupe_factor 5, not 10"),
        ({"recipe": {"masked_lm_prob": 0.2}}, "masked_lm_prob 0.2, not 0.15"),
        ({"recipe": {"sequences": 1000}}, "sequences 1000, not None"),
        ({"recipe": {"do_lower_case": False}}, "do_lower_case False, not True"),
        ({"texts": {"eval.txt": "1" * 32}}, "a text that is partly the benchmark's: eval.txt is missing or has another"),
        ({"texts": {"mine.txt": "1" * 32}}, "a text that is partly the benchmark's: a part is missing"),
        (_other("packed/part_00001_of_00003"), "other record files than the 3 that were prepared: part_00001_of_00003"),
        (_other("packed/part_00003_of_00003"), "other record files than the 4 that were prepared: part_00003_of_00003"),
        (_other("eval/part_eval_10k"), "EVALDIR=.* is not the evaluation set that was prepared"),
    ],
)  # fmt: skip
def test_data_that_are_made_otherwise_are_refused(prepared, manifest, changes, said):
    manifest(**changes)
    where = "does not allow DATADIR_PHASE2_PACKED="
    with pytest.raises(ConfigError, match=f"{where}.*: {said}.*Prepare the data again"):
        _sets(prepared)


def test_a_file_that_was_not_prepared_is_named(prepared, manifest, tmp_path):
    names = [path.name for path in tmp_path.glob("packed/*.hdf5")]
    # Of other files with the same names.
    manifest("another", files={f"packed/{name}": "1" * 32 for name in names})
    manifest()
    (tmp_path / "packed" / "index.json").unlink()
    assert _sets(prepared)["unproved"] == []
    added = tmp_path / "packed" / "part_00009.hdf5"
    added.write_bytes((tmp_path / "packed" / "part_00001_of_00003.hdf5").read_bytes())
    with pytest.raises(ConfigError, match="than the 3 that were prepared: part_00009"):
        _sets(prepared)


def test_data_altered_under_a_kept_digest_are_not_proved(prepared, manifest, tmp_path):
    manifest()
    config, source = _run(prepared)
    closed_division.prove(config, source, alone())
    evaluation, training = tmp_path / "eval" / "part_eval_10k.hdf5", source.paths[2]
    for path in (evaluation, training):
        with h5py.File(path, "r+") as file:
            file["masked_lm_ids"][...] = 7
    # By what they say of themselves.
    assert closed_division.data_sets(config, source)["unproved"] == []
    said = "{} was changed after it was written"
    with pytest.raises(DataError, match=said.format(training.name)):
        closed_division.prove(config, source, alone())
    with pytest.raises(DataError, match=said.format(evaluation.name)):
        Evaluator(config.evaluate, 48, config.model.vocab_size, "", alone())


def test_other_evaluation_samples_than_the_published_ones_are_not_proved(
    prepared, manifest, monkeypatch
):
    """Those that were damaged before prepare_data.sh noted their digest."""
    manifest()
    monkeypatch.undo()
    published = manifests.PUBLISHED_EVALUATION
    said = f"part_eval_10k.hdf5: .*, not the published {published}"
    with pytest.raises(DataError, match=said):
        closed_division.prove(*_run(prepared), alone())


@pytest.mark.parametrize(
    ("changes", "signed"),
    [({"rows": 7}, False), ({"recipe": None}, True), ({"texts": [1]}, True), ({"files": 5}, True), (set(), True),
     ("[" * 100_000, False), ("", False)],
)  # fmt: skip
def test_a_changed_manifest_is_refused(prepared, manifest, tmp_path, changes, signed):
    manifest()
    path = tmp_path / "prepared-packed.json"
    entries = json.loads(path.read_text())
    entries |= changes if isinstance(changes, dict) else {}
    if changes == set():
        del entries["recipe"]
    if signed:
        entries.pop("md5")
        entries["md5"] = manifests._md5_of_entries(entries)
    path.write_text(changes if isinstance(changes, str) else json.dumps(entries))
    with pytest.raises(DataError, match=r"prepared-packed.json .* was changed after"):
        _sets(prepared)


def test_another_vocabulary_is_refused(prepared, manifest, monkeypatch):
    manifest()
    monkeypatch.undo()
    said = "a vocabulary with md5 0{32}, not the benchmark's 64800d5d8528ce344256daf1"
    with pytest.raises(ConfigError, match=said):
        _sets(prepared)
