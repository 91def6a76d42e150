"""Tables of GLUE, and as spreadsheets, pandas and people write them, are read as meant, or refused
with what settles it.
"""

import gzip
import re

import pytest

from finetune import tables
from finetune.dialect import Reading
from finetune.glue import TASKS
from finetune.tables import Layout

from ..refused import refused
from .runs import write_tables


@pytest.mark.parametrize(("task", "text", "texts", "labels"), [
    ("MRPC", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
     '1\t7\t8\t"He said " so\tIt\'s "it\r\n0\t1\t2\ta\u2028b\tc\u0085d\r\n',
     [('"He said " so', "It's \"it"), ("a\u2028b", "c\u0085d")], [1, 0]),
    # Source, label, the author's mark, sentence.
    ("CoLA", 'gj04\t1\t\tSays "no.\ngj04\t0\t*\tcat The sat\n', [('Says "no.',), ("cat The sat",)], [1, 0]),
    ("SST-2", "sentence\tlabel\nit 's fine \t1\n\nno\t0\n", [("it 's fine ",), ("no",)], [1, 0]),
    # As datasets exports it.
    ("RTE", 'sentence1,sentence2,label\n"a, b",c,entailment\nd,e,not_entailment\n', [("a, b", "c"), ("d", "e")], [0, 1]),
])  # fmt: skip
def test_a_table_of_glue_keeps_its_marks_and_drops_its_header(
    tmp_path, task, text, texts, labels
):
    path = tmp_path / ("table.tsv" if "\t" in text else "table.csv")
    path.write_bytes(text.encode())
    table = tables.read(path, TASKS[task].layout)
    assert (table.texts, table.labels.tolist()) == (texts, labels)


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
OF_TEXT = re.compile(r"(sentence|question)[12]?|#[12] String")


@pytest.mark.parametrize("task", PUBLISHED)
def test_every_file_that_glue_publishes_is_read(tmp_path, task):
    training, test, label = PUBLISHED[task]
    layout = TASKS[task].layout
    for header, read in ((training, tables.read), (test, tables.read_texts)):
        names = header.split("|" if "|" in header else " ")
        cells = [f"A \"{n}, it's" if OF_TEXT.fullmatch(n) else "7" for n in names]
        wanted = tuple(cell for cell in cells if cell != "7")
        if not header:
            continue
        if read is tables.read:
            cells[names.index(layout.label)] = label
        rows = ["\t".join(row) for row in (names, cells, cells)]
        write_tables(tmp_path, rows, ["table.tsv"])
        found = read(tmp_path / "table.tsv", layout)
        assert found.texts == [wanted] * 2
        if read is tables.read:
            known = layout.labels.index(label) if layout.labels else 3.8
            assert found.labels.tolist() == pytest.approx([known] * 2)


@pytest.mark.parametrize("header", ["", "review\tLabel\n"])
def test_classes_are_numbered_by_name_with_or_without_a_header(tmp_path, header):
    path = tmp_path / "table.tsv"
    path.write_text(header + 2 * "good\tpos\nbad\tneg\nso so\tneutral\n")
    table = tables.read(path, Layout())
    assert table.texts == [("good",), ("bad",), ("so so",)] * 2
    assert table.names == ("neg", "neutral", "pos")
    assert table.labels.tolist() == [2, 0, 1] * 2
    said = "header review, Label" if header else "no header"
    assert table.summary.startswith(f"table.tsv: separator tab, {said}; 6 examples")


def read_as(**reading):
    return Layout(reading=Reading(**reading))


SST, MRPC = TASKS["SST-2"].layout, TASKS["MRPC"].layout
MANY = "\n".join(f"pos\ttext {i} of very many more" for i in range(18)).encode()
SIX = b"pos,so good,a\nneg,so bad,b\npos,well,c\n"
# What is in the file -> the texts that training reads from it, or what is said; a layout, if any.
# A first word tsv, csv or jsonl ends the file's name.
TRAINING = {
    "semicolons and decimal commas": (b"text;price;label\na;1,50;x\nb;2,30;y\n", [("a",), ("b",)]),
    "semicolons, commas in nearly all rows": (b"text;label\n" + b"a, b;x\nc, d;y\n" * 20 + b"e;x\n", [("a, b",), ("c, d",)] * 20 + [("e",)]),
    "UTF-16 without a mark": ("text,label\na,x\nb,y\n".encode("utf-16-be"), "NUL .*set ENCODING=utf-16be"),
    "UTF-16 without a mark, of other letters": ("文,标签\n好,正\n".encode("utf-16-le"), "NUL .*set ENCODING=utf-16le"),
    "Latin-1": ("text,label\na,x\ncafé,y\n".encode("latin-1"), r"line 3 is not UTF-8: set ENCODING .predict: --encoding., such as cp1252 .*: 'café,y'"),
    "two encodings": ("text,label\ncafé,x\n".encode() + "naïve,y\n".encode("latin-1"), "line 3 is not UTF-8, line 2 is: two encodings"),
    "a web page in UTF-16": ("<html>a,b".encode("utf-16"), "is a web page"),
    "PDF": (b"%PDF-1.4\n%\xe2\xe3\n", "is PDF: save the table as CSV"),
    "xz": (b"\xfd7zXZ\0\1", "is xz: unpack it"),
    "a pickle": (b"\x80\x04\x95abc", "is a pickle of Python: write it with"),
    "Excel's line on top": (b"sep=;\ntext;label\na;x\nb;y\n", "Excel's line sep=: remove that line"),
    "a NUL": (b"text,label\na\0b,x\nb,y\n", ":2: has a NUL character"),
    "a quote that does not close": (b'text,label\na,x\n"b,y\nc,x\n', r":3: not CSV .*: double the quotation marks"),
    "the same with the separator given": (b'"abc, 1\nd,2\n', r":1: not CSV .*: double the quotation marks", read_as(separator=",")),
    "pandas' index": (b",text,label\n0,a,x\n1,b,y\n", [("a",), ("b",)]),
    "pandas' index, read and written again": (b"Unnamed: 0,text,label\n0,a,x\n1,b,y\n", [("a",), ("b",)]),
    "a column of numbers": (b"price,text,label\n3,a,x\n4,b,y\n", [("a",), ("b",)]),
    "two columns of one name": (b"text,text,label\na,b,x\nc,d,y\n", "two columns are called 'text'"),
    "an empty label": (b"text,label\na,x\nb,\nc,y\nd,\n", r":3: label '', expected one of x, y .*lines 3, 5"),
    "an empty label without a header": (b"good\tx\nbad\t\n" * 2, r":2: label '', expected one of"),
    "a label NaN": (b"text,label\na,x\nb,NaN\nc,y\n", ":3: label 'NaN', expected one of x, y"),
    "a label NA": (b"text,label\na,x\nb,NA\nc,y\nd,#N/A\n", ":3: label 'NA', expected one of x, y .*lines 3, 5"),
    "a label None": (b"text,label\na,x\nb,None\nc,y\n", ":3: label 'None', expected one of x, y"),
    "a label of a database": (b"text,label\na,x\nb,\\N\nc,y\n", r":3: label .*expected one of x, y"),
    "a label null": (b'{"text": "a", "label": "x"}\n{"text": "b", "label": null}\n{"text": "c", "label": "y"}\n', ":2: label 'null'"),
    "a target NaN": (b'{"text": "a", "label": 1.5}\n{"text": "b", "label": NaN}\n', ":2: label 'NaN' is not a number"),
    "targets with decimal commas": (b"text;label\na;1,5\nb;2,5\n", r":2: label '1,5' is not a number .*lines 2, 3.: write it with a decimal point"),
    "targets as German Excel writes them": (b"text;label\na;1,5\nb;2\nc;2,5\nd;3\n", r":2: label '1,5' is not a number .*lines 2, 4"),
    "a target with its unit": (b"text,label\na,1.5\nb,2\nc,2.5 stars\nd,-\n" + b"e,2.5\n", r":4: label '2.5 stars' is not a number .*lines 4, 5.* REGRESSION=0"),
    "a target with a long minus": ("text,label\na,−1.5\nb,2.5\n".encode(), ":2: label '−1.5' is not a number"),
    "a target beyond 32 bits": (b"text,label\na,1.5\nb,1e300\n", ":3: label '1e300' is not a number up to 3e.38"),
    "classes that mention numbers": (b"text,label\na,2.5 stars\nb,none\n", [("a",), ("b",)]),
    "a label in two cases": (b"text,label\na,TRUE\nb,FALSE\nc,True\n", ":4: label 'True', in other lines 'TRUE': write it in one way"),
    "a number in two spellings": (b"text,label\na,1\nb,0\nc,1.0\n", ":4: label '1.0', in other lines '1'"),
    "one label": (b"a\tx\nb\tx\n", "every label is 'x'"),
    "a text as the label": (MANY, r"18 different labels in 18 lines .*\.\.\.\): the label is"),
    "prices of which one is missing": (b"price,text,label\n3,a,x\n,b,y\nn/a,c,x\n", [("a",), ("b",), ("c",)]),
    "German dates": (b"datum;text;label\n01.02.2026;a;x\n02.02.2026;b;y\n", [("a",), ("b",)]),
    "several labels": (b'{"text": "a", "label": ["x", "y"]}\n', [("a",)]),
    "an empty text": (b"text,label\na,x\n,y\n", "no text in lines 3: remove"),
    "a text null": (b'{"text": "a", "label": "x"}\n{"text": null, "label": "y"}\n', "no text in lines 2"),
    "no header, a label of a model": (b"good\tpos\n", [("good",)], Layout(labels=("neg", "pos"))),
    "no header, labels that recur": (b"good,x\nbad,y\nso so,x\n", [("good",), ("bad",), ("so so",)]),
    "a class called label": (b"a\tlabel\nb\tx\nc\tlabel\n", [("b",), ("c",)]),
    "no header, a long first text": (b"This is a rather good film,x\nbad,y\n", [("This is a rather good film",), ("bad",)]),
    "no header, a pair of texts": (b"A man is here.\ta cat sleeps\tyes\na dog runs\ta dog ran\tno\ne\tf\tyes", [("A man is here.", "a cat sleeps"), ("a dog runs", "a dog ran"), ("e", "f")]),
    "no header, numbers in front": (b"1,good,x\n2,bad,y\n", [("good",), ("bad",)]),
    "no header, columns by number": (SIX, [("so good",), ("so bad",), ("well",)], Layout(texts=("column_2",), label="column_1", reading=Reading(no_header=True))),
    "no header, and a name": (SIX, r"no column 'stars' .it has column_1", Layout(label="stars", reading=Reading(no_header=True))),
    "a header in doubt": (b"review,mood\ngood,x\nbad,y\n", r":1: is it a header\? review, mood"),
    "a survey's question as header": (b"What did you think of our product?,sentiment\nGood.,x\nBad.,y\nFine.,x\nNo.,y\n", ":1: is it a header"),
    "a header alone": (b"sentence\tlabel\n", "has no examples"),
    "a header like the first bytes of Parquet": (b"par1,label\na,x\nb,y\n", [("a",), ("b",)]),
    "TSV with speech over two rows": (b'text\tlabel\n"So good.\tx\nSo bad."\ty\n', [('"So good.',), ('So bad."',)]),
    "TSV that has commas for tabs": (b"text,label\na,x\nb,y\n", "is the separator tab or ','?"),
    "TSV with old Macintosh line ends": (b"text\tlabel\ra\tx\rb\ty\r", [("a",), ("b",)]),
    "TSV with a row of tabs": (b"text\tlabel\na\tx\n\t\nb\ty\n", "no text in lines 3"),
    "TSV of GLUE with a cell too few": (b"sentence\tlabel\nfine\t1\nbad\n", ":3: 1 columns, expected 2", SST),
    "TSV of GLUE with two cells too few": (b"Quality\ta\tb\t#1 String\t#2 String\n1\t2\t3\t4\n", ":2: 4 columns, expected 5", MRPC),
    "TSV of GLUE with another label": (b"sentence\tlabel\nfine\t2\n", ":2: label '2', expected one of 0, 1", SST),
    "TSV of GLUE without its header": (b"fine\t1\nbad\t0\n", r"no column 'sentence' \(it has fine, 1\)", SST),
    "TSV of another task": (b"sentence1\tsentence2\nx\ty\n", r"no column 'gold_label' \(it has sentence1, sentence2\)", TASKS["MNLI"].layout),
    "TSV of ten columns": (b"a\tb\tc\td\te\tf\tg\th\ti\tj\n" * 2, r"\(it has a, b, c, d, e, f, g, h, i, j\)", SST),
    "TSV of eleven columns": (b"a\tb\tc\td\te\tf\tg\th\ti\tj\tk\n" * 2, r"\(it has a, b, c, d, e, f, g, h, i, j, \.\.\.\)", SST),
    "the label's name beside it": (b"text,label,label_text\na,0,x\nb,1,y\n", [("a",), ("b",)]),
    "a column of other labels": (b"gold_label,text,label\nx,a,0\ny,b,1\n", [("a",), ("b",)]),
    "the label in another column": (b"text,question,label\na,good,0\nb,bad,1\nc,good,0\n", "column 'question' says the same as the label: set TEXT_COLUMNS"),
    "the label as a text": (b"text,label\na,x\nb,y\n", "column 'label' is the label, not a text", Layout(texts=("text", "label"), label="label")),
    "two labels": (b"text,Label,label\na,1,x\nb,2,y\n", "which of the columns text, Label, label is the label"),
    "no label": (b"review,stars\nfine,1\n", r"which of the columns review, stars is the label\? set LABEL_COLUMN"),
    "numbers alone": (b"a,b,c,label\n1,2,3,4\n", "one or two of the columns a, b, c, label must be text: set TEXT_COLUMNS"),
    "CSV of labels with a 2": (b"text,x,y\na,1,0\nb,2,0\n", ":3: label '2' in column x, expected 0 or 1", Layout(label="x,y")),
    "CSV of labels with an empty cell": (b"text,x,y\na,1,\nb,0,0\n", ":2: label '' in column y, expected 0 or 1", Layout(label="x,y")),
    "CSV of labels without one": (b"text,x\na,1\nb,0\n", "no column 'y'", Layout(label="x,y")),
    "CSV of several labels in two cases": (b"text,label\na,x|X\n", ":2: label 'X', in other lines 'x'", Layout(label_mark="|")),
    "CSV of several labels and NaN": (b"text,label\na,x|y\nb,NaN\n", ":3: label 'NaN', expected one of x, y", Layout(label_mark="|")),
    "CSV of several labels and another": (b"text,label\na,x|q\n", ":2: label 'q'", Layout(label_mark="|", labels=("x", "y"), several=True)),
    "CSV of several labels, a model of one": (b"text,label\na,x|y\n", ":2: several labels, and the model", Layout(label_mark="|", labels=("x", "y"))),
    "CSV of label columns, a model of one": (b"text,x,y\na,1,0\n", ":2: several labels, and the model", Layout(label="x,y", labels=("x", "y"))),
    "CSV of several numbers": (b"text,label\na,1|2\n", "several labels, and the model or REGRESSION=1", Layout(label_mark="|", numbers=True)),
    "CSV of one label, or none": (b"text,label\na,x|x\nb,\n", "every label is 'x'", Layout(label_mark="|")),
    "a separator at each end": (b"text,label,\na,x,\nb,y,\n", [("a",), ("b",)]),
    "a row with a cell too many": (b"text,label\na,x\nb,c,y\nd,x\n", ":3: 3 columns, expected 2 with the separator ',': quote"),
    "two separators": (b"1,50;good\n2,30;bad\n", "is the separator ',' or ';'.*SEPARATOR"),
    "nothing": (b"\n \n", "has no examples"),
    "old Macintosh line ends": (b"text,label\ra,x\rb,y\r", [("a",), ("b",)]),
    "UTF-32 with its mark": ("text,label\nä,x\nb,y\n".encode("utf-32"), [("ä",), ("b",)]),
    "UTF-16 that is cut off": ("text,label\nä,x\nb,y\n".encode("utf-16")[:-1], "is not UTF-16: write it again"),
    "CSV that holds JSON Lines": (b'{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n', [("a",), ("b",)]),
    "CSV that holds a JSON list": (b'[{"text": "a", "label": "x"},\n{"text": "b", "label": "y"}]\n', "is one JSON list: write an object per line"),
    "CSV that holds a web page": (b"\n<!DOCTYPE html>\n<p>a, x</p>\n", "is a web page"),
    "a key twice": (b'{"text": "a", "text": "b", "label": "x"}\n', ":1: not JSONL .two values of 'text'"),
    "half a character": (b'{"text": "a \\ud83d", "label": "x"}\n', ":1: not JSONL .*surrogates not allowed"),
    "JSONL of numbers": (b"1\n2\n", ":1: not JSONL .no object"),
    "JSONL nested without end": (b'{"text": "a", "label": ' + b"[" * 100_000 + b"\n", ":1: not JSONL"),
    "JSONL without a text": (b'{"text": "a", "label": 1}\n{"label": 2}\n', ":2: no record with the text text"),
    "a broken record": (b'{"text": "a", "label": "x"}\n{"text": \n', ":2: not JSONL"),
    "an old Excel workbook": (b"\xd0\xcf\x11\xe0rest", "is an old office document .Excel, Word.: save the table as CSV"),
    "an Excel workbook": (b"PK\x03\x04rest", "is an office document .Excel, Word. or a zip archive: save the sheet as CSV .UTF-8., or unpack it"),
    "Parquet": (b"PAR1rest", "is Parquet: write it with"),
    "zstd": (b"\x28\xb5\x2f\xfdrest", "is zstd: unpack it"),
    "bzip2": (b"BZh9rest", "is bzip2: unpack it"),
    "gzip": (gzip.compress(b"text,label\na,x\nb,y\n"), [("a",), ("b",)]),
    "gzip in gzip": (gzip.compress(gzip.compress(b"text,label\na,x\nb,y\n")), "is gzip within gzip: unpack it"),
    "gzip that is cut off": (gzip.compress(b"text,label\na,x\nb,y\n" * 99)[:-20], "is gzip and cannot be unpacked"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_an_odd_table_is_read_as_meant_or_refused(tmp_path, name):
    content, expected, layout = (*TRAINING[name], Layout())[:3]
    kind = name.split()[0].lower()
    path = tmp_path / (f"train.{kind}" if kind in tables.KINDS else "train")
    path.write_bytes(content)
    if isinstance(expected, list):
        table = tables.read(path, layout)
        assert table.texts == expected
        assert len(set(table.names)) == 2
    else:
        with refused(expected) as caught:
            tables.read(path, layout)
        assert "\n" not in str(caught.value)


FINE = 'A "fine" film,'
FORMATS = {
    "csv": 'id,stars,review,by\n0,yes,"A ""fine"" film,",x\n1,no,"Two\n\tlines",x\n2,yes,Bad.,x\n',
    "tsv": f"id\tstars\treview\tby\n0\tyes\t{FINE}\tx\n1\tno\tTwo\tx\n2\tyes\tBad.\tx\n",
    "jsonl": '{"stars": "yes", "review": "A \\"fine\\" film,", "by": "x"}\n'
    '{"stars": "no", "review": "Two\\n\\tlines", "by": "x"}\n'
    '{"stars": "yes", "review": "Bad.", "by": "x"}\n',
}


@pytest.mark.parametrize("kind", tables.KINDS)
def test_every_format_gives_the_named_columns(tmp_path, kind):
    for name in (f"train.{kind}", "without an ending, as standard input"):
        path = tmp_path / name
        path.write_text(FORMATS[kind])
        table = tables.read(path, Layout(texts=("review",), label="stars"))
        two = "Two" if kind == "tsv" else "Two\n\tlines"
        assert table.texts == [(FINE,), (two,), ("Bad.",)]
        assert (table.names, table.columns) == (("no", "yes"), ("review",))
        assert table.labels.tolist() == [1, 0, 1]
        told = "; 3 examples, text review, label stars: 2 classes: 2 yes, 1 no (66.67% the first)"
        assert table.summary.endswith(told)
        known = Layout(usual=("by", "review"), label="stars")
        found = tables.read_texts(path, known, 2)
        assert [by for by, _ in found.texts] == ["x"] * 3


@pytest.mark.parametrize(("rows", "numbers", "names", "labels"), [
    ("a,1\nb,2.5\nc,-3\n", None, (), [1.0, 2.5, -3.0]),
    ("a,1\nb,2.5\nc,-3\n", False, ("-3", "1", "2.5"), [1, 2, 0]),
    ("a,1.0\nb,0.0\n", None, ("0.0", "1.0"), [1, 0]),  # pandas, where one is missing
    ("a,1\nb,2\n", None, ("1", "2"), [0, 1]),
    ("a,1\nb,2\n", True, (), [1.0, 2.0]),
])  # fmt: skip
def test_labels_with_decimals_are_numbers_and_integers_are_classes_unless_set(
    tmp_path, rows, numbers, names, labels
):
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    table = tables.read(tmp_path / "train.csv", Layout(numbers=numbers))
    assert (table.names, table.labels.tolist()) == (names, labels)


@pytest.mark.parametrize(
    "other", ["train.tsv", "train.xlsx", "Train.CSV", "train.csv.zip", "train.parquet"]
)
def test_a_table_beside_another_of_its_name_is_not_guessed(tmp_path, other):
    for name in ("train.csv", other):
        (tmp_path / name).touch()
    with refused(r"train\..*: which one\?") as caught:
        tables.table_in(tmp_path, "train")
    assert other in str(caught.value)


def test_a_table_alone_is_found_whatever_its_name_ends_in(tmp_path):
    for name in ("Test.CSV", "dev.csv", "train.xlsx"):
        (tmp_path / name).touch()
    assert tables.table_in(tmp_path, "test", "dev").name == "Test.CSV"
    assert tables.table_in(tmp_path, "train").name == "train.xlsx"
    told = r"no dev_matched as .tsv, .csv, .jsonl .it has Test.CSV, dev.csv, train.xlsx"
    with refused(told):
        tables.table_in(tmp_path, "dev_matched")
    with refused("No such file"):
        tables.read(tmp_path / "none.tsv", Layout())


PAIRS = {
    "MRPC": [("He said the foodservice pie business doesn 't fit.", "The foodservice pie business does not fit."),
             ("Magnarelli said Racicot hated the regime.", "His wife said he was devoted to his work.")],
    "QNLI": [("When did it end?", "It ended in 1648, after thirty years."), ("Who won?", "Nobody won the long war.")],
    "STS-B": [("A plane is taking off.", "An air plane is taking off."), ("A man is playing.", "A man plays a flute.")],
    "short questions": [("How old is he?", "What is his age?"), ("Who are you?", "Where is it?"), ("Why?", "Why not?")],
    "Chinese": [("花呗如何还款", "花呗怎么还款的"), ("我的手机号换了", "换手机号怎么办")],
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("header", ["premise\thypothesis\tlabel", ""])
def test_a_pair_of_sentences_is_read_without_being_named(tmp_path, name, header):
    rows = ["\t".join([*pair, str(n % 2)]) for n, pair in enumerate(PAIRS[name])]
    write_tables(tmp_path, [header, *rows] if header else rows, ["train.tsv"])
    layout = read_as(no_header=not header)
    assert tables.read(tmp_path / "train.tsv", layout).texts == PAIRS[name]


# A column that is no text, beside one that is.
BESIDE = {
    "uuid": ["f3a-1", "bc2-7", "c33-9"],
    "date": ["2020-01-01", "12 May 2020", "2021-02-02"],
    "url": ["http://a/b-c-d", "http://b", "http://c"],
    "split": ["train"] * 3,
    "price": ["1.50 EUR", "2.30 EUR", "9"],
    "verified": ["True", "False", "True"],
    "author": ["Anna M. Smith", "Al Bo", "Anna Smith"],
    "notes": ["", "", ""],
    "category": ["Home and Garden"] * 3,
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_identifier_a_date_or_a_category_is_no_text_of_a_pair(tmp_path, name):
    texts = ["a fine old film", "a bad old film", "well it was so so"] * 7
    cells = zip(BESIDE[name] * 7, texts, "xyy" * 7, strict=True)
    rows = [",".join(row) for row in cells]
    write_tables(tmp_path, [f"{name},review,label", *rows], ["train.csv"])
    told = f"columns {name}, review a pair of texts. set TEXT_COLUMNS=review or "
    with refused(told):
        tables.read(tmp_path / "train.csv", Layout())
    # Also where the names are given that a file without a header gets.
    write_tables(tmp_path, rows, ["train.csv"])
    found = tables.read(tmp_path / "train.csv", Layout(texts=("column_2",)))
    assert found.texts == [(text,) for text in texts]


@pytest.mark.parametrize(("name", "content", "told"), [
    ("a.csv", 'text,label\n"So good.,x\nSo bad.",y\nwell,x\n', "rows of several lines: 1"),
    ("a.tsv", "text\tlabel\na\tx\n\t\n\nb\ty\n\n", "blank lines left out: 1"),
    ("a.csv", "text\na\n\nb\n", "a text per line, header text"),
])  # fmt: skip
def test_rows_joined_and_lines_left_out_are_counted(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    rows = tables.Rows(tmp_path / name, Layout(), labelled=False)
    assert len([*rows]) == 3 - ("several" in told)
    assert told in rows.describe()


# Of a model: its columns and labels.
TRAINED = Layout(usual=("text",), label="stars", labels=("neg", "pos"))
KNOWN = Layout(labels=("x", "y"))
SPEECH = '"So good.\nSo bad."\nwell\n'
# Of a model: its columns, labels and number of texts. What is in the file -> the texts, or what is
# said.
PREDICTION = {
    "no header": (TRAINED, 1, "It is good.\nsemi;colon, and comma\nso so\n", r"set SEPARATOR \(tab, or none"),
    "no header, a text per line": (read_as(separator="none"), 1, "It is good.\nsemi;colon, and comma\nso so\n", ["It is good.", "semi;colon, and comma", "so so"]),
    "the model's column among others": (TRAINED, 1, "id,text,price\n1,a,2\n2,b,3\n", ["a", "b"]),
    "numbers of which the first is missing": (KNOWN, 1, ",This is a good film.\n1,bad\n2,good\n", ["This is a good film.", "bad", "good"]),
    "numbers of which the first is n/a": (KNOWN, 1, "n/a,This is a good film.\n1,bad\n,good\n", ["This is a good film.", "bad", "good"]),
    "numbers of which the first is marked": (KNOWN, 1, "#1,This is a good film.\n2,bad\n3,good\n", "1 of the columns #1"),
    "numbers below a word and a sentence": (KNOWN, 1, "none,This is a good film.\n2,bad\n3,good\n", "is it a header"),
    "numbers below pandas' name": (KNOWN, 1, "Unnamed: 0,review\n0,bad\n1,so\n", ["bad", "so"]),
    "numbers beside a survey's question": (KNOWN, 1, "id,What did you like about it?\n1,The food.\n2,Nothing.\n", ["The food.", "Nothing."]),
    "numbers without a name": (KNOWN, 1, ",review\n0,bad\n1,good\n", "is it a header"),
    "another single column": (TRAINED, 1, "id,price\n1,2\n2,3\n", "no column 'text', which the model was trained on"),
    "another name": (TRAINED, 1, "id;review\n1;A good thing\n", "no column 'text', which the model was trained on"),
    "a title above the header": (TRAINED, 1, "My reviews\n\nid,text\n1,a\n2,b\n", "quote the cell"),
    "labels with it": (TRAINED, 1, "text,stars\na,pos\nb,neg\n", ["a", "b"]),
    "labels last, without a header": (TRAINED, 1, "so good,pos\nso bad,neg\n", ["so good", "so bad"]),
    "a survey's question as header": (Layout(), 1, "What did you like?\nThe food.\nNothing.\n", "is it a header"),
    "an index without a header": (TRAINED, 1, "0,so good,\n1,so bad,\n", "1 of the columns 0, so good,  must be text"),
    "the label as a text": (Layout(texts=("stars",), label="stars"), 1, "text,stars\na,x\n", "column 'stars' is the label"),
    "a training file of GLUE": (SST, 0, "sentence\tlabel\nfine film\t1\nbad\t0\n", ["fine film", "bad"]),
    "other columns of GLUE": (TASKS["MNLI"].layout, 0, "sentence1\tgenre\tsentence2\na\tx\tb\n", ["a | b"]),
    "texts alone": (KNOWN, 1, "It is good.\nso so\n", ["It is good.", "so so"]),
    "texts below a usual name": (KNOWN, 1, "sentence\nso so\n", ["so so"]),
    "known labels": (KNOWN, 1, "good\tx\nbad\ty\n", ["good", "bad"]),
    "known labels, any number of texts": (KNOWN, 0, "a\tx\nc\ty\n", ["a", "c"]),
    "labels below a usual name": (KNOWN, 1, "review\tlabel\ngood\tx\n", ["good"]),
    "a pair": (KNOWN, 2, "A cat.\tb\nc\td\n", ["A cat. | b", "c | d"]),
    "a pair of sentences": (KNOWN, 0, "A cat is here.\twhere is it\n", ["A cat is here. | where is it"]),
    "a pair for a model of one text": (KNOWN, 1, "a\tx\nc\td\n", "1 of the columns|is it a header"),
    "one text for a model of pairs": (KNOWN, 2, "a\nc\n", "2 of the columns|is it a header"),
    "numbered columns of training": (Layout(usual=("column_2",), label="column_1", reading=Reading(no_header=True)), 1, SIX.decode(), ["so good", "so bad", "well"]),
    "no header is said": (read_as(no_header=True), 1, "review\nso so\n", ["review", "so so"]),
    "the text is named": (Layout(texts=("review",)), 1, "review\nso so\n", ["so so"]),
    "the separator is said": (read_as(separator=";", no_header=True), 1, "1,50;good\n2,30;bad\n", ["good", "bad"]),
    "no separator is said": (read_as(separator="none"), 1, "text\nHello, you\nWell\n", ["Hello, you", "Well"]),
    "a word as separator": (read_as(separator="comma"), 1, "text\na\n", "expected one character, tab or none"),
    "speech over two lines": (read_as(no_header=True), 1, SPEECH, ":1: quotation marks enclose several lines"),
    "speech over two lines, in a cell": (read_as(no_header=True, separator=","), 1, SPEECH, ["So good.\nSo bad.", "well"]),
    "speech over two lines, two texts": (read_as(no_header=True, separator="none"), 1, SPEECH, ['"So good.', 'So bad."', "well"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTION)
def test_an_odd_file_to_predict_gives_each_row_or_is_refused(tmp_path, name):
    layout, num_texts, content, expected = PREDICTION[name]
    path = tmp_path / ("new.tsv" if "\t" in content else "new.csv")
    path.write_text(content)
    if isinstance(expected, list):
        found = tables.read_texts(path, layout, num_texts)
        assert [" | ".join(texts) for texts in found.texts] == expected
    else:
        with refused(expected):
            tables.read_texts(path, layout, num_texts)
