"""Tables of GLUE and one's own are read as they are, cut as published, and measured as scipy and torchmetrics do."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from bert.data.records import DataError
from bert.data.tokens import WordPiece
from finetune import glue
from finetune.glue import TASKS

from . import made_up


def read(tmp_path, text, task, names=()):
    path = tmp_path / "table.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return glue.read(path, TASKS[task], names)


def test_mrpc_keeps_quotation_marks_and_drops_header_bom_and_carriage_returns(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    table = read(tmp_path, header + '1\t7\t8\t"He said " so\tIt\'s "it\r\n0\t1\t2\ta\u2028b\tc\u0085d\r\n', "MRPC")
    assert table.texts == [('"He said " so', "It's \"it"), ("a\u2028b", "c\u0085d")]
    assert table.labels.tolist() == [1, 0]


def test_cola_has_no_header_and_its_text_in_the_fourth_column(tmp_path):
    table = read(tmp_path, "gj04\t1\t\tThe cat sat.\ngj04\t0\t*\tcat The sat\n", "CoLA")
    assert table.texts == [("The cat sat.",), ("cat The sat",)]
    assert table.labels.tolist() == [1, 0]


def test_sst2_has_a_header_and_its_label_second(tmp_path):
    table = read(tmp_path, "sentence\tlabel\nit 's fine \t1\n\nno\t0\n", "SST-2")
    assert table.texts == [("it 's fine ",), ("no",)]
    assert table.labels.tolist() == [1, 0]


@pytest.mark.parametrize("extra", [0, 4])
def test_mnli_has_its_label_last_however_many_columns_there_are(tmp_path, extra):
    cells = [f"c{i}" for i in range(8)] + ["A man.", "A cat."] + ["entailment"] * extra  # votes of single people
    lines = ["\t".join(["x"] * (11 + extra)), *("\t".join([*cells, label]) for label in TASKS["MNLI"].labels)]
    table = read(tmp_path, "\n".join(lines), "MNLI")
    assert table.texts == [("A man.", "A cat.")] * 3
    assert table.labels.tolist() == [0, 1, 2]


def test_a_table_of_ones_own_has_its_label_last_with_or_without_a_header(tmp_path):
    for header in ("", "review\tLabel\n"):
        table = read(tmp_path, header + 2 * "good\tpos\nbad\tneg\nso so\tneutral\n", "TSV")
        assert table.texts[:3] == [("good",), ("bad",), ("so so",)]
        assert table.names == ("neg", "neutral", "pos")
        assert table.labels.tolist() == [2, 0, 1] * 2
    assert read(tmp_path, "\ufeffgood\tx\nbad\ty\n" + "so\tx\n", "TSV").texts[0] == ("good",)  # Excel's mark
    assert read(tmp_path, "a\tb\tyes\nc\td\tno\n" + "e\tf\tyes", "TSV").texts[:2] == [("a", "b"), ("c", "d")]
    assert read(tmp_path, "a\tlabel\nb\tx\nc\tlabel\n", "TSV").names == ("label", "x")  # a class of that name
    assert read(tmp_path, "good\tpos\n", "TSV", ("neg", "pos")).labels.tolist() == [1]


@pytest.mark.parametrize(
    ("task", "num_texts", "text", "expected"),
    [
        ("SST-2", 0, "index\tsentence\n0\tfine film\n1\tbad\n", [("fine film",), ("bad",)]),
        ("SST-2", 0, "sentence\tlabel\nfine film\t1\nbad\t0\n", [("fine film",), ("bad",)]),
        ("CoLA", 0, "index\tsentence\n0\tThe cat sat.\n", [("The cat sat.",)]),
        ("MRPC", 0, "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n", [("a", "b")]),
        ("MNLI", 0, "\t".join("h" * 10) + "\n" + "\t".join([*"01234567", "a", "b"]), [("a", "b")]),
        ("TSV", 1, "good\nso so\n", [("good",), ("so so",)]),
        ("TSV", 1, "sentence\nso so\n", [("so so",)]),
        ("TSV", 1, "good\tx\nbad\ty\n", [("good",), ("bad",)]),
        ("TSV", 1, "review\tlabel\ngood\tx\n", [("good",)]),
        ("TSV", 2, "a\tb\nc\td\n", [("a", "b"), ("c", "d")]),
        ("TSV", 0, "a\tx\nc\ty\n", [("a",), ("c",)]),
        ("TSV", 0, "a\tx\nc\td\n", [("a", "x"), ("c", "d")]),
        ("TSV", 1, "a\tx\nc\td\n", None),
        ("TSV", 2, "a\nc\n", None),
    ],
)
def test_a_table_without_labels_is_read_for_prediction(tmp_path, task, num_texts, text, expected):
    (tmp_path / "table.tsv").write_text(text)
    arguments = tmp_path / "table.tsv", TASKS[task], num_texts, ("x", "y")
    if expected is None:
        with pytest.raises(DataError, match=r"table.tsv:1: \d columns, expected \d"):
            glue.read_texts(*arguments)
    else:
        assert glue.read_texts(*arguments) == expected


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("SST-2", "sentence\tlabel\nfine\t1\nbad\n", r"table.tsv:3: 1 columns, expected 2"),
        ("SST-2", "sentence\tlabel\nfine\t2\n", r"table.tsv:2: label '2', expected one of 0, 1"),
        ("SST-2", "sentence\tlabel\n", "holds no example"),
        ("MRPC", "h\n1\t2\t3\t4\n", r"table.tsv:2: 4 columns, expected 5"),
        ("MNLI", "h\n" + "\t".join(["x"] * 10) + "\n", "10 columns, expected 11"),
        ("TSV", "good\n", "one or two columns of text and then the label"),
        ("TSV", "a\tb\tc\td\n", "one or two columns of text and then the label"),
        ("TSV", "a\tx\nb\tc\ty\n", r"table.tsv:2: 3 columns, expected 2"),
        ("TSV", "a\tx\nb\tx\n", "every label is 'x'"),
        ("TSV", b"caf\xe9\tx\n", "not UTF-8"),
        (
            "TSV",
            "text\tsentiment\n" + "good\tpos\nbad\tneg\n" * 2,
            r"table.tsv:1: is it a header\? 'sentiment' is the label",
        ),
        ("TSV", "good\tx\nbad\t\n" * 2, r"table.tsv:2: label '', expected one of"),
        (
            "TSV",
            "\n".join(f"pos\ttext {i} of many" for i in range(18)),
            r"18 different labels in 18 lines .*\.\.\.\): the label is",
        ),
        ("TSV", "sentence\tlabel\n", "holds no example"),
        ("SST-2", "fine\t1\nbad\t0\n", r"table.tsv:1: an example, and this task's files begin with a header"),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_place(tmp_path, task, text, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, text, task)


def test_a_missing_table_is_one_line(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        glue.read(tmp_path / "none.tsv", TASKS["MRPC"])


def test_pairs_lose_one_token_after_another_from_the_longer():
    for a in range(12):
        for b in range(12):
            for room in range(14):
                x, y = a, b
                while x + y > room:
                    if x > y:
                        x -= 1
                    else:
                        y -= 1
                assert glue.kept(a, b, room) == (x, y)


def test_sequences_are_framed_and_cut(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(made_up.VOCABULARY), encoding="utf-8")
    tokenizer = WordPiece(tmp_path / "vocab.txt")
    names = {number: token for token, number in tokenizer.ids.items()}
    texts = [("the cat sat",), ("the cat sat here", "dog")]
    encoded = glue.encode(texts, tokenizer, 6)
    assert [" ".join(names[i] for i in ids.tolist()) for ids, _ in encoded] == [
        "[CLS] the cat sat [SEP]",
        "[CLS] the cat [SEP] dog [SEP]",
    ]
    assert [second for _, second in encoded] == [5, 4]
    assert len(glue.encode(texts[:1], tokenizer, 4)[0][0]) == 4


def test_metrics_equal_torchmetrics_and_scipy():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    from scipy.stats import pearsonr

    generator = random.Random(3)
    for _ in range(50):
        count = generator.randrange(5, 60)
        predicted, true = (np.array([generator.randrange(2) for _ in range(count)]) for _ in range(2))
        a, b = torch.tensor(predicted), torch.tensor(true)
        assert glue.accuracy(predicted, true) == pytest.approx(float(functional.binary_accuracy(a, b)))
        assert glue.f1(predicted, true) == pytest.approx(float(functional.binary_f1_score(a, b)))
        mean = (glue.accuracy(predicted, true) + glue.f1(predicted, true)) / 2
        assert glue.accuracy_and_f1(predicted, true) == pytest.approx(mean)
        if len(set(predicted.tolist())) == len(set(true.tolist())) == 2:
            assert glue.matthews(predicted, true) == pytest.approx(pearsonr(predicted, true).statistic)
    zeros, ones = np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64)
    assert glue.f1(zeros, zeros) == glue.matthews(zeros, ones) == glue.matthews(ones, ones) == 0
    assert glue.accuracy(np.array([2, 1, 0]), np.array([2, 1, 1])) == pytest.approx(2 / 3)
