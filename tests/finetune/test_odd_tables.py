"""Tables as spreadsheets, pandas and people write them are read as meant, or refused with what
settles it.
"""

from __future__ import annotations

import gzip

import pytest

from finetune import tables
from finetune.dialect import Reading
from finetune.tables import Layout

from ..refused import refused

# Of a model: its columns and labels.
TRAINED = Layout(usual=("text",), label="stars", labels=("neg", "pos"))
FINE, BAD = "A fine film, long.", "Bad; very bad."


def labelled(text: str, sep: str = ",") -> str:
    return text.replace("|", sep)


# What is in the file -> the texts that training reads from it, or what is said.
TRAINING = {
    "semicolons": (b"text;label\nA, b and c;x\nD, e;y\n", [("A, b and c",), ("D, e",)]),
    "semicolons and decimal commas": (b"text;price;label\na;1,50;x\nb;2,30;y\n", [("a",), ("b",)]),
    "bars": (b"text|label\na, b|x\nc; d|y\n", [("a, b",), ("c; d",)]),
    "a byte-order mark": (b"\xef\xbb\xbftext,label\na,x\nb,y\n", [("a",), ("b",)]),
    "UTF-16 with its mark": ("text,label\nä,x\nb,y\n".encode("utf-16"), [("ä",), ("b",)]),
    "UTF-16 without a mark": ("text,label\na,x\nb,y\n".encode("utf-16-be"), "NUL .*set ENCODING=utf-16be"),
    "Latin-1": ("text,label\na,x\ncafé,y\n".encode("latin-1"), r"line 3 is not UTF-8: set ENCODING .predict: --encoding., such as cp1252 .Windows in Western Europe: 'café,y'"),
    "two encodings": ("text,label\ncafé,x\n".encode() + "naïve,y\n".encode("latin-1"), "line 3 is not UTF-8, line 2 is: two encodings"),
    "UTF-16 without a mark, of other letters": ("文,标签\n好,正\n".encode("utf-16-le"), "NUL .*set ENCODING=utf-16le"),
    "a web page in UTF-16": ("<html>a,b".encode("utf-16"), "is a web page"),
    "PDF": (b"%PDF-1.4\n%\xe2\xe3\n", "is PDF: save the table as CSV"),
    "xz": (b"\xfd7zXZ\0\1", "is xz: unpack it"),
    "a pickle": (b"\x80\x04\x95abc", "is a pickle of Python: write it with"),
    "Excel's line on top": (b"sep=;\ntext;label\na;x\nb;y\n", "Excel's line sep=: remove that line"),
    "a NUL": (b"text,label\na\0b,x\nb,y\n", ":2: has a NUL character"),
    "quotes and newlines in cells": (b'text,label\n"A ""fine"",\nfilm",x\nb,y\n', [('A "fine",\nfilm',), ("b",)]),
    "a quote that does not close": (b'text,label\na,x\n"b,y\nc,x\n', r":3: not CSV .*: double the quotation marks"),
    "TSV as pandas quotes it": (b'text\tlabel\n"A ""fine""\tfilm"\tx\nb\ty\n', [('A "fine"\tfilm',), ("b",)]),
    "TSV with quotes as text": (b'text\tlabel\n"A" fine film\tx\nsay "b\ty\n', [('"A" fine film',), ('say "b',)]),
    "pandas' index": (b",text,label\n0,a,x\n1,b,y\n", [("a",), ("b",)]),
    "pandas' index, read and written again": (b"Unnamed: 0,text,label\n0,a,x\n1,b,y\n", [("a",), ("b",)]),
    "a column of numbers": (b"price,text,label\n3,a,x\n4,b,y\n", [("a",), ("b",)]),
    "two columns of one name": (b"text,text,label\na,b,x\nc,d,y\n", "two columns are called 'text'"),
    "an empty label": (b"text,label\na,x\nb,\nc,y\nd,\n", r":3: label '', expected one of x, y .*lines 3, 5"),
    "a label NaN": (b"text,label\na,x\nb,NaN\nc,y\n", ":3: label 'NaN', expected one of x, y"),
    "a label null": (b'{"text": "a", "label": "x"}\n{"text": "b", "label": null}\n{"text": "c", "label": "y"}\n', ":2: label 'null'"),
    "a target NaN": (b'{"text": "a", "label": 1.5}\n{"text": "b", "label": NaN}\n', ":2: label 'NaN' is not a number"),
    "targets with decimal commas": (b"text;label\na;1,5\nb;2,5\n", r":2: label '1,5' is not a number .*lines 2, 3.: write it with a decimal point"),
    "targets as German Excel writes them": (b"text;label\na;1,5\nb;2\nc;2,5\nd;3\n", r":2: label '1,5' is not a number .*lines 2, 4"),
    "a target with its unit": (b"text,label\na,1.5\nb,2\nc,2.5 stars\nd,-\n" + b"e,2.5\n", r":4: label '2.5 stars' is not a number .*lines 4, 5.* REGRESSION=0"),
    "a target with a long minus": ("text,label\na,−1.5\nb,2.5\n".encode(), ":2: label '−1.5' is not a number"),
    "classes that mention numbers": (b"text,label\na,2.5 stars\nb,none\n", [("a",), ("b",)]),
    "a label in two cases": (b"text,label\na,TRUE\nb,FALSE\nc,True\n", ":4: label 'True', in other lines 'TRUE': write it in one way"),
    "prices of which one is missing": (b"price,text,label\n3,a,x\n,b,y\nn/a,c,x\n", [("a",), ("b",), ("c",)]),
    "German dates": (b"datum;text;label\n01.02.2026;a;x\n02.02.2026;b;y\n", [("a",), ("b",)]),
    "several labels": (b'{"text": "a", "label": ["x", "y"]}\n', [("a",)]),
    "an empty text": (b"text,label\na,x\n,y\n", "no text in lines 3: remove"),
    "a text null": (b'{"text": "a", "label": "x"}\n{"text": null, "label": "y"}\n', "no text in lines 2"),
    "no header, labels that recur": (b"good,x\nbad,y\nso so,x\n", [("good",), ("bad",), ("so so",)]),
    "no header, a long first text": (b"This is a rather good film,x\nbad,y\n", [("This is a rather good film",), ("bad",)]),
    "no header, numbers in front": (b"1,good,x\n2,bad,y\n", [("good",), ("bad",)]),
    "a header in doubt": (b"review,mood\ngood,x\nbad,y\n" * 1, ":1: is it a header"),
    "TSV with speech over two rows": (b'text\tlabel\n"So good.\tx\nSo bad."\ty\n', [('"So good.',), ('So bad."',)]),
    "a header like the first bytes of Parquet": (b"par1,label\na,x\nb,y\n", [("a",), ("b",)]),
    "TSV that has commas for tabs": (b"text,label\na,x\nb,y\n", "is the separator tab or ','?"),
    "TSV with old Macintosh line ends": (b"text\tlabel\ra\tx\rb\ty\r", [("a",), ("b",)]),
    "the label's name beside it": (b"text,label,label_text\na,0,x\nb,1,y\n", [("a",), ("b",)]),
    "a column of other labels": (b"gold_label,text,label\nx,a,0\ny,b,1\n", [("a",), ("b",)]),
    "the label in another column": (b"text,question,label\na,good,0\nb,bad,1\nc,good,0\n", "column 'question' says the same as the label: set TEXT_COLUMNS"),
    "a survey's question as header": (b"What did you think of our product?,sentiment\nGood.,x\nBad.,y\nFine.,x\nNo.,y\n", ":1: is it a header"),
    "a number in two spellings": (b"text,label\na,1\nb,0\nc,1.0\n", ":4: label '1.0', in other lines '1'"),
    "a label NA": (b"text,label\na,x\nb,NA\nc,y\nd,#N/A\n", ":3: label 'NA', expected one of x, y .*lines 3, 5"),
    "a target beyond 32 bits": (b"text,label\na,1.5\nb,1e300\n", ":3: label '1e300' is not a number up to 3e.38"),
    "TSV with a row of tabs": (b"text\tlabel\na\tx\n\t\nb\ty\n", "no text in lines 3"),
    "JSONL nested without end": (b'{"text": "a", "label": ' + b"[" * 100_000 + b"\n", ":1: not JSONL"),
    "UTF-32 with its mark": ("text,label\nä,x\nb,y\n".encode("utf-32"), [("ä",), ("b",)]),
    "UTF-16 that is cut off": ("text,label\nä,x\nb,y\n".encode("utf-16")[:-1], "is not UTF-16"),
    "gzip in gzip": (gzip.compress(gzip.compress(b"text,label\na,x\nb,y\n")), "is gzip within gzip: unpack it"),
    "two labels": (b"text,Label,label\na,1,x\nb,2,y\n", "which of the columns text, Label, label is the label"),
    "a separator at each end": (b"text,label,\na,x,\nb,y,\n", [("a",), ("b",)]),
    "CSV that holds JSON Lines": (b'{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n', [("a",), ("b",)]),
    "CSV that holds a JSON list": (b'[{"text": "a", "label": "x"},\n{"text": "b", "label": "y"}]\n', "is one JSON list"),
    "CSV that holds a web page": (b"\n<!DOCTYPE html>\n<p>a, x</p>\n", "is a web page"),
    "a key twice": (b'{"text": "a", "text": "b", "label": "x"}\n', ":1: not JSONL .two values of 'text'"),
    "half a character": (b'{"text": "a \\ud83d", "label": "x"}\n', ":1: not JSONL .*surrogates not allowed"),
    "JSONL of numbers": (b"1\n2\n", ":1: not JSONL .no object"),
    "an old Excel workbook": (b"\xd0\xcf\x11\xe0rest", "is an old office document .Excel, Word.: save the table as CSV"),
    "zstd": (b"\x28\xb5\x2f\xfdrest", "is zstd: unpack it"),
    "a JSON list": (b'[{"text": "a", "label": "x"}]\n', "is one JSON list: write an object per line"),
    "a broken record": (b'{"text": "a", "label": "x"}\n{"text": \n', ":2: not JSONL"),
    "an Excel workbook": (b"PK\x03\x04rest", "is an office document .Excel, Word. or a zip archive: save the sheet as CSV .UTF-8., or unpack it"),
    "Parquet": (b"PAR1rest", "is Parquet: write it with"),
    "bzip2": (b"BZh9rest", "is bzip2: unpack it"),
    "gzip": (gzip.compress(b"text,label\na,x\nb,y\n"), [("a",), ("b",)]),
    "gzip that is cut off": (gzip.compress(b"text,label\na,x\nb,y\n" * 99)[:-20], "is gzip and cannot be unpacked"),
    "a row with a cell too many": (b"text,label\na,x\nb,c,y\nd,x\n", ":3: 3 columns, expected 2 with the separator ',': quote"),
    "two separators": (b"1,50;good\n2,30;bad\n", "is the separator ',' or ';'.*SEPARATOR"),
    "nothing": (b"\n \n", "has no examples"),
    "Windows' line ends": (b"text,label\r\na,x\r\nb,y\r\n", [("a",), ("b",)]),
    "old Macintosh line ends": (b"text,label\ra,x\rb,y\r", [("a",), ("b",)]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_an_odd_table_is_read_as_meant_or_refused(tmp_path, name):
    content, expected = TRAINING[name]
    kind = name.split()[0].lower()
    path = tmp_path / (f"train.{kind}" if kind in tables.KINDS else "train")
    path.write_bytes(content)
    if isinstance(expected, list):
        table = tables.read(path, Layout())
        assert table.texts == expected
        assert len(set(table.names)) == 2
    else:
        with refused(expected) as caught:
            tables.read(path, Layout())
        assert "\n" not in str(caught.value)


def test_a_given_encoding_reads_what_is_not_utf_8(tmp_path):
    path = tmp_path / "train.csv"
    path.write_bytes("text,label\ncafé,x\nb,y\n".encode("cp1252"))
    table = tables.read(path, Layout(reading=Reading(encoding="cp1252")))
    assert table.texts == [("café",), ("b",)]
    with refused(r"ENCODING=cp1252x .predict: --encoding.: no such encoding"):
        tables.read(path, Layout(reading=Reading(encoding="cp1252x")))
    path.write_bytes(b"text,label\na-x.y\n")
    with refused("is not punycode"):
        tables.read(path, Layout(reading=Reading(encoding="punycode")))
    path.write_bytes("\ufefftext,label\na,x\nb,y\n".encode("utf-16-le"))
    marked = tables.read(path, Layout(reading=Reading(encoding="utf-16le")))
    assert marked.columns == ("text",)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_utf_8_is_read_as_such_whatever_encoding_is_given(tmp_path, mark):
    path = tmp_path / "dev.csv"
    path.write_text(f"{mark}text,label\ncafé,x\nb,y\n", encoding="utf-8")
    given = Layout(reading=Reading(encoding="cp1252"))
    table = tables.read(path, given)
    assert (table.columns, table.texts) == (("text",), [("café",), ("b",)])
    assert "dev.csv: UTF-8 (not cp1252), separator" in table.summary
    path.write_bytes("text,label\ncafé,x\nnaïf,y\n".encode() + b"caf\xe9,y\n")
    with refused("line 4 is not UTF-8, line 2 is"):
        tables.read(path, given)
    # Two bytes of Chinese may be UTF-8 by chance.
    path.write_bytes("text,label\n拢,x\n好,y\n中文,y\n".encode("gbk"))
    table = tables.read(path, Layout(reading=Reading(encoding="gbk")))
    assert table.texts == [("拢",), ("好",), ("中文",)]


PAIRS = {
    "MRPC": [("He said the foodservice pie business doesn 't fit.", "The foodservice pie business does not fit."),
             ("Magnarelli said Racicot hated the regime.", "His wife said he was devoted to his work.")],
    "QNLI": [("When did it end?", "It ended in 1648, after thirty years."), ("Who won?", "Nobody won the long war.")],
    "STS-B": [("A plane is taking off.", "An air plane is taking off."), ("A man is playing.", "A man plays a flute.")],
    "short questions": [("How old is he?", "What is his age?"), ("Who are you?", "Where is it?"), ("Why?", "Why not?")],
    "Chinese": [("花呗如何还款", "花呗怎么还款的"), ("我的手机号换了", "换手机号怎么办")],
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("header", ["premise\thypothesis\tlabel\n", ""])
def test_a_pair_of_sentences_is_read_without_being_named(tmp_path, name, header):
    path = tmp_path / "train.tsv"
    lines = ["\t".join([*pair, str(n % 2)]) for n, pair in enumerate(PAIRS[name])]
    path.write_text(header + "\n".join(lines), encoding="utf-8")
    reading = Reading(no_header=not header)
    assert tables.read(path, Layout(reading=reading)).texts == PAIRS[name]


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
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_identifier_a_date_or_a_price_is_no_text_of_a_pair(tmp_path, name):
    path = tmp_path / "train.csv"
    texts = ["a fine old film", "a bad old film", "well, it was so so"]
    rows = [
        f'{cell},"{text}",{label}\n'
        for cell, text, label in zip(BESIDE[name], texts, "xyy", strict=True)
    ]
    path.write_text(f"{name},review,label\n" + "".join(rows))
    told = f"columns {name}, review a pair of texts. set TEXT_COLUMNS=review or "
    with refused(told):
        tables.read(path, Layout())
    # Also where the names are given that a file without a header gets.
    path.write_text("".join(rows))
    given = Layout(texts=("column_2",))
    assert tables.read(path, given).texts == [(text,) for text in texts]


def test_a_category_of_three_words_is_no_text(tmp_path):
    path = tmp_path / "train.csv"
    rows = [f"Home and Garden,this is review {n},{n % 2}\n" for n in range(20)]
    path.write_text("category,review,label\n" + "".join(rows))
    with refused("set TEXT_COLUMNS=review or"):
        tables.read(path, Layout())


def test_columns_of_a_file_without_a_header_are_named_by_number(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("pos,so good,a\nneg,so bad,b\npos,well,c\n")
    reading = Reading(no_header=True)
    given = Layout(texts=("column_2",), label="column_1", reading=reading)
    table = tables.read(path, given)
    assert table.texts == [("so good",), ("so bad",), ("well",)]
    assert table.names == ("neg", "pos")
    # What a model trained on it knows is enough to predict such a file.
    known = Layout(usual=table.columns, label=table.label, reading=reading)
    assert tables.read_texts(path, known, 1).texts == table.texts
    with refused(r"no column 'stars' .it has column_1"):
        tables.read(path, Layout(label="stars", reading=reading))


def test_quotation_marks_around_lines_are_asked_about_or_counted(tmp_path):
    path = tmp_path / "new.txt"
    path.write_text('"So good.\nSo bad."\nwell\n')

    def texts(separator):
        reading = Reading(separator=separator, no_header=True)
        return [
            text
            for (text,) in tables.read_texts(path, Layout(reading=reading), 1).texts
        ]

    with refused(":1: quotation marks enclose several lines"):
        texts("")
    unclosed = tmp_path / "unclosed.csv"
    unclosed.write_text('"abc, 1\nd,2\n')
    with refused(r":1: not CSV .*: double the quotation marks"):
        tables.read(unclosed, Layout(reading=Reading(separator=",")))
    assert texts(",") == ["So good.\nSo bad.", "well"]
    assert texts("none") == ['"So good.', 'So bad."', "well"]
    path.write_text('text,label\n"So good.,x\nSo bad.",y\nwell,x\n')
    assert "rows of several lines: 1" in tables.read(path, Layout()).summary


def test_a_row_of_empty_cells_is_kept_and_blank_lines_are_counted(tmp_path):
    path = tmp_path / "new.tsv"
    path.write_text("text\tlabel\na\tx\n\t\n\nb\ty\n\n")
    rows = tables.Rows(path, Layout(), labelled=False)
    assert [number for number, _ in rows] == [2, 3, 5]
    assert "blank lines left out: 1" in rows.describe()
    one = tmp_path / "one.csv"
    one.write_text("text\na\n\nb\n")
    rows = tables.Rows(one, Layout(), labelled=False)
    assert len(list(rows)) == 3
    assert "blank" not in rows.describe()


# Text to predict with a model that was trained on the column text, or on a file without a header.
PREDICTION = {
    "no header": (b"It is good.\nsemi;colon, and comma\nso so\n", ["--separator none", "It is good."]),
    "the model's column among others": (b"id,text,price\n1,a,2\n2,b,3\n", ["a", "b"]),
    "numbers of which the first is missing": (b",This is a good film.\n1,bad\n2,good\n", ["This is a good film.", "bad", "good"]),
    "numbers of which the first is written as n/a": (b"n/a,This is a good film.\n1,bad\n,good\n", ["This is a good film.", "bad", "good"]),
    "numbers of which the first is marked": (b"#1,This is a good film.\n2,bad\n3,good\n", "1 of the columns #1"),
    "numbers below a word and a sentence": (b"none,This is a good film.\n2,bad\n3,good\n", "is it a header"),
    "numbers below pandas' name": (b"Unnamed: 0,review\n0,bad\n1,so\n", ["bad", "so"]),
    "numbers beside a survey's question": (b"id,What did you like about it?\n1,The food.\n2,Nothing.\n", ["The food.", "Nothing."]),
    "numbers without a name": (b",review\n0,bad\n1,good\n", "is it a header"),
    "another single column": (b"id,price\n1,2\n2,3\n", "no column 'text', which the model was trained on"),
    "another name": (b"id;review\n1;A good thing\n", "no column 'text', which the model was trained on"),
    "a title above the header": (b"My reviews\n\nid,text\n1,a\n2,b\n", "quote the cell"),
    "labels with it": (b"text,stars\na,pos\nb,neg\n", ["a", "b"]),
    "labels last, without a header": (b"so good,pos\nso bad,neg\n", ["so good", "so bad"]),
    "a survey's question as header": (b"What did you like?\nThe food.\nNothing.\n", "is it a header"),
    "an index without a header": (b"0,so good,\n1,so bad,\n", "is it a header|must be text|expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTION)
def test_an_odd_file_to_predict_gives_each_row_or_is_refused(tmp_path, name):
    content, expected = PREDICTION[name]
    path = tmp_path / "new.csv"
    path.write_bytes(content)
    if name == "a survey's question as header":
        with refused(expected):
            tables.read_texts(path, Layout(), 1)
    elif name == "no header":
        with refused(r"set SEPARATOR \(tab, or none"):
            tables.read_texts(path, TRAINED, 1)
        layout = Layout(reading=Reading(separator="none"), labels=TRAINED.labels)
        assert len(tables.read_texts(path, layout, 1).texts) == 3
    elif name.startswith("numbers"):
        layout = Layout(labels=TRAINED.labels)
        if isinstance(expected, list):
            found = tables.read_texts(path, layout, 1).texts
            assert found == [(text,) for text in expected]
        else:
            with refused(expected):
                tables.read_texts(path, layout, 1)
    elif isinstance(expected, list):
        assert tables.read_texts(path, TRAINED, 1).texts == [
            (text,) for text in expected
        ]
    else:
        with refused(expected):
            tables.read_texts(path, TRAINED, 1)


def test_the_option_that_is_named_settles_each_doubt(tmp_path):
    path = tmp_path / "new.csv"

    def texts(content, layout=Layout(), **reading):  # noqa: B008
        path.write_bytes(content)
        layout = Layout(**{**layout._asdict(), "reading": Reading(**reading)})
        return [text for (text,) in tables.read_texts(path, layout, 1).texts]

    assert texts(b"review\nso so\n", no_header=True) == ["review", "so so"]
    assert texts(b"review\nso so\n", Layout(texts=("review",))) == ["so so"]
    assert texts(b"1,50;good\n2,30;bad\n", separator=";", no_header=True)[-1:] == [
        "bad"
    ]
    assert texts(b"text\nHello, you\nWell\n", separator="none") == [
        "Hello, you",
        "Well",
    ]
    with refused("expected one character, tab or none"):
        texts(b"text\na\n", separator="comma")


def test_a_label_is_never_a_text(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n")
    with refused("column 'label' is the label, not a text"):
        tables.read(
            tmp_path / "train.csv", Layout(texts=("text", "label"), label="label")
        )
    (tmp_path / "new.csv").write_text("text,stars\na,x\n")
    with refused("column 'stars' is the label"):
        tables.read_texts(
            tmp_path / "new.csv", Layout(texts=("stars",), label="stars"), 1
        )


def test_what_is_found_is_said_in_one_line(tmp_path):
    (tmp_path / "table.csv").write_text("id;text\n1;a\n2;b\n3;c\n")
    summary = tables.read_texts(tmp_path / "table.csv", Layout(), 1).summary
    assert summary.startswith(
        "table.csv: separator ';', header id, text; 3 examples, text text"
    )


def test_the_dialect_is_looked_for_in_all_rows(tmp_path):
    rows = "".join(f'"He said, ""well {n}"";\nand more",{n % 2}\n' for n in range(99))
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    assert len(tables.read(tmp_path / "train.csv", Layout()).texts) == 99
    (tmp_path / "train.csv").write_text(
        "text;label\n" + "a, b;x\nc, d;y\n" * 20 + "e;x\n"
    )
    assert len(tables.read(tmp_path / "train.csv", Layout()).texts) == 41
