"""Files are predicted row by row, in order and with all columns."""

import csv
import errno
import gzip
import json
from pathlib import Path

import pytest

from finetune import files, glue, saved

from . import runs
from .runs import command, content, figures_of, predict, train, write_tables

WORDS = ["red", "blue", "north", "here"]
TEXTS = [f"the cat was {WORDS[n % 4]}" + " and old" * (n % 5) for n in range(11)]
ROWS = [
    {"id": f"r{n}", "text": text, "by": "x, y", "prediction": "mine", "prediction_2": "too"}
    for n, text in enumerate(TEXTS)
]  # fmt: skip


@pytest.fixture(scope="module")
def model(squad_environment, tmp_path_factory):
    """Folder of a run that tells colours from places, of a CSV file with named columns."""
    folder = tmp_path_factory.mktemp("table")
    rows = [f"{w in WORDS[:2]},{n},the cat was {w}" for n in range(8) for w in WORDS]
    write_tables(folder, ["kind,number,words", *rows], ("train.csv", "dev.csv"))
    own = {"TASK": "table", "DATA": str(folder), "EPOCHS": "8"}
    own |= {"LABEL_COLUMN": "kind", "TEXT_COLUMNS": "words"}
    assert figures_of(train(squad_environment, folder, **own))["accuracy"] == 1
    return folder


def write(path: Path, rows):
    """Rows as CSV or JSON Lines, as the name ends."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows_in(path: Path):
    if path.suffix == ".jsonl":
        return runs.lines_of(path)
    return list(csv.DictReader(path.open(newline="")))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_come_back_in_order_beside_the_users_columns_of_those_names(
    model, tmp_path, kind, capsys
):
    source = write(tmp_path / f"in.{kind}", ROWS)
    target = tmp_path / f"out.{kind}"
    more = "--text-columns", "text", "--batch-size", "3"
    assert predict(model, source, target, *more) == 0
    told = capsys.readouterr().err
    assert "11 rows, " in told
    assert "prediction, prediction_2; predicting from text" in told
    assert "the new ones are called prediction_3" in told
    found = rows_in(target)
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    assert [row["prediction_3"] for row in found] == [str(n % 4 < 2) for n in range(11)]
    alone = saved.load(model, "cpu")
    for row in found:
        share = row["probabilities_3"] if kind == "jsonl" else {
            name: float(row[f"probability_{name}_3"]) for name in ("True", "False")
        }  # fmt: skip
        (wanted,) = alone.predict([(row["text"],)])
        assert share == pytest.approx(wanted["probabilities"], abs=2e-6)
    assert {*tmp_path.iterdir()} == {source, target}


def test_a_model_of_named_columns_is_evaluated_on_a_table_without_a_header(
    model, squad_environment, tmp_path
):
    (tmp_path / "dev.csv").write_text("the cat was red,True\nthe cat was here,False\n")
    own = {"TASK": "table", "DATA": str(tmp_path), "NO_HEADER": "1"}
    again = runs.evaluate(squad_environment, tmp_path / "run", model / "model_0", **own)
    assert figures_of(again)["accuracy"] == 1


def test_numbers_are_learnt_and_predicted(squad_environment, tmp_path, capsys):
    words = [*enumerate(WORDS[1:3])] * 12
    rows = [f"the cat was {word}\t{n}.5" for n, word in words]
    write_tables(tmp_path, ["text\tlabel", *rows])
    own = {"TASK": "table", "DATA": str(tmp_path), "EPOCHS": "20"}
    run = train(squad_environment, tmp_path / "run", **own)
    assert "numbers from 0.5 to 1.5, mean 1" in capsys.readouterr().err
    assert figures_of(run)["pearson"] > 0.98
    assert predict(run, tmp_path / "dev.tsv", tmp_path / "out.csv") == 0
    found = rows_in(tmp_path / "out.csv")
    for row in found:
        assert float(row["prediction"]) == pytest.approx(float(row["label"]), abs=0.3)
    assert command("predict", run, "--text", "the cat was blue") == 0
    said = pytest.approx(float(capsys.readouterr().out), abs=1e-5)
    assert float(found[0]["prediction"]) == said
    of_hugging_face = content(run / "config.json")
    assert of_hugging_face["problem_type"] == "regression"
    assert of_hugging_face["id2label"] == {"0": "LABEL_0"}


def test_questions_in_a_table_get_the_same_answers_as_the_evaluation(
    learnt, squad_environment, tmp_path
):
    dev = content(Path(squad_environment["DATA"]) / "dev-v1.1.json")
    wanted = content(learnt / "model_0" / "predictions.json")
    rows = [
        {"context": part["context"], "id": asked["id"], "question": asked["question"]}
        for part in dev["data"][0]["paragraphs"]
        for asked in part["qas"]
    ]
    source = write(tmp_path / "in.csv", rows)
    assert predict(learnt, source, tmp_path / "out.csv") == 0
    found = rows_in(tmp_path / "out.csv")
    assert {row["id"]: row["prediction"] for row in found} == wanted
    assert all(0 < float(row["probability"]) <= 1 for row in found)


@pytest.mark.parametrize(("name", "text", "more", "message"), [
    ("in.csv", "a,b\n1,2\n", [], "no column 'words', which the model was trained on (it has a, b): set TEXT_COLUMNS"),
    ("in.csv", "a,b\n1,2\n", ["--text-columns", "c"], "no column 'c' (it has a, b)"),
    ("in.csv", "words\n", [], "has no examples"),
    ("none.csv", None, [], "none.csv: No such file"),
    ("in.csv", "words\na\n", ["--output", "{folder}/out.xlsx"], "expected a name ending in .csv or .jsonl"),
    ("in.csv", "words\na\n", ["--output", "{folder}/in.csv"], "is the input file"),
    ("in.csv", "words\na\n", ["--output", "{folder}/none/out.csv"], "there is no folder"),
])  # fmt: skip
def test_invalid_input_is_one_line_and_leaves_no_file(
    model, tmp_path, name, text, more, message, capsys
):
    if text is not None:
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    more = [word.format(folder=tmp_path) for word in more]
    assert predict(model, tmp_path / name, tmp_path / "out.csv", *more) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


def test_every_row_comes_back_also_those_without_text(model, tmp_path, capsys):
    text = "words,mine\nthe cat was red,0.1\n,\nnull,x\nhere,y\n"
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert predict(model, tmp_path / "in.csv.gz", tmp_path / "out.csv") == 0
    assert "no text in lines 3, 4: no prediction for 2 rows" in capsys.readouterr().err
    found = rows_in(tmp_path / "out.csv")
    assert [row["mine"] for row in found] == ["0.1", "", "x", "y"]
    assert [row["prediction"] for row in found] == ["True", "", "", "False"]
    shares = [bool(row["probability_True"]) for row in found]
    assert shares == [True, False, False, True]


def test_a_text_per_line_comes_back_with_its_blank_lines(model, tmp_path, capsys):
    (tmp_path / "in.tsv").write_text("the cat was red\n\nit was, here and there.\n\n")
    arguments = model, tmp_path / "in.tsv", tmp_path / "out.jsonl"
    assert predict(*arguments) == 2
    assert "is it a header? the cat was red" in capsys.readouterr().err
    assert predict(*arguments, "--no-header") == 0
    rows = rows_in(tmp_path / "out.jsonl")
    texts = "the cat was red", "", "it was, here and there."
    assert tuple(row["column_1"] for row in rows) == texts
    assert [row["prediction"] is None for row in rows] == [False, True, False]


def test_texts_that_may_be_cut_are_counted(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    texts = ["the cat was red", "red " * 99, "here", "old " * 99]
    source = write(tmp_path / "in.jsonl", [{"words": text} for text in texts])
    told = "examples fill 48 tokens: what is longer is cut there"
    assert predict(model, source, tmp_path / "out.jsonl") == 0
    assert capsys.readouterr().err.count(f"2 of 4 {told}") == 1
    (*_, row) = rows_in(tmp_path / "out.jsonl")
    assert list(row) == ["words", "prediction", "probabilities"]
    for text, count in (("red " * 99, 1), ("red", 0)):
        assert command("predict", model, "--text", text) == 0
        said = capsys.readouterr()
        assert said.err.count(f"1 of 1 {told}") == count
        shares = [line.split() for line in said.out.splitlines()]
        assert [label for _, label in shares] == ["True", "False"]
        assert sum(float(share) for share, _ in shares) == pytest.approx(1, abs=1e-3)


def test_a_full_disk_is_one_line(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.csv").write_text("words\nthe cat was red\n")

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(glue, "cell", full)
    assert predict(model, tmp_path / "in.csv", tmp_path / "out.csv") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"No space left in {tmp_path}: out.csv" in told
