"""python -m bert evaluate: for each checkpoint of a run the figures of the run itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import torch
import torch.nn.functional as F

from bert.__main__ import main
from bert.checkpoint import huggingface
from bert.checkpoint.save import CheckpointConfig, save_checkpoint
from bert.commands import evaluate as evaluation
from bert.data.batch import make_batch
from bert.data.format import write_records
from bert.data.records import Metadata
from bert.data.shards import Shards, list_shards
from bert.training import evaluate as scoring

from ..states import newest, write_in_shards


def run_evaluation(capsys, prepared, *arguments, **environ):
    """(exit status, stdout, stderr) of the command."""
    names = "EVALDIR", "DEVICE", "OMP_NUM_THREADS"
    settings = {name: prepared[name] for name in names}
    status = main(["evaluate", *map(str, arguments)], settings | environ)
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def save(tiny, make_model, tmp_path):
    """save(steps, **facts) -> a checkpoint as a run of the tiny model writes it; another seed at
    each step.
    """

    def write(steps, **facts):
        model = make_model(tiny, seed=steps, dtype=torch.float32)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        state = {"model": weights, "step": steps, "samples": 6 * steps}
        state |= {"bert_config": dataclasses.asdict(tiny), "ended": False}
        state |= {"vocab_md5": "0" * 32}
        config = CheckpointConfig(directory=tmp_path / "checkpoints", keep=9)
        return save_checkpoint(config, steps, state | facts)

    return write


def parsed(text):
    """Of its lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


def test_the_figures_are_those_of_the_run_and_watching_it_ends_with_it(
    prepared, run_bert, tmp_path, capsys
):
    folder = tmp_path / "run" / "checkpoints"
    kept = {"CHECKPOINT_DIR": str(folder), "CHECKPOINT_EVERY_STEPS": "4"}
    finished = run_bert(prepared | kept | {"CHECKPOINT_KEEP": "9"})
    assert finished.returncode == 3, finished.stderr  # the target is out of reach
    lines = parsed((tmp_path / "run" / "metrics_0.jsonl").read_text())
    found = {line["step"]: line for line in lines if line["kind"] == "evaluation"}
    given = tmp_path / "run", "--json"
    status, out, _ = run_evaluation(capsys, prepared, *given, NUM_EVAL_EXAMPLES="17")
    assert status == 0
    names = "accuracy", "mlm_loss", "nsp_loss", "nsp_accuracy"
    for line in parsed(out):
        theirs = found[line["steps"]]
        for name in names:
            assert line[name] == pytest.approx(theirs[name], rel=1e-6), name
        assert (line["sequences"], line["trained_samples"] > 0) == (17, True)
    assert [line["steps"] for line in parsed(out)] == [4, 8]
    assert newest(folder)["ended"]


def test_a_checkpoint_in_shards_has_the_figures_of_one_in_a_file(
    save, prepared, tmp_path, capsys
):
    """Given directly or by the folder of both, as the newer one."""
    state = torch.load(save(3), weights_only=True)
    folder = tmp_path / "checkpoints"
    names = "samples", "bert_config", "ended", "vocab_md5"
    facts = {name: state[name] for name in names}
    path = write_in_shards(folder, 4, state["model"], **facts)
    lines = parsed(run_evaluation(capsys, prepared, folder, "--json")[1])
    assert [line["steps"] for line in lines] == [3, 4]
    assert lines[1]["checkpoint"] == str(path) == str(folder / "step_0000000004")
    (alone,) = parsed(run_evaluation(capsys, prepared, path, "--json")[1])
    for name in ("accuracy", "mlm_loss"):
        assert lines[0][name] == lines[1][name] == alone[name]


def test_losses_and_accuracies_are_means_over_words_and_over_sequences(
    tiny, make_model, save, prepared, capsys
):
    path = save(3)
    status, out, _ = run_evaluation(capsys, prepared, path, "--json")
    (line,) = parsed(out)
    shards = Shards(list_shards(tmp := path.parents[1] / "eval", "EVALDIR"), 48)
    batch = make_batch(shards[0], torch.arange(20).numpy(), 48)
    with torch.no_grad():
        logits = make_model(tiny, seed=3).eval().scored(batch)
    assert (status, line["sequences"], tmp.is_dir()) == (0, 20, True)
    expected = {
        "accuracy": (logits.mlm.argmax(1) == batch.masked_labels).double().mean(),
        "mlm_loss": F.cross_entropy(logits.mlm, batch.masked_labels),
        "nsp_accuracy": (logits.nsp.argmax(1) == batch.next_sentence_labels).double().mean(),
        "nsp_loss": F.cross_entropy(logits.nsp, batch.next_sentence_labels),
    }  # fmt: skip
    for name, value in expected.items():
        assert line[name] == pytest.approx(float(value), rel=1e-5), name
    status, out, _ = run_evaluation(capsys, prepared, path, NUM_EVAL_EXAMPLES="5")
    assert (status, "step_0000000003.pt" in out, "mlm loss" in out) == (0, True, True)


@pytest.mark.parametrize("accuracy", [0.34085, 0.3420])
def test_the_benchmarks_initial_checkpoint_is_known_by_its_accuracy(
    accuracy, tiny, make_model, make_records, prepared, monkeypatch, capsys, tmp_path
):
    """On the benchmark's set: its number of sequences, and its vocabulary."""
    monkeypatch.setattr(evaluation, "SEQUENCES", 20)
    facts = {"max_seq_length": 48, "random_seed": 0, "dupe_factor": 1}
    metadata = Metadata(vocab_md5=evaluation.VOCAB_MD5, **facts)
    records = make_records(20, packed=False, seed=9)
    write_records(tmp_path / "eval" / "part_eval_10k.hdf5", records, metadata)
    weights = tmp_path / "phase1" / "model.ckpt-28252.pt"
    state = make_model(tiny, dtype=torch.float32).state_dict()
    torch.save({"model": dict(state)}, weights)
    shape = json.dumps(dataclasses.asdict(tiny))
    (tmp_path / "phase1" / "bert_config.json").write_text(shape)
    real = evaluation.Evaluator.__call__
    scored = lambda self, m: dataclasses.replace(real(self, m), accuracy=accuracy)  # noqa: E731
    monkeypatch.setattr(evaluation.Evaluator, "__call__", scored)
    status, out, _ = run_evaluation(capsys, prepared, weights)
    met = "met" if accuracy == 0.34085 else "not met: "
    *_, last = out.splitlines()
    expected = "0.34085 +- 0.0005 is expected of the benchmark's initial checkpoint"
    assert last.startswith(f"{expected}: {met}")
    status, out, _ = run_evaluation(capsys, prepared, weights, "--json")
    assert (status, json.loads(out)["initial_checkpoint"]) == (0, accuracy == 0.34085)
    status, out, _ = run_evaluation(capsys, prepared, weights, NUM_EVAL_EXAMPLES="19")
    assert "expected of" not in out, "on other sequences nothing is expected"


def test_bad_input_is_one_line(save, prepared, capsys, tmp_path):
    other = {"vocab_md5": "1" * 32}
    damaged = tmp_path / "step_0000000001.pt"
    damaged.write_bytes(b"torn")
    bare = tmp_path / "weights.pt"
    torch.save({}, bare)
    cases = [
        ((tmp_path / "none",), {}, "no such file or folder: name a checkpoint"),
        ((tmp_path / "packed",), {}, "no step_* and no model.safetensors in it"),
        ((damaged,), {}, "not a readable checkpoint"),
        ((bare,), {}, "no model config found: give its bert_config.json by --bert-config"),
        ((save(1),), {"EVALDIR": ""}, "EVALDIR is not set: give the folder"),
        ((save(1),), {"EVALDIR": str(tmp_path / "nowhere")}, "no such folder; prepare the data first"),
        ((save(1),), {"NUM_EVAL_EXAMPLES": "99"}, "20 sequences, and NUM_EVAL_EXAMPLES is 99"),
        ((save(1),), {"PRECISION": "fp7"}, "PRECISION='fp7': expected one of"),
        ((save(2, **other),), {}, "made with another vocabulary"),
    ]  # fmt: skip
    for arguments, environ, message in cases:
        status, out, err = run_evaluation(capsys, prepared, *arguments, **environ)
        assert (status, out) == (2, ""), message
        assert err.startswith("bert evaluate: error: "), err
        assert message in err
        assert err.count("\n") == 1


def test_the_vocabulary_named_here_is_the_one_of_the_golden_files(shared):
    vocabulary = shared / "golden" / "vocab.txt"
    if not vocabulary.is_file():
        pytest.skip("no vocab.txt in the reference data")
    assert hashlib.md5(vocabulary.read_bytes()).hexdigest() == evaluation.VOCAB_MD5
    assert huggingface.lower_case(vocabulary)


def test_the_speed_is_that_of_compiled_kernels(save, prepared, capsys, monkeypatch):
    passes, count = [], scoring._count

    def compiling(*given):
        passes.append(100 if not passes else 2)  # seconds
        return count(*given)

    monkeypatch.setattr(scoring, "_count", compiling)
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: sum(passes))
    out = run_evaluation(capsys, prepared, save(3), "--json")[1]
    assert json.loads(out)["sequences_per_second"] == 20 / (2 * (len(passes) - 1))


def test_a_base_without_its_masked_lm_head_has_nothing_to_evaluate(
    save, prepared, capsys, tmp_path
):
    state = torch.load(save(3), weights_only=True)
    model = state["model"]
    encoder = {name: model[name] for name in model if name.startswith("bert.")}
    torch.save(encoder, tmp_path / "base.pt")
    shape = tmp_path / "bert_config.json"
    shape.write_text(json.dumps(state["bert_config"]))
    given = tmp_path / "base.pt", "--bert-config", shape
    status, _, said = run_evaluation(capsys, prepared, *given)
    assert status == 2
    assert "base.pt lacks cls.predictions" in said
    assert "train it first" in said
