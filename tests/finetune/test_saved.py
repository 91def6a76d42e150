"""A saved model answers, classifies and is timed; seeds have a mean and a deviation."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune import glue, saved
from finetune.__main__ import main
from finetune.demo import table

from .runs import command, content, exported, figures_of, train, write_tables

ROWS = ["the red cat\tgood", "the old dog\tbad"] * 8


@pytest.fixture(scope="module")
def reviews(squad_environment, tmp_path_factory):
    """The folder of a run of two seeds on a small table."""
    folder = tmp_path_factory.mktemp("table")
    write_tables(folder, ROWS)
    own = {"TASK": "TSV", "DATA": str(folder), "SEEDS": "4,7", "EPOCHS": "3"}
    own |= {"CHECKPOINT_DIR": str(folder / "c"), "CHECKPOINT_EVERY_STEPS": "2"}
    for trial in ("0", "1"):
        train(squad_environment, folder, TRIAL=trial, **own)
    return folder


def test_a_question_is_answered_as_in_the_evaluation(learnt, squad_environment, capsys):
    data = content(Path(squad_environment["DATA"]) / "dev-v1.1.json")["data"]
    expected = content(learnt / "model_0" / "nbest_predictions.json")
    model = saved.load(learnt, "cpu")
    for paragraph in data[0]["paragraphs"][:5]:
        for question in paragraph["qas"]:
            (said,) = model.predict([(question["question"], paragraph["context"])])
            found, wanted = said["n_best"][0], expected[question["id"]][0]
            assert found["text"] == wanted["text"]
            share = pytest.approx(wanted["probability"], abs=1e-5)
            assert found["probability"] == share
    context = "There is a cat here. It sat at the lake. It was red. It was 42 old."
    words = "--question", "When was it old?", "--context", context
    assert command("predict", learnt, *words) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("  42")


@pytest.mark.parametrize("kind", ["reviews", "learnt"])
def test_latency_is_reported_by_batch_size(kind, request, capsys):
    words = "--batch-sizes 1 3 --batches 4 --length 9"
    assert command("benchmark", request.getfixturevalue(kind), *words.split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["batch_size"], line["tokens"]) for line in lines] == [(1, 9), (3, 9)]
    for line in lines:
        times = [line[name] for name in ("p50", "p90", "p95", "p99", "p100")]
        assert times == sorted(times)
        assert times[0] > 0
        speed = pytest.approx(1000 * line["batch_size"] / line["mean"], rel=0.01)
        assert line["sequences_per_second"] == speed


def test_the_table_of_seeds_has_mean_and_deviation(reviews, capsys):
    assert main(["seeds", str(reviews)], {}) == 0
    rows = map(str.split, capsys.readouterr().out.splitlines())
    lines = {name: cells for name, *cells in rows}
    assert lines["seed"] == ["4", "7", "mean", "std"]
    values = [float(value) for value in lines["accuracy"]]
    assert values[2] == pytest.approx((values[0] + values[1]) / 2, abs=1e-4)
    assert values[3] == pytest.approx(np.std(values[:2], ddof=1), abs=1e-4)
    assert {path.parent.name for path in reviews.rglob("*.pt")} == {"seed_4", "seed_7"}


@pytest.mark.parametrize(("arguments", "message"), [
    (["predict", "{reviews}"], "takes 1 of --text, or --input FILE"),
    (["predict", "{reviews}", *["--text", "a"] * 3], "takes 1 of --text, or --input FILE"),
    (["predict", "{learnt}", "--question", "Who?"], "give --question and --context"),
    (["predict", "/nonexistent", "--text", "a"], "no fine-tuned model"),
    (["seeds", "/nonexistent"], "no model_N/figures.json"),
    (["train"], "train: no such setting"),
    (["predikt", "x"], "predikt: did you mean predict?"),
    (["--task", "sst2"], "did you mean SST-2?"),
    (["--task", "TSV", "--mode", "predict", "--data", "/"], "did you mean prediction?"),
    (["--task", "TSV", "--data", "/", "--squad-version", "2"], "did you mean 2.0?"),
    (["--task", "TSV"], "DATA is not set: expected a path; export DATA=..."),
    (["predict", "{reviews}", "--text", "a", "--device", "cuda"], "--device cuda: no GPU found"),
    (["benchmark", "{reviews}", "--batch-sizes", "0"], "--batch-sizes: '0': expected a positive integer"),
    (["benchmark", "{reviews}", "--length", "-4"], "--length: '-4': expected a positive integer"),
])  # fmt: skip
def test_wrong_words_are_told(arguments, message, learnt, reviews, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = [word.format(learnt=learnt, reviews=reviews) for word in arguments]
    try:
        status = main(words, {})
    except SystemExit as error:  # of argparse
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_seeds_of_different_settings_have_no_mean(reviews, tmp_path, capsys):
    figures = figures_of(reviews / "model_0")
    for number, rate in enumerate((1e-3, 2e-3)):
        figures["settings"]["LR"] = rate
        (tmp_path / f"model_{number}").mkdir()
        (tmp_path / f"model_{number}" / "figures.json").write_text(json.dumps(figures))
    assert main(["seeds", str(tmp_path)], {}) == 2
    said = capsys.readouterr().err
    reason = r"model_0/figures.json is of a run with LR 0.001, .*model_1/figures.json has 0.002: different runs have no"
    assert re.search(reason, said)


def test_the_demos_sentences_are_split_by_their_hash_and_labelled_by_their_sign():
    ratings = enumerate([2.5, -0.1, 0.0, 1] * 50)
    lines = [f"{n}\t{rating}\tSentence {n} \t of it." for n, rating in ratings]
    training, test = table("\n".join(lines))
    assert len(training) + len(test) == 150  # no label of a rating of 0
    assert 10 < len(test) < 60
    assert {line.split("\t")[1] for line in training} == {"positive", "negative"}
    assert "Sentence 1 of it.\tnegative" in training + test
    again = table("\n".join(reversed(lines)))
    assert again == (training[::-1], test[::-1])


def test_the_script_checks_trains_every_seed_and_ends_in_their_table(
    squad_environment, repository, tmp_path, quick_python
):
    write_tables(tmp_path, ROWS, ["train.tsv"])
    write_tables(tmp_path, ["a red dog\tgood"], ["dev.tsv"])
    settings = squad_environment | {
        "TASK": "TSV", "DATA": str(tmp_path), "SEEDS": "4,7", "EPOCHS": "1", "LOGDIR": str(tmp_path), "RUN_NAME": "r",
        "PYTHON": str(quick_python),
    }  # fmt: skip
    del settings["SEED"]
    given = [f"{name}={value}" for name, value in settings.items()]
    line = [str(repository / "run_finetuning.sh"), "glue", *given]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "global batch   12 sequences = 12 x 1 accumulated x 1 ranks" in done.stderr
    told = "text column_1, label column_2: 2 classes: 8 good, 8 bad"
    assert f"train.tsv: separator tab, no header; 16 examples, {told}" in done.stderr
    assert ["seed", "4", "7", "mean", "std"] in map(str.split, done.stdout.splitlines())
    last = done.stderr.splitlines()[-1]
    assert last == f"run: all 2 trials are complete: {tmp_path}/r"
    facts = saved.load(tmp_path / "r" / "model_1", "cpu").facts
    assert facts["labels"] == ["bad", "good"]


def test_the_onnx_model_of_the_page_gives_the_same_logits(
    reviews, repository, tmp_path, monkeypatch
):
    session = exported(reviews / "model_0", repository, tmp_path, monkeypatch)
    mine = saved.load(reviews, "cpu")
    texts = [("the red cat",), ("a dog was old and blue",), ("here",)]
    rows = [ids for ids, _ in glue.encode(texts, mine.tokenizer, 48)]
    # Padded, of another batch and length than was exported; no word is [PAD], 0.
    length = max(map(len, rows)) + 2
    ids = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    ids, mask = ids.astype(np.int64), (ids > 0).astype(np.int64)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
    (found,) = session.run(["logits"], given)
    wanted = [scores for scores, _ in mine.rows_of(texts, 3)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_embeddings_are_means_of_hugging_faces_last_layer(reviews, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    texts = ["the red cat sat", "the old dog was here and happy", '""', "a"]
    source, target = tmp_path / "in.csv", tmp_path / "out.npy"
    write_tables(tmp_path, ["text", *texts], [source.name])
    files = "--input", source, "--output", target
    assert command("embed", reviews, *files) == 0
    found = np.load(target)
    assert (found.shape, found.dtype) == ((4, 32), np.float32)
    folder = reviews / "model_0"
    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, mine in zip(texts, found, strict=True):
        with torch.no_grad():
            layer = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state
        wanted = np.full(32, np.nan) if text == '""' else layer[0].mean(0).numpy()
        np.testing.assert_allclose(mine, wanted, atol=2e-5)
    # Any BERT's folder will do.
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("task.json"))
    assert command("embed", other, *files) == 0
    np.testing.assert_allclose(np.load(target), found, atol=1e-6)
    assert main(["embed", str(folder), "--input", str(source)], {}) == 2
    assert "give --input FILE and --output X.npy" in capsys.readouterr().err
