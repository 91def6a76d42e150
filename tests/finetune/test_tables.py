"""GLUE's and users' tables: columns by name, headers recognized, labels or numbers."""

from __future__ import annotations

import json

import pytest

from finetune import tables
from finetune.glue import TASKS
from finetune.tables import Layout

from ..refused import refused


def layout_of(task):
    return TASKS[task].layout or Layout()


def read(tmp_path, text, task, names=()):
    path = tmp_path / "table.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return tables.read(
        path, layout_of(task)._replace(**({"labels": names} if names else {}))
    )


def test_mrpc_keeps_quotation_marks_and_drops_header_bom_and_carriage_returns(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    table = read(
        tmp_path,
        header + '1\t7\t8\t"He said " so\tIt\'s "it\r\n0\t1\t2\ta\u2028b\tc\u0085d\r\n',
        "MRPC",
    )
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
    # Votes of single people.
    cells = [f"c{i}" for i in range(8)] + ["A man.", "A cat."] + ["entailment"] * extra
    votes = [f"label{i}" for i in range(extra)]
    lines = [
        "\t".join([*"abcdefgh", "sentence1", "sentence2", *votes, "gold_label"]),
        *("\t".join([*cells, label]) for label in layout_of("MNLI").labels),
    ]
    table = read(tmp_path, "\n".join(lines), "MNLI")
    assert table.texts == [("A man.", "A cat.")] * 3
    assert table.labels.tolist() == [0, 1, 2]


def test_a_users_table_has_its_label_last_with_or_without_a_header(tmp_path):
    for header in ("", "review\tLabel\n"):
        table = read(
            tmp_path, header + 2 * "good\tpos\nbad\tneg\nso so\tneutral\n", "TSV"
        )
        assert table.texts[:3] == [("good",), ("bad",), ("so so",)]
        assert table.names == ("neg", "neutral", "pos")
        assert table.labels.tolist() == [2, 0, 1] * 2
    # Excel's mark.
    assert read(tmp_path, "\ufeffgood\tx\nbad\ty\n" + "so\tx\n", "TSV").texts[0] == (
        "good",
    )
    pairs = "A man is here.\ta cat sleeps\tyes\na dog runs\ta dog ran\tno\ne\tf\tyes"
    assert read(tmp_path, pairs, "TSV").texts[:2] == [
        ("A man is here.", "a cat sleeps"),
        ("a dog runs", "a dog ran"),
    ]
    # A class of that name.
    assert read(tmp_path, "a\tlabel\nb\tx\nc\tlabel\n", "TSV").names == ("label", "x")
    assert read(tmp_path, "good\tpos\n", "TSV", ("neg", "pos")).labels.tolist() == [1]


MNLI = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2"
)
PUBLISHED = {  # headers of GLUE's archives: of train.tsv and dev.tsv, of test.tsv, and a label
    "CoLA": ("", "index sentence", "1"),
    "SST-2": ("sentence label", "index sentence", "0"),
    "MRPC": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "index|#1 ID|#2 ID|#1 String|#2 String", "1"),
    "QQP": ("id qid1 qid2 question1 question2 is_duplicate", "id question1 question2", "0"),
    "STS-B": ("index genre filename year old_index source1 source2 sentence1 sentence2 score",
              "index genre filename year old_index source1 source2 sentence1 sentence2", "3.800"),
    "MNLI": (f"{MNLI} label1 gold_label", MNLI, "neutral"),
    "QNLI": ("index question sentence label", "index question sentence", "not_entailment"),
    "RTE": ("index sentence1 sentence2 label", "index sentence1 sentence2", "entailment"),
    "WNLI": ("index sentence1 sentence2 label", "index sentence1 sentence2", "1"),
}  # fmt: skip
OF_TEXT = {
    "sentence1",
    "sentence2",
    "#1 String",
    "#2 String",
    "question1",
    "question2",
    "question",
    "sentence",
}


@pytest.mark.parametrize("task", PUBLISHED)
def test_every_file_that_glue_publishes_is_read(tmp_path, task):
    training, test, label = PUBLISHED[task]
    if task == "CoLA":  # source, label, the author's mark, sentence
        table = read(tmp_path, f'gj04\t{label}\t\tSays "no.\n', task)
        assert (table.texts, table.labels.tolist()) == ([('Says "no.',)], [1])
    for header, labelled in ((training, True), (test, False)):
        names = header.split("|" if "|" in header else " ")
        if not header:
            continue
        wanted = tuple(f"A \"{name}, it's" for name in names if name in OF_TEXT)
        cells = [f"A \"{name}, it's" if name in OF_TEXT else "7" for name in names]
        if labelled:
            cells[names.index(layout_of(task).label)] = label
        (tmp_path / "table.tsv").write_text(
            "\n".join(["\t".join(names), "\t".join(cells), "\t".join(cells)]) + "\n"
        )
        found = (tables.read if labelled else tables.read_texts)(
            tmp_path / "table.tsv", layout_of(task)
        )
        assert found.texts == [wanted] * 2
        if labelled:
            value = found.labels.tolist()[0]
            assert value == (
                pytest.approx(3.8)
                if task == "STS-B"
                else layout_of(task).labels.index(label)
            )


@pytest.mark.parametrize(("task", "num_texts", "text", "expected"), [
    ("SST-2", 0, "index\tsentence\n0\tfine film\n1\tbad\n", [("fine film",), ("bad",)]),
    ("SST-2", 0, "sentence\tlabel\nfine film\t1\nbad\t0\n", [("fine film",), ("bad",)]),
    ("CoLA", 0, "index\tsentence\n0\tThe cat sat.\n", [("The cat sat.",)]),
    ("MRPC", 0, "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n", [("a", "b")]),
    ("MNLI", 0, "sentence1\tgenre\tsentence2\na\tx\tb\n", [("a", "b")]),
    ("TSV", 1, "It is good.\nso so\n", [("It is good.",), ("so so",)]),
    ("TSV", 1, "sentence\nso so\n", [("so so",)]),
    ("TSV", 1, "good\tx\nbad\ty\n", [("good",), ("bad",)]),
    ("TSV", 1, "review\tlabel\ngood\tx\n", [("good",)]),
    ("TSV", 2, "A cat.\tb\nc\td\n", [("A cat.", "b"), ("c", "d")]),
    ("TSV", 0, "a\tx\nc\ty\n", [("a",), ("c",)]),
    ("TSV", 0, "A cat is here.\twhere is it\n", [("A cat is here.", "where is it")]),
    ("TSV", 1, "a\tx\nc\td\n", None),
    ("TSV", 2, "a\nc\n", None),
])  # fmt: skip
def test_a_table_without_labels_is_read_for_prediction(
    tmp_path, task, num_texts, text, expected
):
    (tmp_path / "table.tsv").write_text(text)
    layout = TASKS[task].layout or Layout(labels=("x", "y"))
    arguments = tmp_path / "table.tsv", layout, num_texts
    if expected is None:
        with refused(r"[12] of the columns|is it a header"):
            tables.read_texts(*arguments)
    else:
        assert tables.read_texts(*arguments).texts == expected


@pytest.mark.parametrize(("task", "text", "message"), [
    ("SST-2", "sentence\tlabel\nfine\t1\nbad\n", r"table.tsv:3: 1 columns, expected 2"),
    ("SST-2", "sentence\tlabel\nfine\t2\n", r"table.tsv:2: label '2', expected one of 0, 1"),
    ("SST-2", "sentence\tlabel\n", "has no examples"),
    ("MRPC", "Quality\ta\tb\t#1 String\t#2 String\n1\t2\t3\t4\n", r"table.tsv:2: 4 columns, expected 5"),
    ("MNLI", "sentence1\tsentence2\nx\ty\n", r"no column 'gold_label' \(it has sentence1, sentence2\)"),
    ("SST-2", "a\tb\tc\td\te\tf\tg\th\ti\tj\n" * 2, r"\(it has a, b, c, d, e, f, g, h, i, j\)"),
    ("SST-2", "a\tb\tc\td\te\tf\tg\th\ti\tj\tk\n" * 2, r"\(it has a, b, c, d, e, f, g, h, i, j, \.\.\.\)"),
    ("TSV", "good\n", "is it a header"),
    ("TSV", "a\tb\tc\tx\n" * 2, "one or two of the columns .* must be text"),
    ("TSV", "a\tx\na\tx\nb\tc\ty\n", r"table.tsv:3: 3 columns, expected 2"),
    ("TSV", "a\tx\nb\tx\n", "every label is 'x'"),
    ("TSV", b"caf\xe9\tx\n", "not UTF-8"),
    ("TSV", "text\tsentiment\n" + "good\tpos\nbad\tneg\n" * 2, r"table.tsv:1: is it a header\? text, sentiment"),
    ("TSV", "good\tx\nbad\t\n" * 2, r"table.tsv:2: label '', expected one of"),
    ("TSV", "\n".join(f"pos\ttext {i} of very many more" for i in range(18)), r"18 different labels in 18 lines .*\.\.\.\): the label is"),
    ("TSV", "sentence\tlabel\n", "has no examples"),
    ("SST-2", "fine\t1\nbad\t0\n", r"no column 'sentence' \(it has fine, 1\)"),
])  # fmt: skip
def test_a_wrong_table_is_one_line_that_names_the_place(tmp_path, task, text, message):
    with refused(message):
        read(tmp_path, text, task)


def test_a_missing_table_is_one_line(tmp_path):
    with refused("No such file"):
        tables.read(tmp_path / "none.tsv", layout_of("MRPC"))


TEXTS, LABELS = (
    ['A "fine" film, long.', "Two\nlines\tand a tab.", "Bad."],
    ["yes", "no", "yes"],
)


@pytest.mark.parametrize("kind", tables.KINDS)
def test_every_format_gives_the_named_columns(tmp_path, kind):
    """Written by the standard library and pandas; other columns are ignored."""
    pairs = zip(TEXTS, LABELS, strict=True)
    rows = [
        {"id": n, "stars": label, "review": text, "by": "x"}
        for n, (text, label) in enumerate(pairs)
    ]
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        pytest.importorskip("pandas").DataFrame(rows).to_csv(path, index=False)
    else:
        path.write_text(
            "id\tstars\treview\tby\n"
            + "".join(
                "\t".join(
                    str(cell).replace("\t", " ").replace("\n", " ")
                    for cell in row.values()
                )
                + "\n"
                for row in rows
            )
        )
    table = tables.read(path, Layout(texts=("review",), label="stars"))
    assert [" ".join(text.split()) for (text,) in table.texts] == [
        " ".join(text.split()) for text in TEXTS
    ]
    assert (table.names, table.labels.tolist(), table.columns) == (
        ("no", "yes"),
        [1, 0, 1],
        ("review",),
    )
    assert table.summary.endswith(
        "; 3 examples, text review, label stars: 2 classes: 2 yes, 1 no (66.67% the first)"
    )
    # Without an ending, as standard input.
    (tmp_path / "x").write_bytes(path.read_bytes())
    assert (
        tables.read(tmp_path / "x", Layout(texts=("review",), label="stars")).texts
        == table.texts
    )
    found = tables.read_texts(path, Layout(usual=("by", "review"), label="stars"), 2)
    assert [by for by, _ in found.texts] == ["x"] * 3


def test_labels_with_decimals_are_numbers_and_integers_are_classes_unless_set(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("text,label\na,1\nb,2.5\nc,-3\n")
    table = tables.read(path, Layout())
    assert (table.labels.tolist(), table.names) == ([1.0, 2.5, -3.0], ())
    assert table.summary.endswith(
        "; 3 examples, text text, label label: numbers from -3 to 2.5, mean 0.1667"
    )
    assert tables.read(path, Layout(numbers=False)).names == ("-3", "1", "2.5")
    path.write_text("text,label\na,1.0\nb,0.0\n")  # pandas, where one is missing
    assert tables.read(path, Layout()).names == ("0.0", "1.0")
    path.write_text("text,label\na,1\nb,2\n")
    assert tables.read(path, Layout()).names == ("1", "2")
    assert tables.read(path, Layout(numbers=True)).labels.tolist() == [1.0, 2.0]
    path.write_text("text,label\na,1.5\nb,nan\n")
    with refused(r"train.csv:3: label 'nan' is not a number"):
        tables.read(path, Layout(numbers=True))


@pytest.mark.parametrize(("name", "text", "message"), [
    ("x.csv", "review,stars\nfine,1\n", r"which of the columns review, stars is the label\? set LABEL_COLUMN"),
    ("x.csv", "a,b,c,label\n1,2,3,4\n", r"one or two of the columns a, b, c, label must be text: set TEXT_COLUMNS"),
    ("x.csv", "text,label\na,b,c\n", r"x.csv:2: 3 columns, expected 2"),
    ("x.csv", 'text,label\n"a,b\n', r"x.csv:\d: not CSV \(unexpected end of data\)"),
    ("x.jsonl", '{"text": "a", "label": 1}\n{"text"\n', r"x.jsonl:2: not JSONL"),
    ("x.jsonl", '{"text": "a", "label": 1}\n{"label": 2}\n', r"x.jsonl:2: no record with the text text"),
])  # fmt: skip
def test_what_cannot_be_inferred_from_the_file_is_asked_for(
    tmp_path, name, text, message
):
    (tmp_path / name).write_text(text)
    with refused(message) as caught:
        tables.read(tmp_path / name, Layout())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "other", ["train.tsv", "train.xlsx", "Train.CSV", "train.csv.zip", "train.parquet"]
)
def test_a_table_beside_another_of_its_name_is_not_guessed(tmp_path, other):
    for name in ("train.csv", other):
        (tmp_path / name).touch()
    with refused(r"train\..*: which one\?") as caught:
        tables.table_in(tmp_path, "train")
    assert other in str(caught.value)


def test_a_table_alone_is_read_whatever_its_name_ends_in_or_refused_by_what_it_is(
    tmp_path,
):
    (tmp_path / "Test.CSV").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "dev.csv").touch()
    path = tables.table_in(tmp_path, "test", "dev")
    assert tables.read(path, Layout()).texts == [("a",), ("b",)]
    (tmp_path / "train.xlsx").write_bytes(b"PK\3\4")
    with refused(r"train.xlsx: is an office document"):
        tables.read(tables.table_in(tmp_path, "train"), Layout())
    told = r"no dev_matched as .tsv, .csv, .jsonl .it has Test.CSV, dev.csv, train.xlsx"
    with refused(told):
        tables.table_in(tmp_path, "dev_matched")
