"""Texts are truncated as published; metrics equal those of scipy and torchmetrics."""

import json
import random

import numpy as np
import pytest
import torch

from bert.data.tokens import WordPiece
from finetune import config, glue, tasks

from .runs import copied, table_of, write_tables


def test_sequences_have_special_tokens_and_are_truncated(tokenizer):
    texts = [("the cat sat",), ("the cat sat here", "dog")]
    encoded = glue.encode(texts, tokenizer, 6)
    names = [[tokenizer.names[n] for n in ids.tolist()] for ids, _ in encoded]
    assert [" ".join(row) for row in names] == [
        "[CLS] the cat sat [SEP]",
        "[CLS] the cat [SEP] dog [SEP]",
    ]
    assert [second for _, second in encoded] == [5, 4]
    assert len(glue.encode(texts[:1], tokenizer, 4)[0][0]) == 4


def test_metrics_equal_torchmetrics_and_scipy():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    from scipy.stats import pearsonr, spearmanr

    generator = random.Random(3)
    for _ in range(50):
        count = generator.randrange(5, 60)
        said, true = ([generator.randrange(2) for _ in range(count)] for _ in range(2))
        both = torch.tensor(said), torch.tensor(true)
        said, true = np.array(said), np.array(true)
        accuracy, f1 = glue.accuracy(said, true), glue.f1(said, true)
        assert accuracy == pytest.approx(float(functional.binary_accuracy(*both)))
        assert f1 == pytest.approx(float(functional.binary_f1_score(*both)))
        assert glue.accuracy_and_f1(said, true) == pytest.approx((accuracy + f1) / 2)
        if len({*said.tolist()}) == len({*true.tolist()}) == 2:
            expected = pearsonr(said, true).statistic
            assert glue.matthews(said, true) == pytest.approx(expected)
        # Scores as in STS-B, some of them equal.
        x, y = np.array(generator.choices(range(16), k=2 * count)).reshape(2, -1) / 3.2
        pearson, spearman = glue.pearson(x, y), glue.spearman(x, y)
        assert pearson == pytest.approx(pearsonr(x, y).statistic)
        assert spearman == pytest.approx(spearmanr(x, y).statistic)
        mean = pytest.approx((pearson + spearman) / 2)
        assert glue.pearson_and_spearman(x, y) == mean


def test_metrics_without_any_spread_are_0():
    zeros, ones = np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64)
    assert glue.pearson(ones, np.arange(4)) == glue.spearman(ones, np.arange(4)) == 0
    assert glue.f1(zeros, zeros) == 0
    assert glue.matthews(zeros, ones) == glue.matthews(ones, ones) == 0


@pytest.mark.parametrize(("task", "texts", "label", "values", "ends"), [
    ("MNLI", "sentence1\tsentence2", "gold_label", ["neutral", "entailment", "neutral"], ["_matched", "_mismatched"]),
    ("STS-B", "sentence1\tsentence2", "score", ["0.5", "3.25", "2.0"], [""]),
    ("QNLI", "question\tsentence", "label", ["not_entailment", "entailment", "entailment"], [""]),
])  # fmt: skip
def test_each_dev_file_is_scored_and_test_files_become_files_for_glues_server(
    squad_environment, tmp_path, task, texts, label, values, ends
):
    head, rows = f"index\t{texts}", [f"{n}\tthe cat\ta dog" for n in range(3)]
    known = [f"{row}\t{value}" for row, value in zip(rows, values, strict=True)]
    for end in ends:
        write_tables(tmp_path, [f"{head}\t{label}", *known], [f"dev{end}.tsv"])
        write_tables(tmp_path, [head, *rows], [f"test{end}.tsv"])
    names = glue.TASKS[task].layout.labels
    if names:
        right = np.eye(len(names), dtype=np.float32)[[*map(names.index, values)]]
    else:
        right = np.array(values, dtype=np.float32)[:, None]
    # The second file's are all wrong.
    scores = [*right, *(np.roll(right, 1, axis=1) if len(ends) == 2 else [])]
    (tmp_path / "task.json").write_text(json.dumps({"task": task, "labels": names}))
    weights = squad_environment["INIT_CHECKPOINT"]
    own = copied(weights, tmp_path, "weights.pt", "config.json", "vocab.txt")
    environment = squad_environment | own | {"TASK": task, "DATA": str(tmp_path)}
    metrics = {}
    for mode in ("eval", "prediction"):
        settings = config.read(environment | {"MODE": mode})
        built = tasks.build(settings, WordPiece(settings.vocabulary))
        assert len(built.test.lengths) == len(scores)
        metrics[mode] = built.finish(scores, tmp_path / mode)
    assert not metrics["prediction"]
    assert next(iter(metrics["eval"].values())) == pytest.approx(1)
    if task == "MNLI":
        assert metrics["eval"] == {"accuracy": 1.0, "mismatched_accuracy": 0.0}
    answers = {"MNLI": ["MNLI-m", "MNLI-mm"]}.get(task, [task])
    files = [tmp_path / "prediction" / f"{name}.tsv" for name in answers]
    assert all(file.is_file() for file in files)
    head, *found = table_of(files[0])
    assert head == ["index", "prediction"]
    said = [value if names else str(float(value)) for _, value in found]
    assert said == values
    assert [number for number, _ in found] == ["0", "1", "2"]


def test_macro_f1_and_the_rows_of_the_classes_count_every_label_once():
    """The values are scikit-learn's: f1_score(average="macro"), classification_report."""
    true, said = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 3, 0])
    assert glue.accuracy(said, true) == 0.5
    # F1 of 0: 2/3, of 1: 1/2, of 2 and 3: 0, of which 2 is never said and 3 never true.
    assert glue.macro_f1(said, true) == pytest.approx((2 / 3 + 1 / 2) / 4)
    assert glue.by_class(said, true, ["a", "b", "c", "d", "e"])[1:] == [
        ["a", "0.6667", "0.6667", "0.6667", "3"],
        ["b", "0.5000", "0.5000", "0.5000", "2"],
        ["c", "0.0000", "0.0000", "0.0000", "1"],
        ["d", "0.0000", "0.0000", "0.0000", "0"],
        ["e", "0.0000", "0.0000", "0.0000", "0"],
    ]
