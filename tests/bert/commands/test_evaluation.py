"""python -m bert evaluate: for each checkpoint of a run the figures of the run itself."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert.__main__ import main
from bert.checkpoint import huggingface
from bert.commands import evaluate as evaluation
from bert.data.batch import make_batch
from bert.data.format import open_records, write_records
from bert.training import evaluate as scoring

from ..conftest import METADATA
from ..states import newest, save_in_shards, save_model


@pytest.fixture
def evaluate(prepared, capsys):
    """evaluate(*arguments, **environ) -> (exit status, stdout, stderr) of the command."""
    names = "EVALDIR", "DEVICE", "OMP_NUM_THREADS"
    settings = {name: prepared[name] for name in names}

    def run(*arguments, **environ):
        status = main(["evaluate", *map(str, arguments)], settings | environ)
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def save(tiny, make_model, tmp_path):
    """save(steps, vocab_md5, seed, write) -> a checkpoint of the tiny model."""

    def save(steps, vocab_md5="0" * 32, seed=3, write=save_model):
        model = make_model(tiny, seed=seed, dtype=torch.float32)
        facts = {"samples": 6 * steps, "ended": False, "vocab_md5": vocab_md5}
        return write(tmp_path / "checkpoints", model, steps, **facts)

    return save


def parsed(text):
    """Of its lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


def test_the_figures_are_those_of_the_run(prepared, run_bert, tmp_path, evaluate):
    folder = tmp_path / "run" / "checkpoints"
    kept = {"CHECKPOINT_DIR": folder, "CHECKPOINT_EVERY_STEPS": 4, "CHECKPOINT_KEEP": 9}
    run_bert(prepared, status=3, **kept)  # the target is out of reach
    lines = parsed((tmp_path / "run" / "metrics_0.jsonl").read_text())
    found = {line["step"]: line for line in lines if line["kind"] == "evaluation"}
    given = tmp_path / "run", "--json"
    status, out, _ = evaluate(*given, NUM_EVAL_EXAMPLES="17")
    assert status == 0
    for line in parsed(out):
        for name in ("accuracy", "mlm_loss", "nsp_loss", "nsp_accuracy"):
            theirs = found[line["steps"]][name]
            assert line[name] == pytest.approx(theirs, rel=1e-6), name
        assert (line["sequences"], line["trained_samples"] > 0) == (17, True)
    assert [line["steps"] for line in parsed(out)] == [4, 8]
    assert newest(folder)["ended"]


def test_shards_have_the_figures_of_one_file(save, evaluate):
    """Given directly or by the folder of both, as the newer one."""
    folder = save(3).parent
    path = save(4, write=save_in_shards)
    *_, alike, last = parsed(evaluate(folder, "--json")[1])
    assert (alike["steps"], last["steps"]) == (3, 4)
    assert last["checkpoint"] == str(path) == str(folder / "step_0000000004")
    (alone,) = parsed(evaluate(path, "--json")[1])
    for name in ("accuracy", "mlm_loss"):
        assert alike[name] == last[name] == alone[name]


def test_figures_are_means_of_words_or_pairs(tiny, make_model, save, evaluate):
    path = save(3)
    status, out, _ = evaluate(path, "--json")
    (line,) = parsed(out)
    records, _ = open_records(path.parents[1] / "eval" / "part_eval_10k.hdf5")
    batch = make_batch(records, np.arange(20), 48)
    with torch.no_grad():
        logits = make_model(tiny, seed=3).eval().scored(batch)
    assert (status, line["sequences"]) == (0, 20)
    expected = {
        "accuracy": (logits.mlm.argmax(1) == batch.masked_labels).double().mean(),
        "mlm_loss": F.cross_entropy(logits.mlm, batch.masked_labels),
        "nsp_accuracy": (logits.nsp.argmax(1) == batch.next_sentence_labels).double().mean(),
        "nsp_loss": F.cross_entropy(logits.nsp, batch.next_sentence_labels),
    }  # fmt: skip
    for name, value in expected.items():
        assert line[name] == pytest.approx(float(value), rel=1e-5), name
    status, out, _ = evaluate(path, NUM_EVAL_EXAMPLES="5")
    assert (status, "step_0000000003.pt" in out, "mlm loss" in out) == (0, True, True)


@pytest.mark.parametrize(("accuracy", "met"), [(0.34085, True), (0.3420, False)])
def test_the_initial_checkpoint_is_known_by_its_accuracy(
    accuracy, met, tiny, make_model, make_records, evaluate, monkeypatch, tmp_path
):
    """On the benchmark's set: its number of sequences, and its vocabulary."""
    monkeypatch.setattr(evaluation, "SEQUENCES", 20)
    metadata = dataclasses.replace(METADATA, vocab_md5=evaluation.VOCAB_MD5)
    records = make_records(20, packed=False, seed=9)
    write_records(tmp_path / "eval" / "part_eval_10k.hdf5", records, metadata)
    weights = tmp_path / "phase1" / "model.ckpt-28252.pt"  # beside a bert_config.json
    state = make_model(tiny, dtype=torch.float32).state_dict()
    torch.save({"model": dict(state)}, weights)
    real = evaluation.Evaluator.__call__
    scored = lambda self, m: dataclasses.replace(real(self, m), accuracy=accuracy)  # noqa: E731
    monkeypatch.setattr(evaluation.Evaluator, "__call__", scored)
    status, out, _ = evaluate(weights)
    *_, last = out.splitlines()
    assert re.match(r"0\.34085 \+- 0\.0005 is expected .*: (not )?met", last)
    assert ("not met" in last) is not met
    status, out, _ = evaluate(weights, "--json")
    assert (status, json.loads(out)["initial_checkpoint"]) == (0, met)
    status, out, _ = evaluate(weights, NUM_EVAL_EXAMPLES="19")
    assert "expected of" not in out, "on other sequences nothing is expected"


def test_bad_input_is_one_line(save, evaluate, tmp_path):
    damaged, bare, base = (tmp_path / name for name in ("step_1.pt", "w.pt", "base.pt"))
    damaged.write_bytes(b"torn")
    torch.save({}, bare)
    model = torch.load(saved := save(1), weights_only=True)["model"]
    headless = {name: model[name] for name in model if name.startswith("bert.")}
    torch.save(headless, base)
    shape = "--bert-config", tmp_path / "phase1" / "bert_config.json"
    cases = [
        ([tmp_path / "none"], {}, "no such file or folder"),
        ([tmp_path / "packed"], {}, "no step_* and no model.safetensors"),
        ([damaged], {}, "not a readable checkpoint"),
        ([bare], {}, "no model config found: give its bert_config.json by --bert-config"),
        ([saved], {"EVALDIR": ""}, "EVALDIR is not set"),
        ([saved], {"EVALDIR": str(tmp_path / "nowhere")}, "no such folder"),
        ([saved], {"NUM_EVAL_EXAMPLES": "99"}, "20 sequences, and NUM_EVAL_EXAMPLES is 99"),
        ([saved], {"PRECISION": "fp7"}, "PRECISION='fp7'"),
        ([save(2, vocab_md5="1" * 32)], {}, "made with another vocabulary"),
        ([base, *shape], {}, "base.pt lacks cls.predictions"),
    ]  # fmt: skip
    for arguments, environ, message in cases:
        status, out, err = evaluate(*arguments, **environ)
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


def test_the_speed_is_that_of_compiled_kernels(save, evaluate, monkeypatch):
    passes, count = [], scoring._count

    def compiling(*given):
        passes.append(100 if not passes else 2)  # seconds
        return count(*given)

    monkeypatch.setattr(scoring, "_count", compiling)
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: sum(passes))
    out = evaluate(save(3), "--json")[1]
    assert json.loads(out)["sequences_per_second"] == 20 / (2 * (len(passes) - 1))
