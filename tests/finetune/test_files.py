"""Files are predicted row by row, in order and with all columns."""

from __future__ import annotations

import csv
import errno
import gzip
import json
from pathlib import Path

import pytest

from finetune import files, glue, saved
from finetune.__main__ import main
from finetune.train import run

WORDS = ["red", "blue", "north", "here"]
ROWS = [
    {
        "id": f"r{n}",
        "text": f"the cat was {WORDS[n % 4]}" + " and old" * (n % 5),
        "by": "x, y",
    }
    for n in range(11)
]


@pytest.fixture(scope="module")
def model(squad_environment, tmp_path_factory):
    """Folder of a run that classifies colours and places, trained on a CSV file with named
    columns.
    """
    folder = tmp_path_factory.mktemp("table")
    for name in ("train", "dev"):
        rows = [
            f"{word in WORDS[:2]},{n},the cat was {word}"
            for n in range(8)
            for word in WORDS
        ]
        (folder / f"{name}.csv").write_text(
            "\n".join(["kind,number,words", *rows]) + "\n"
        )
    environment = squad_environment | {
        "TASK": "table",
        "DATA": str(folder),
        "EPOCHS": "10",
        "RUN_DIR": str(folder),
    }
    assert run(environment | {"LABEL_COLUMN": "kind", "TEXT_COLUMNS": "words"}) == 0
    assert (
        json.loads((folder / "model_0" / "figures.json").read_text())["accuracy"] == 1
    )
    return folder


def predict(model, source, target, *more):
    return main(
        [
            "predict",
            str(model),
            "--input",
            str(source),
            "--output",
            str(target),
            "--device",
            "cpu",
            *more,
        ],
        {},
    )


def write(path: Path, rows, kind):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(
                file, rows[0], delimiter="\t" if kind == "tsv" else ","
            )
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_come_back_in_order_with_label_and_probabilities(
    model, tmp_path, kind, capsys
):
    source = write(tmp_path / f"in.{kind}", ROWS, kind)
    target = tmp_path / f"out.{kind}"
    assert (
        predict(model, source, target, "--text-columns", "text", "--batch-size", "3")
        == 0
    )
    told = capsys.readouterr().err
    assert "11 rows, " in told
    assert "id, text, by; predicting from text" in told
    if kind == "jsonl":
        found = [json.loads(line) for line in target.read_text().splitlines()]
        shares = [row["probabilities"] for row in found]
    else:
        found = list(csv.DictReader(target.open(newline="")))
        shares = [
            {label: float(row[f"probability_{label}"]) for label in ("True", "False")}
            for row in found
        ]
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    assert [row["prediction"] for row in found] == [str(n % 4 < 2) for n in range(11)]
    alone = saved.load(model, "cpu")
    for row, share in zip(ROWS, shares, strict=True):
        (wanted,) = alone.predict([(row["text"],)])
        assert share == pytest.approx(wanted["probabilities"], abs=2e-6)
    assert list(tmp_path.iterdir()) == [source, target] or sorted(
        tmp_path.iterdir()
    ) == sorted([source, target])


def test_a_model_of_named_columns_is_evaluated_on_a_table_without_a_header(
    model, squad_environment, tmp_path
):
    (tmp_path / "dev.csv").write_text("the cat was red,True\nthe cat was here,False\n")
    environment = squad_environment | {
        "TASK": "table",
        "MODE": "eval",
        "DATA": str(tmp_path),
        "NO_HEADER": "1",
        "INIT_CHECKPOINT": str(model / "model_0"),
        "RUN_DIR": str(tmp_path / "run"),
    }
    assert run(environment) == 0
    figures = json.loads((tmp_path / "run/model_0/figures.json").read_text())
    assert figures["accuracy"] == 1


def test_numbers_are_learnt_and_predicted(squad_environment, tmp_path, capsys):
    rows = [
        f"the cat was {word}\t{n}.5"
        for _ in range(24)
        for n, word in enumerate(WORDS[1:3])
    ]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]))
    environment = squad_environment | {
        "TASK": "table",
        "DATA": str(tmp_path),
        "RUN_DIR": str(tmp_path / "run"),
    }
    assert run(environment | {"EPOCHS": "20"}) == 0
    assert "numbers from 0.5 to 1.5, mean 1" in capsys.readouterr().err
    figures = json.loads((tmp_path / "run" / "model_0" / "figures.json").read_text())
    assert figures["pearson"] > 0.98
    assert predict(tmp_path / "run", tmp_path / "dev.tsv", tmp_path / "out.csv") == 0
    found = list(csv.DictReader((tmp_path / "out.csv").open(newline="")))
    for row in found:
        assert float(row["prediction"]) == pytest.approx(float(row["label"]), abs=0.3)
    assert (
        main(
            [
                "predict",
                str(tmp_path / "run"),
                "--text",
                "the cat was blue",
                "--device",
                "cpu",
            ],
            {},
        )
        == 0
    )
    assert float(capsys.readouterr().out) == pytest.approx(
        float(found[0]["prediction"]), abs=1e-5
    )
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model_0"
    )
    assert (other.config.num_labels, other.config.problem_type) == (1, "regression")


def test_questions_in_a_table_get_the_same_answers_as_the_evaluation(
    learnt, squad_environment, tmp_path
):
    source = Path(squad_environment["DATA"]) / "dev-v1.1.json"
    wanted = json.loads((learnt / "model_0" / "predictions.json").read_text())
    rows = [
        {
            "id": question["id"],
            "question": question["question"],
            "context": paragraph["context"],
        }
        for paragraph in json.loads(source.read_text())["data"][0]["paragraphs"]
        for question in paragraph["qas"]
    ]
    assert (
        predict(learnt, write(tmp_path / "in.csv", rows, "csv"), tmp_path / "out.csv")
        == 0
    )
    found = list(csv.DictReader((tmp_path / "out.csv").open(newline="")))
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
    assert (
        predict(
            model,
            tmp_path / name,
            tmp_path / "out.csv",
            *(word.format(folder=tmp_path) for word in more),
        )
        == 2
    )
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


def test_every_row_comes_back_also_those_without_text(model, tmp_path, capsys):
    text = "words,mine\nthe cat was red,0.1\n,\nnull,x\nhere,y\n"
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert predict(model, tmp_path / "in.csv.gz", tmp_path / "out.csv") == 0
    assert "no text in lines 3, 4: no prediction for 2 rows" in capsys.readouterr().err
    found = list(csv.DictReader((tmp_path / "out.csv").open(newline="")))
    assert [row["mine"] for row in found] == ["0.1", "", "x", "y"]
    assert [row["prediction"] for row in found] == ["True", "", "", "False"]
    assert [bool(row["probability_True"]) for row in found] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_users_columns_are_kept_where_predict_adds_one_of_that_name(
    model, tmp_path, kind, capsys
):
    rows = [{"words": "the cat was red", "prediction": "mine", "prediction_2": "too"}]
    source = write(tmp_path / f"in.{kind}", rows, kind)
    target = tmp_path / f"out.{kind}"
    assert predict(model, source, target) == 0
    assert "the new ones are called prediction_3" in capsys.readouterr().err
    text = target.read_text()
    (row,) = csv.DictReader(text.splitlines()) if kind == "csv" else [json.loads(text)]
    assert {name: row[name] for name in rows[0]} == rows[0]
    assert row["prediction_3"] == "True"
    share = (
        row["probability_True_3"] if kind == "csv" else row["probabilities_3"]["True"]
    )
    assert float(share) > 0.5


def test_a_text_per_line_comes_back_with_its_blank_lines(model, tmp_path, capsys):
    (tmp_path / "in.tsv").write_text("the cat was red\n\nit was, here and there.\n\n")
    arguments = model, tmp_path / "in.tsv", tmp_path / "out.jsonl"
    assert predict(*arguments) == 2
    assert "is it a header? the cat was red" in capsys.readouterr().err
    assert predict(*arguments, "--no-header") == 0
    rows = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert [row["column_1"] for row in rows] == [
        "the cat was red",
        "",
        "it was, here and there.",
    ]
    assert [row["prediction"] is None for row in rows] == [False, True, False]


def test_texts_that_may_be_cut_are_counted(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    texts = ["the cat was red", "red " * 99, "here", "old " * 99]
    source = write(tmp_path / "in.jsonl", [{"words": text} for text in texts], "jsonl")
    told = "examples fill 48 tokens: what is longer is cut there"
    assert predict(model, source, tmp_path / "out.jsonl") == 0
    assert capsys.readouterr().err.count(f"2 of 4 {told}") == 1
    (*_, row) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert list(row) == ["words", "prediction", "probabilities"]
    for text, count in (("red " * 99, 1), ("red", 0)):
        alone = ["predict", str(model), "--text", text, "--device", "cpu"]
        assert main(alone, {}) == 0
        assert capsys.readouterr().err.count(f"1 of 1 {told}") == count


def test_a_full_disk_is_one_line(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.csv").write_text("words\nthe cat was red\n")

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(glue, "cell", full)
    assert predict(model, tmp_path / "in.csv", tmp_path / "out.csv") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"No space left in {tmp_path}: out.csv" in told
