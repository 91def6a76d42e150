"""Tables whose examples have any number of labels: read, learnt, scored and predicted."""

import csv
from itertools import product

import numpy as np
import pytest
import torch

from finetune import glue, saved, tables
from finetune.batches import Samples
from finetune.tables import Layout

from . import runs
from .runs import assert_the_losses_of, figures_of, predict, train, write_tables

TABLES = {
    "marked.csv": ("text,label\na,x|y\nb,\nc, y | x \nd,z\n", {"label_mark": "|"}),
    "list.jsonl": ('{"text": "a", "label": ["x", "y"]}\n{"text": "b", "label": []}\n'
                   '{"text": "c", "label": ["y", "x", "y"]}\n{"text": "d", "label": "z"}\n', {}),
    "columns.csv": ("text,x,y,z\na,1,1,0\nb,0,0,0\nc,True,1.0,no\nd,0,0,yes\n", {"label": "x,y,z"}),
    "columns.jsonl": ('{"text": "a", "x": 1, "y": true, "z": 0}\n{"text": "b", "x": 0, "y": 0, "z": 0}\n'
                      '{"text": "c", "x": 1, "y": 1, "z": false}\n{"text": "d", "x": 0, "y": 0, "z": 1}\n', {"label": "x,y,z"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_cells_lists_and_columns_of_labels_are_one_table(tmp_path, name):
    text, layout = TABLES[name]
    (tmp_path / name).write_text(text)
    table = tables.read(tmp_path / name, Layout(**layout))
    assert (table.names, table.several) == (("x", "y", "z"), True)
    assert table.texts == [("a",), ("b",), ("c",), ("d",)]
    assert table.labels.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert table.labels.dtype == np.float32
    told = "3 classes: 2 x, 2 y, 1 z (40.00% the first), 1 without any"
    assert table.summary.endswith(told)


def test_a_label_column_without_a_1_is_a_label_all_the_same(tmp_path):
    (tmp_path / "t.csv").write_text("text,x,y\na,1,0\nb,0,0\n")
    table = tables.read(tmp_path / "t.csv", Layout(label="x,y"))
    assert (table.names, table.labels.tolist()) == (("x", "y"), [[1, 0], [0, 0]])


def test_labels_at_least_half_probable_are_predicted():
    scores = np.array([0.0, 0.5, -0.1], dtype=np.float32)
    said, shares = glue.prediction(scores, ["x", "y", "z"], True)
    assert said == ["x", "y"]
    assert [*shares.values()] == pytest.approx([0.5, 0.622459, 0.475021])


def test_metrics_equal_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    for number in range(20):
        said, true = np.random.default_rng(number).random((2, 9, 4)) < 0.1 * number
        both = torch.tensor(said).int(), torch.tensor(true).int()
        for average, metric in (("micro", glue.micro_f1), ("macro", glue.macro_f1)):
            wanted = functional.multilabel_f1_score(*both, 4, average=average)
            assert metric(said, true) == pytest.approx(float(wanted))
        wanted = functional.multilabel_exact_match(*both, 4)
        assert glue.exact_match(said, true) == pytest.approx(float(wanted))


@pytest.fixture(scope="module")
def learnt(squad_environment, tmp_path_factory):
    """Folder of a run whose labels are the words red and cat, and its environment."""
    folder = tmp_path_factory.mktemp("several")
    pairs = product(("red", "old", "blue"), ("cat", "dog", "king"))
    texts = [f"the {a} {b} sat" for a, b in pairs]
    rows = [f"{x},{';'.join(w for w in ('red', 'cat') if w in x)}" for x in texts]
    for name, times in (("train", 8), ("dev", 1)):
        write_tables(folder, ["text,label", *rows * times], [f"{name}.csv"])
    own = {"TASK": "table", "DATA": str(folder), "EPOCHS": "12"}
    environment = squad_environment | own
    return train(environment, folder / "run", LABEL_SEPARATOR=";"), environment


def test_labels_are_learnt_scored_and_evaluated_again(learnt, tmp_path):
    folder, environment = learnt
    names = "micro_f1", "macro_f1", "exact_match"
    rows = runs.table_of(folder / "predictions.tsv")
    assert rows[0] == ["index", "prediction", "cat", "red"]
    assert [row[1] for row in rows[1:6]] == ["cat;red", "red", "red", "cat", ""]
    assert (folder / "classes.tsv").read_text().splitlines()[1:] == [
        "cat\t1.0000\t1.0000\t1.0000\t3", "red\t1.0000\t1.0000\t1.0000\t3",
    ]  # fmt: skip
    # Its labels' separator is the model's.
    for model in (folder, runs.evaluate(environment, tmp_path, folder)):
        figures = figures_of(model)
        assert [figures[name] for name in names] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_predicted_labels_are_as_in_training_or_a_list(learnt, tmp_path, kind):
    rows = ["n,text", "1,the red cat sat", "2,the old dog sat", "3,a red king"]
    write_tables(tmp_path, rows, ["new.csv"])
    output = tmp_path / f"out.{kind}"
    assert predict(learnt[0], tmp_path / "new.csv", output) == 0
    if kind == "jsonl":
        said = [row["prediction"] for row in runs.lines_of(output)]
        assert said == [["cat", "red"], [], ["red"]]
        return
    rows = list(csv.DictReader(output.open()))
    assert [row["prediction"] for row in rows] == ["cat;red", "", "red"]
    shares = (float(rows[0][f"probability_{name}"]) for name in ("cat", "red"))
    assert sum(shares) > 1.5


def test_probabilities_and_loss_are_those_of_transformers(learnt):
    transformers = pytest.importorskip("transformers")
    folder, _ = learnt
    kind = transformers.AutoModelForSequenceClassification
    other = kind.from_pretrained(folder).eval()
    assert other.config.problem_type == "multi_label_classification"
    mine = saved.load(folder, "cpu")
    texts = [("the red dog sat",), ("a cat",)]
    labels = np.array([[0, 1], [1, 0]], dtype=np.float32)
    samples = Samples(glue.encode(texts, mine.tokenizer, 48), {"labels": labels})
    scores = assert_the_losses_of(other, mine, samples)
    for said, row in zip(mine.predict(texts), scores, strict=True):
        shares = torch.sigmoid(torch.from_numpy(row)).tolist()
        assert [*said["probabilities"].values()] == pytest.approx(shares, abs=1e-5)
