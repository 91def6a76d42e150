"""Tables as programs write them are read as they were meant, whatever is in their cells, or asked
about; the fuzz is ``table_fuzz.py``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from finetune import tables
from finetune.dialect import Reading, read
from finetune.glue import TASKS
from finetune.tables import Layout

from ..refused import refused
from . import table_fuzz


def test_no_table_of_any_program_is_misread_and_nine_in_ten_are_read():
    found = Counter(
        table_fuzz.outcome(table_fuzz.ours, path, table)
        for _, path, table in table_fuzz.tables(1400, seed=7)
    )
    assert found["wrong"] == 0
    assert found["right"] >= 0.9 * 1400


def test_the_fuzz_sees_a_reader_that_takes_marks_for_text():
    wrong = {
        name
        for name, path, table in table_fuzz.tables(280, seed=7)
        if table_fuzz.outcome(_without_marks, path, table) == "wrong"
    }
    assert len(wrong) > 10


def _without_marks(path):
    reading = Reading(quoting="none", separator="\t" if path.suffix == ".tsv" else ",")
    return [row for _, row in read(path, reading).rows]


# Suffix, content -> rows, or what is asked.
CASES = {
    "a quoted TSV ends with a newline": ("tsv", 'text\tlabel\n"a ""b"", c"\tx\nd\ty\n', [["text", "label"], ['a "b", c', "x"], ["d", "y"]]),
    "all quoted, tabs, no suffix": ("", '"text"\t"label"\n"Yes."\t"x"\n"No."\t"y"\n', [["text", "label"], ["Yes.", "x"], ["No.", "y"]]),
    "tabs and speech, no suffix": ("", 'text\tlabel\n"A" b\tx\n"C."\ty\n', [["text", "label"], ['"A" b', "x"], ['"C."', "y"]]),
    "one column as pandas writes it": ("csv", 'text\n"a, ""b"""\nc; d\n""\ne\n', [["text"], ['a, "b"'], ["c; d"], [""], ["e"]]),
    "one column with an empty text": ("csv", 'text\na\n""\nb\n', [["text"], ["a"], [""], ["b"]]),
    "names of rows without a name above": ("txt", '"text"\t"label"\n"1"\t"a \\"b\\""\t"x"\n"2"\t"c"\t"y"\n', [["", "text", "label"], ["1", 'a "b"', "x"], ["2", "c", "y"]]),
    "a row too long is no name of rows": ("txt", "text\tlabel\na\tb\tx\nc\td\ty\n", "a column more than the first line"),
    "MySQL's dump": ("txt", "text\tlabel\na\\\nb\tx\nc\\\td\t\\N\n", [["text", "label"], ["a\nb", "x"], ["c\td", "\\N"]]),
    "speech in MySQL's dump": ("txt", 'text\tlabel\na\tx\n"b\\\tc"\ty\n', "set QUOTING"),
    "Postgres' dump": ("txt", "text\tlabel\na\\nb\\\\c\tx\nd\t\\N\n", [["text", "label"], ["a\nb\\c", "x"], ["d", "\\N"]]),
    "a backslash that may be one": ("txt", "text\tlabel\na\\nb\tx\nd\ty\n", "set QUOTING"),
    "a path of Windows": ("csv", "text,label\nC:\\dir,x\nd,y\n", [["text", "label"], ["C:\\dir", "x"], ["d", "y"]]),
    "escaped marks": ("csv", 'text,label\n"a \\"b\\", c",x\nd,y\n', [["text", "label"], ['a "b", c', "x"], ["d", "y"]]),
    "escaped marks and separators, none enclosed": ("csv", 'text,label\na\\, \\"b\\",x\nd,y\n', [["text", "label"], ['a, "b"', "x"], ["d", "y"]]),
    "few cells that may be speech": ("tsv", 'text\tlabel\n"Oh, no."\tx\nd\ty\n', "set QUOTING"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_program_s_dialect_is_recognized_or_asked_about(name, tmp_path):
    suffix, content, expected = CASES[name]
    path = tmp_path / f"table.{suffix}".rstrip(".")
    path.write_text(content)
    if isinstance(expected, str):
        with refused(expected):
            read(path, Reading())
    else:
        assert [row for _, row in read(path, Reading()).rows] == expected


@pytest.mark.parametrize(
    ("quoting", "first"), [("none", '"Oh, no."'), ("double", "Oh, no.")]
)
def test_quoting_settles_it(quoting, first, tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text(CASES["few cells that may be speech"][1])
    assert read(path, Reading(quoting=quoting)).rows[1] == (2, [first, "x"])


def test_a_task_of_glue_may_be_a_csv_of_datasets(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(
        'sentence1,sentence2,label\n"a, b",c,entailment\nd,e,not_entailment\n'
    )
    table = tables.read(path, TASKS["RTE"].layout)
    assert table.texts == [("a, b", "c"), ("d", "e")]


def test_spam_csv_with_empty_columns_and_a_line_that_is_utf_8_by_chance(tmp_path):
    path = tmp_path / "spam.csv"
    rows = [f'ham,"Caf\xe9, {n} o\'clock?",,,' for n in range(40)] + [
        "spam,\xc2\xa31 win,,,"
    ]
    path.write_bytes("\r\n".join(["v1,v2,,,", *rows, ""]).encode("latin-1"))
    given = Layout(texts=("v2",), label="v1", reading=Reading(encoding="latin-1"))
    table = tables.read(path, given)
    assert (len(table.texts), table.names) == (41, ("ham", "spam"))
    assert table.texts[0] == ("Caf\xe9, 0 o'clock?",)
    assert "line 42 may be UTF-8" in table.summary
    with refused("set ENCODING"):
        tables.read(path, Layout(texts=("v2",), label="v1"))
    # More than one in twenty is no chance.
    path.write_bytes(path.read_bytes() + b"spam,\xc2\xa32 win,,,\r\n" * 2)
    with refused("two encodings"):
        tables.read(path, given)


@pytest.mark.parametrize("missing", ["\\N", "None", "NA"])
def test_a_missing_label_is_no_class(missing, tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(f"text,label\na,x\nb,{missing}\nc,y\n")
    with refused(r":3: label .*expected one of x, y"):
        tables.read(path, Layout())
