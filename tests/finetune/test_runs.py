"""Whole runs on a synthetic set: they learn, and resume and share their work exactly."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from bert import optim
from bert.core.claim import Claim
from bert.data.tokens import WordPiece
from bert.training.loop import StepCounter
from common.env import ConfigError
from finetune import config, saved
from finetune.train import run

from ..waiting import wait_until
from . import runs
from .runs import content, evaluate, figures_of, table_of, train, write_tables


def predictions(model):
    found = sorted(model.glob("*predictions.json"))
    return {path.name: path.read_bytes() for path in found}


def data_of(environment, part):
    return content(Path(environment["DATA"]) / f"{part}-v1.1.json")


def with_copies(environment, folder, *names):
    """The environment with a copy of its weights that has only these files beside it."""
    weights = environment["INIT_CHECKPOINT"]
    return environment | runs.copied(weights, folder, "weights.pt", *names)


@pytest.fixture(scope="module")
def short(squad_environment, tmp_path_factory):
    """The model of a run of 25 steps, and its environment."""
    environment = squad_environment | {"EPOCHS": "1"}
    return train(environment, tmp_path_factory.mktemp("short")), environment


def test_held_out_questions_of_the_same_pattern_are_answered(learnt):
    figures = figures_of(learnt / "model_0")
    assert figures["f1"] > 95
    assert figures["exact_match"] > 90
    assert figures["steps"] == 100  # 300 questions x 4 epochs / 12
    assert len(content(learnt / "model_0" / "predictions.json")) == 60
    lines = runs.lines_of(learnt / "metrics_0.jsonl")
    assert lines[-1]["kind"] == "summary"
    losses = [line["span_loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0] / 2


def test_the_saved_model_predicts_the_same_also_without_answers(
    learnt, squad_environment, tmp_path
):
    known = predictions(learnt / "model_0")
    weights = learnt / "model_0" / "model.safetensors"
    again = evaluate(squad_environment, tmp_path, weights)
    assert predictions(again) == known
    content = data_of(squad_environment, "dev")
    for paragraph in content["data"][0]["paragraphs"]:
        for question in paragraph["qas"]:
            del question["answers"]
    (tmp_path / "mine.json").write_text(json.dumps(content))
    # What a user types: nothing of training.
    own = {"TASK": "squad", "DATA": str(tmp_path / "mine.json"), "DEVICE": "cpu"}
    bare = evaluate(own, tmp_path / "bare", learnt / "model_0", "prediction")
    assert predictions(bare) == known
    assert "f1" not in figures_of(bare)


def test_windows_and_answers_follow_their_settings_and_the_model_keeps_them(
    squad_environment, tmp_path, capsys
):
    own = {
        "DOC_STRIDE": "7", "MAX_QUERY_LENGTH": "3", "N_BEST_SIZE": "2", "MAX_ANSWER_LENGTH": "1",
        "MAX_SEQ_LENGTH": "20", "EPOCHS": "0.1", "BATCHSIZE": "32",
    }  # fmt: skip
    folder = train(squad_environment, tmp_path, **own)
    # 21 or 22 tokens of a context in windows of 14, 7 apart: 2 or 3.
    assert "test: 60 questions, 174 windows" in capsys.readouterr().err
    n_best = content(folder / "nbest_predictions.json")
    assert max(map(len, n_best.values())) == 2  # of equal texts one is kept
    paragraph = data_of(squad_environment, "dev")["data"][0]["paragraphs"][0]
    question = paragraph["qas"][0]
    asked = question["question"], paragraph["context"]
    (found,) = saved.load(folder, "cpu").predict([asked])
    for mine, published in zip(found["n_best"], n_best[question["id"]], strict=True):
        assert mine["text"] == published["text"]
        assert mine["probability"] == pytest.approx(published["probability"])


@pytest.mark.parametrize("own", [
    pytest.param({}, id="the model"),
    pytest.param({"CHECKPOINT_EVERY_STEPS": "1"}, id="a checkpoint"),
    pytest.param({"EVAL_EVERY_EPOCHS": "1"}, id="the best"),
])  # fmt: skip
def test_weights_of_nan_are_not_saved(
    squad_environment, tmp_path, monkeypatch, capsys, own
):
    def begins_without_a_number(steps):
        steps.done += 1
        return float("nan")

    monkeypatch.setattr(StepCounter, "begin", begins_without_a_number)
    own = own | {"CHECKPOINT_DIR": str(tmp_path / "c"), "RUN_DIR": str(tmp_path)}
    assert run(squad_environment | own | {"EPOCHS": "0.04"}) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "not finite at step 1, and are not saved" in last
    assert not [*tmp_path.glob("model_0/*"), *tmp_path.glob("c/*/step_*")]


def test_a_killed_run_resumes_to_the_same_predictions(short, tmp_path):
    undisturbed, environment = short
    environment = environment | {
        "RUN_DIR": str(tmp_path / "run"), "CHECKPOINT_DIR": str(tmp_path / "c"), "CHECKPOINT_EVERY_STEPS": "10",
        "RESUME": "1",
    }  # fmt: skip
    checkpoints = tmp_path / "c" / "seed_3"
    process = runs.start(environment | {"STANDS_AT": str(checkpoints / "step_*.pt")})
    wait_until(lambda: not process.running() or [*checkpoints.glob("step_*.pt")])
    assert process.running(), process.finish()
    process.kill()
    assert not (tmp_path / "run" / "model_0").exists()
    done = runs.start(environment).finish()
    assert done.returncode == 0, done.stderr
    assert predictions(tmp_path / "run" / "model_0") == predictions(undisturbed)
    told = {"DATA": "training data", "LR": "LR 0.003, this one has 0.004"}
    for name, value in others(environment, tmp_path).items():
        (tmp_path / "run" / "error_0.txt").unlink(missing_ok=True)
        assert run(environment | {name: value}) == 2
        reason = (tmp_path / "run" / "error_0.txt").read_text()
        assert f"is of a run with {told.get(name, name)}" in reason


def others(environment, folder):
    """Settings of a different run, by name; its data have other text of the same size."""
    (folder / "data").mkdir()
    begin = environment["INIT_CHECKPOINT"]
    runs.copied(begin, folder / "data", "vocab.txt", "config.json")
    for file in Path(environment["DATA"]).glob("*v1.1.json"):
        other = file.read_text().replace("There is a cat", "There is a dog")
        (folder / "data" / file.name).write_text(other)
    weights = torch.load(begin) | {"bert.embeddings.LayerNorm.bias": torch.ones(32)}
    torch.save(weights, folder / "data" / "weights.pt")
    return {"EPOCHS": "9", "LR": "4e-3", "WARMUP_PROPORTION": "0.2", "OPT_ADAM_BETA_1": "0.8",
            "DATA": str(folder / "data"), "INIT_CHECKPOINT": str(folder / "data" / "weights.pt")}  # fmt: skip


def test_a_finished_trial_counts_only_for_the_same_settings_and_data(
    learnt, squad_environment, tmp_path, capsys
):
    environment = squad_environment | {"RUN_DIR": str(learnt)}
    same = {"LOG_EVERY_STEPS": "9", "CHECKPOINT_DIR": str(tmp_path)}
    same |= {"SEEDS": "3,4", "CUDA_GRAPH": "0"}
    assert run(environment | same, check_only=True) == 0
    figures = learnt / "model_0" / "figures.json"
    other = {"SEEDS": "5", "BATCHSIZE": "11", "EVAL_BATCHSIZE": "9"}
    named = {"SEEDS": "SEED", "DATA": "training data"}
    for name, value in (others(squad_environment, tmp_path) | other).items():
        capsys.readouterr()
        assert run(environment | {name: value}, check_only=True) == 2
        assert not (learnt / "error_0.txt").exists(), "a check spoils no finished run"
        reason = f"{figures} is of a run with {named.get(name, name)} "
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"finetune: error: {reason}"), said


def test_a_folder_of_checkpoints_belongs_to_one_trial_of_one_run(
    squad_environment, tmp_path, capsys
):
    folder, home = tmp_path / "c" / "seed_3", tmp_path / "run"
    environment = squad_environment | {
        "MODE": "train", "EPOCHS": "0.2", "CHECKPOINT_DIR": str(tmp_path / "c"), "CHECKPOINT_EVERY_STEPS": "2",
    }  # fmt: skip

    def train(where):
        status, said = run(environment | {"RUN_DIR": str(where)}), capsys.readouterr()
        return status, said.err.splitlines()[-1]

    def saved():
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("step_*")}

    assert train(home / "running_0")[0] == 0
    before = saved()
    assert train(home / "running_0_1")[0] == 0
    assert saved() == before, "a restart continues from the last one"
    (home / "running_0_1" / "model_0").rename(home / "model_0")
    for where in (home / "running_0", tmp_path / "other"):
        status, said = train(where)
        assert status == 2
        assert f"CHECKPOINT_DIR={folder} holds step_0000000004.pt of another" in said
    third = tmp_path / "third"
    for path, name, told in (
        (third / ".writer_0", f"RUN_DIR={third}", False),
        (folder / ".writer", f"CHECKPOINT_DIR={folder}", True),
    ):
        with Claim(path, name):
            status, said = train(third)
            assert status == 2
            assert f"{name}: process {os.getpid()} on" in said
        assert (third / "error_0.txt").exists() == told
    assert saved() == before


def test_a_resumed_run_reports_the_time_of_all_its_parts(squad_environment, tmp_path):
    own = {"MODE": "train", "EPOCHS": "0.4", "RESUME": "1"}
    own |= {"CHECKPOINT_DIR": str(tmp_path / "c"), "CHECKPOINT_EVERY_STEPS": "8"}
    for _ in range(2):  # the second time from step 8 on
        model = train(squad_environment, tmp_path, **own)
    figures = figures_of(model)
    (saved,) = (tmp_path / "c" / "seed_3").glob("step_*.pt")
    seconds = figures["e2e_train_time"]
    assert seconds > torch.load(saved)["seconds"] > 0
    assert figures["training_sequences_per_second"] == pytest.approx(120 / seconds)
    assert (model / "model.safetensors").is_file()
    assert not predictions(model), "MODE=train predicts nothing"


def test_several_ranks_learn_and_predict_the_same(short, tmp_path):
    alone, environment = short
    own = {"RUN_DIR": str(tmp_path), "BATCHSIZE": "4", "SHARD_OPTIMIZER": "1"}
    done = runs.finished(*[environment | own] * 3)
    assert [rank.returncode for rank in done] == [0] * 3, done
    models = tmp_path / "model_0", alone
    mine, theirs = (content(model / "nbest_predictions.json") for model in models)
    assert mine.keys() == theirs.keys()
    for question in mine:
        one, other = (answers[question][0] for answers in (mine, theirs))
        assert one["text"] == other["text"]
        assert one["start_logit"] == pytest.approx(other["start_logit"], abs=0.05)


def test_a_rank_with_other_settings_or_data_is_named_before_the_first_step(
    squad_environment, tmp_path
):
    name = "train-v1.1.json"
    text = Path(squad_environment["DATA"], name).read_text()
    (tmp_path / name).write_text(text.replace("?", "!", 1))
    own = {"MODE": "train", "RUN_DIR": str(tmp_path / "run")}
    environment = squad_environment | own
    odd = {"DATA": str(tmp_path), "LR": "0.5"}
    done = runs.finished(environment, environment | odd)
    assert [one.returncode for one in done] == [2, 2]
    said = done[0].stderr.splitlines()[-1]
    told = r"ranks differ: rank 1 on \S+ has LR=0.5.*rank 1 on \S+ has training data='"
    assert re.search(told, said), said


def test_version_2_learns_when_there_is_no_answer(squad_environment, tmp_path):
    for name in ("train", "dev"):
        content = data_of(squad_environment, name)
        none = {"is_impossible": True, "answers": []}
        for number, paragraph in enumerate(content["data"][0]["paragraphs"]):
            if number % 3 == 0:  # a question that only these articles have
                paragraph["qas"][number % 2] |= {"question": "With whom?", **none}
        made = json.dumps(content | {"version": "v2.0"})
        (tmp_path / f"{name}-v2.0.json").write_text(made)
    environment = squad_environment | {"DATA": str(tmp_path), "SQUAD_VERSION": "2.0"}
    model = train(environment, tmp_path / "run")
    figures = figures_of(model)
    assert figures["HasAns_f1"] > 90
    assert figures["NoAns_f1"] > 90
    assert (model / "null_odds.json").is_file()
    best = {"NULL_SCORE_DIFF_THRESHOLD": f"{figures['best_null_threshold']:.4f}"}
    again = evaluate(environment, tmp_path / "best", model, **best)
    assert figures_of(again)["f1"] == pytest.approx(figures["best_f1"])


def write_table(folder):
    """Sentences with an easily learnt label."""
    kinds = {"red": "colour", "blue": "colour"}
    rows = [
        f"{text}\t{kinds.get(text.split()[-1], 'place')}" for text in runs.SENTENCES
    ]
    write_tables(folder, rows * 4, ["train.tsv"])
    held_out = "the cat was north\tplace", "the old queen was red\tcolour"
    write_tables(folder, ["sentence\tlabel", *held_out], ["dev.tsv"])


def test_a_users_table_is_learnt_and_its_labels_are_kept(squad_environment, tmp_path):
    write_table(tmp_path)
    own = {"TASK": "TSV", "DATA": str(tmp_path), "EPOCHS": "8", "SEEDS": "5,6"}
    environment = squad_environment | own
    folder = train(environment, tmp_path / "run", TRIAL="1")
    figures = figures_of(folder)
    names = "accuracy", "macro_f1", "seed"
    assert [figures[name] for name in names] == [1.0, 1, 6]
    head, *rows = table_of(folder / "predictions.tsv")
    assert head == ["index", "prediction", "colour", "place"]
    assert [row[:2] for row in rows] == [["0", "place"], ["1", "colour"]]
    sums = [float(row[2]) + float(row[3]) for row in rows]
    assert sums == pytest.approx([1, 1], abs=2e-6)
    assert content(folder / "task.json")["labels"] == head[2:]
    assert table_of(folder / "classes.tsv") == [
        ["class", "precision", "recall", "f1", "examples"],
        *([name, *["1.0000"] * 3, "1"] for name in head[2:]),
    ]
    dev, other = tmp_path / "dev.tsv", tmp_path / "again"
    # One label only: the others are the model's.
    dev.write_text("blue\tcolour\n")
    evaluate(environment, other, folder)
    for table in (
        "the cat was north.\nthe old queen was red\n",
        "sentence\tlabel\na cat was north\tplace\nred\tcolour",
    ):
        dev.write_text(table)
        again = evaluate(environment, other, folder, "prediction")
        rows = table_of(again / "predictions.tsv")
        assert [row[1] for row in rows] == ["prediction", "place", "colour"]
        assert "accuracy" not in figures_of(again)
    dev.write_text("the cat was\tnorth\nthe old\tqueen was red\n")
    model = {"MODE": "prediction", "INIT_CHECKPOINT": str(folder)}
    assert run(environment | model | {"RUN_DIR": str(other)}) == 2


def test_columns_of_a_table_without_a_header_hold_for_all_its_files(
    squad_environment, tmp_path, capsys
):
    words = ["old", "red"] * 4
    rows = [f"{n % 2},the {w} cat was old and red,x" for n, w in enumerate(words)]
    write_tables(tmp_path, rows, ("train.csv", "dev.csv"))
    own = {"TASK": "table", "DATA": str(tmp_path), "NO_HEADER": "1", "EPOCHS": "1"}
    environment = squad_environment | own
    columns = {"TEXT_COLUMNS": "column_2", "LABEL_COLUMN": "column_1"}
    model = train(environment, tmp_path / "run", MAX_SEQ_LENGTH="8", **columns)
    told = capsys.readouterr().err
    assert told.count("text column_2, label column_1: 2 classes") == 2
    assert told.count("8 of 8 examples fill 8 tokens: what is longer is cut") == 2
    evaluate(environment, tmp_path / "b", model, MAX_SEQ_LENGTH="")
    assert "text column_2, label column_1" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [
    {"PRECISION": "bf16"},
    {"PRECISION": "fp16"},
    {"PRECISION": "fp8"},
    {"BATCHSIZE": "6", "GRADIENT_STEPS": "2", "RECOMPUTE_LAYERS": "1"},
    {"OPTIMIZER": "lamb", "LR": "1e-2"},
], ids=lambda settings: ",".join(settings.values()))  # fmt: skip
def test_berts_precisions_and_optimizers_work_in_fine_tuning(
    squad_environment, tmp_path, settings
):
    write_table(tmp_path)
    own = {"TASK": "TSV", "DATA": str(tmp_path), "EPOCHS": "4"}
    model = train(squad_environment, tmp_path / "run", **own | settings)
    assert figures_of(model)["accuracy"] == 1


@pytest.mark.parametrize(("settings", "message"), [
    ({"TASK": "SQUAD"}, "TASK='SQUAD': expected one of squad, MRPC"),
    ({"MAX_STEPS": "7"}, "EPOCHS determines the length"),
    ({"SEEDS": "1,x"}, "SEEDS=1,x: expected whole numbers"),
    ({"SEEDS": "1", "TRIAL": "1"}, "1 seeds, but this is trial 1"),
    ({"MAX_SEQ_LENGTH": "64"}, "exceeds max_position_embeddings 48"),
    ({"DATA": "/no/such/data"}, "no such folder"),
    ({"DATA": "{data}/vocab.txt"}, "vocab.txt: no such folder"),
    ({"INIT_CHECKPOINT": "{data}/vocab.txt"}, "vocab.txt: no weights: give a .pt or .safetensors, or a folder"),
    ({"PATIENCE": "2"}, "PATIENCE=2 counts evaluations: set EVAL_EVERY_EPOCHS"),
    ({"EVAL_EVERY_EPOCHS": "1", "MODE": "train"}, "which MODE=train does not"),
    ({"CHECKPOINT_BEST": "1", "CHECKPOINT_DIR": "{data}"}, "CHECKPOINT_BEST=1 keeps a checkpoint of pretraining: EVAL_"),
    ({"WARMUP_STEPS": "5"}, "WARMUP_STEPS and WARMUP_PROPORTION are both set"),
    ({"CUDA_GRAPH": "1"}, "CUDA_GRAPH=1 captures steps of pretraining: unset it to fine-tune"),
    ({"TASK": "ner", "TEXT_COLUMNS": "a"}, "TEXT_COLUMNS is of tables: unset it, or TASK=table instead of ner"),
    ({"TASK": "MRPC", "REGRESSION": "1"}, "REGRESSION is of tables: unset it, or TASK=table instead of MRPC"),
    ({"TASK": "ner"}, "no train as .txt, .conll"),
    ({"SQUAD_VERSION": "2.0"}, "train-v2.0.json: No such file"),
    ({"MODE": "eval", "TASK": "TSV"}, "has no task.json: not fine-tuned here"),
    ({"BATCHSZIE": "3"}, "did you mean BATCHSIZE"),
    ({"INIT_CHECKPOINT": ""}, "INIT_CHECKPOINT"),
])  # fmt: skip
def test_wrong_settings_stop_with_one_line(
    squad_environment, tmp_path, settings, message, capsys
):
    data = Path(squad_environment["DATA"])
    settings = {name: value.format(data=data) for name, value in settings.items()}
    assert run({**squad_environment, "RUN_DIR": str(tmp_path), **settings}) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, last), last
    reason = (tmp_path / f"error_{settings.get('TRIAL', 0)}.txt").read_text().strip()
    assert last == f"finetune: error: {reason}"


def test_a_part_from_outside_trains(squad_environment, tmp_path, monkeypatch):
    (tmp_path / "outside.py").write_text(
        "from bert import optim\n"
        "class Still(optim.rules.Rule):\n"
        "    stateless = True\n"
        "    def step(self, gradients, update):\n"
        "        self.count_step(update.apply_update)\n"
        'optim.RULES["still"] = (Still, "")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(optim.RULES, "still", ())  # gone after the test
    own = {"EPOCHS": "0.1", "OPTIMIZER": "still", "EXTENSION": "outside"}
    train(squad_environment, tmp_path, **own)
    assert content(tmp_path / "config.json")["optim"]["optimizer"] == "still"


@pytest.mark.parametrize("count", [0.5, 2])
def test_the_vocabulary_by_the_weights_is_used(squad_environment, tmp_path, count):
    words = Path(squad_environment["DATA"], "vocab.txt").read_text().split("\n")
    more = [*words, "more"] * 2
    (tmp_path / "vocab.txt").write_text("\n".join(more[: int(count * len(words))]))
    message = r"vocab.txt has \d+ words, and the model \d+: give its own"
    with pytest.raises(ConfigError, match=message):
        config.read(with_copies(squad_environment, tmp_path, "config.json"))


def test_a_folder_with_tokenizer_json_alone_is_trained_on(squad_environment, tmp_path):
    environment = with_copies(squad_environment, tmp_path, "config.json")
    words = Path(squad_environment["DATA"], "vocab.txt").read_text().split("\n")
    ids = {word: number for number, word in reversed([*enumerate(words)])}
    tokenizer = {"model": {"type": "WordPiece", "vocab": ids}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {"EPOCHS": "0.1", "RUN_DIR": str(tmp_path / "run")}
    assert run(environment | own) == 0
    kept = WordPiece(tmp_path / "run" / "model_0" / "vocab.txt").ids
    assert {word: number for word, number in kept.items() if word} == ids
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(ConfigError, match="no vocabulary of WordPiece in it"):
        config.read(environment)


def test_casing_and_length_are_the_models(squad_environment, tmp_path):
    environment = with_copies(squad_environment, tmp_path, "vocab.txt", "config.json")
    environment["MAX_SEQ_LENGTH"] = ""
    assert config.read(environment).lower_case
    assert config.read(environment).length == 48  # its positions
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    (tmp_path / "task.json").write_text('{"task": "squad", "max_seq_length": 40}')
    assert not config.read(environment).lower_case
    lengths = [config.read(environment | {"MODE": m}).length for m in ("train", "eval")]
    assert lengths == [48, 40]
    with pytest.raises(ConfigError, match="was fine-tuned for squad: TASK=squad"):
        config.read(environment | {"MODE": "eval", "TASK": "MRPC"})
