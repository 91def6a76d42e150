"""Tables as programs and public data sets write them are read as they were meant, whatever is in
their cells, or asked about; the fuzz is ``table_fuzz.py``.
"""

from collections import Counter

import pytest

from finetune.dialect import Reading, read

from ..refused import refused
from . import table_fuzz


def test_no_table_of_any_program_is_misread_and_nine_in_ten_are_read():
    found = Counter(
        table_fuzz.outcome(table_fuzz.ours, path, table)
        for _, path, table in table_fuzz.tables(900, seed=7)
    )
    assert found["wrong"] == 0
    assert found["right"] >= 0.9 * 900


def test_the_fuzz_sees_a_reader_that_takes_marks_for_text():
    def without_marks(path):
        separator = "\t" if path.suffix == ".tsv" else ","
        return rows_of(path, quoting="none", separator=separator)

    wrong = {
        name
        for name, path, table in table_fuzz.tables(280, seed=7)
        if table_fuzz.outcome(without_marks, path, table) == "wrong"
    }
    assert len(wrong) > 10


def rows_of(path, **reading):
    return [row for _, row in read(path, Reading(**reading)).rows]


SPEECH = 'text\tlabel\n"Oh, no."\tx\nd\ty\n'
CP1252 = "text,label\ncafé,x\nb,y\n".encode("cp1252")
# Suffix, content, what is given -> rows, or what is asked.
CASES = {
    "a quoted TSV ends with a newline": ("tsv", 'text\tlabel\n"a ""b"", c"\tx\nd\ty\n', {}, [["text", "label"], ['a "b", c', "x"], ["d", "y"]]),
    "all quoted, tabs, no suffix": ("", '"text"\t"label"\n"Yes."\t"x"\n"No."\t"y"\n', {}, [["text", "label"], ["Yes.", "x"], ["No.", "y"]]),
    "tabs and speech, no suffix": ("", 'text\tlabel\n"A" b\tx\n"C."\ty\n', {}, [["text", "label"], ['"A" b', "x"], ['"C."', "y"]]),
    "one column as pandas writes it": ("csv", 'text\n"a, ""b"""\nc; d\n""\ne\n', {}, [["text"], ['a, "b"'], ["c; d"], [""], ["e"]]),
    "one column with an empty text": ("csv", 'text\na\n""\nb\n', {}, [["text"], ["a"], [""], ["b"]]),
    "names of rows without a name above": ("txt", '"text"\t"label"\n"1"\t"a \\"b\\""\t"x"\n"2"\t"c"\t"y"\n', {}, [["", "text", "label"], ["1", 'a "b"', "x"], ["2", "c", "y"]]),
    "a row too long is no name of rows": ("txt", "text\tlabel\na\tb\tx\nc\td\ty\n", {}, "a column more than the first line"),
    "MySQL's dump": ("txt", "text\tlabel\na\\\nb\tx\nc\\\td\t\\N\n", {}, [["text", "label"], ["a\nb", "x"], ["c\td", "\\N"]]),
    "speech in MySQL's dump": ("txt", 'text\tlabel\na\tx\n"b\\\tc"\ty\n', {}, "set QUOTING"),
    "Postgres' dump": ("txt", "text\tlabel\na\\nb\\\\c\tx\nd\t\\N\n", {}, [["text", "label"], ["a\nb\\c", "x"], ["d", "\\N"]]),
    "a backslash that may be one": ("txt", "text\tlabel\na\\nb\tx\nd\ty\n", {}, "set QUOTING"),
    "a path of Windows": ("csv", "text,label\nC:\\dir,x\nd,y\n", {}, [["text", "label"], ["C:\\dir", "x"], ["d", "y"]]),
    "escaped marks": ("csv", 'text,label\n"a \\"b\\", c",x\nd,y\n', {}, [["text", "label"], ['a "b", c', "x"], ["d", "y"]]),
    "escaped marks and separators, none enclosed": ("csv", 'text,label\na\\, \\"b\\",x\nd,y\n', {}, [["text", "label"], ['a, "b"', "x"], ["d", "y"]]),
    "few cells that may be speech": ("tsv", SPEECH, {}, "set QUOTING"),
    "they are speech": ("tsv", SPEECH, {"quoting": "none"}, [["text", "label"], ['"Oh, no."', "x"], ["d", "y"]]),
    "they are none": ("tsv", SPEECH, {"quoting": "double"}, [["text", "label"], ["Oh, no.", "x"], ["d", "y"]]),
    "an encoding": ("csv", CP1252, {"encoding": "cp1252"}, [["text", "label"], ["café", "x"], ["b", "y"]]),
    "an encoding that is none": ("csv", CP1252, {"encoding": "cp1252x"}, r"ENCODING=cp1252x .predict: --encoding.: no such encoding"),
    "an encoding that does not say where": ("csv", "text,label\na-x.y\n", {"encoding": "punycode"}, "is not punycode"),
    "an encoding besides its mark": ("csv", "\ufefftext,label\na,x\n".encode("utf-16-le"), {"encoding": "utf-16le"}, [["text", "label"], ["a", "x"]]),
    "UTF-8, another encoding": ("csv", "text,label\ncafé,x\n", {"encoding": "cp1252"}, [["text", "label"], ["café", "x"]]),
    "UTF-8 with its mark, another encoding": ("csv", "\ufefftext,label\ncafé,x\n", {"encoding": "cp1252"}, [["text", "label"], ["café", "x"]]),
    "UTF-8 in part": ("csv", "text,label\ncafé,x\nnaïf,y\n".encode() + b"caf\xe9,y\n", {"encoding": "cp1252"}, "line 4 is not UTF-8, line 2 is: two encodings"),
    # Two bytes of Chinese may be UTF-8 by chance.
    "Chinese": ("csv", "text,label\n拢,x\n好,y\n中文,y\n".encode("gbk"), {"encoding": "gbk"}, [["text", "label"], ["拢", "x"], ["好", "y"], ["中文", "y"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_program_s_dialect_is_recognized_or_asked_about(name, tmp_path):
    suffix, content, given, expected = CASES[name]
    path = tmp_path / f"table.{suffix}".rstrip(".")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, str):
        with refused(expected):
            rows_of(path, **given)
    else:
        assert rows_of(path, **given) == expected


def test_a_line_of_latin_1_that_is_utf_8_by_chance_is_said(tmp_path):
    path = tmp_path / "spam.csv"
    latin = [f'ham,"Caf\xe9, {n} o\'clock?",,,' for n in range(40)]
    rows = ["v1,v2,,,", *latin, "spam,\xc2\xa31 win,,,", ""]
    path.write_bytes("\r\n".join(rows).encode("latin-1"))
    table = read(path, Reading(encoding="latin-1"))
    assert table.rows[1] == (2, ["ham", "Caf\xe9, 0 o'clock?", "", "", ""])
    assert "line 42 may be UTF-8" in table.form
    with refused("set ENCODING"):
        rows_of(path)
    # More than one in twenty is no chance.
    path.write_bytes(path.read_bytes() + b"spam,\xc2\xa32 win,,,\r\n" * 2)
    with refused("two encodings"):
        rows_of(path, encoding="latin-1")


# Files as public data sets have them, with cells made up here. Name: contents, how pandas has to
# read it, and what both have in the last row.
FILES = {
    "spam.csv": ('v1,v2,,,\r\nham,"Oh, no... ok",,,\r\nspam,WIN £9 now!!,,,\r\n', {}, ["spam", "WIN £9 now!!", "", "", ""]),
    "SMSSpamCollection": ('ham\tI said "no", then left.\nspam\tCall 0800 "now\n', {"sep": "\t", "quoting": 3}, ["spam", 'Call 0800 "now']),
    "IMDB Dataset.csv": ('review,sentiment\n"A ""fine"" film.<br /><br />Long, too.",positive\nBad.,negative\n"Well, ""so so"".",negative\n', {}, ['Well, "so so".', "negative"]),
    "ag_news/train.csv": ('"Class Index","Title","Description"\n"3","Oil, again","Prices \\$60 <b>..."\n"4","A ""chip""","It\'s new"\n', {}, ["4", 'A "chip"', "It's new"]),
    "dbpedia_csv/train.csv": ('1,"A. B. Ltd"," A. B. Ltd of ""Somewhere"", Kent."\n2,"Hill","A hill; high."\n', {}, ["2", "Hill", "A hill; high."]),
    "yelp_review_polarity_csv/train.csv": ('"1","Bad, ""cold"" food.\\n\\nNever again"\n"2","Good"\n', {}, ["2", "Good"]),
    "sentiment140.csv": ('"0","1467","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","ann","@bob - oh, ""no"" :("\n"4","1468","Mon Apr 06 22:20:00 PDT 2009","NO_QUERY","bob","yes"\n', {}, ["4", "1468", "Mon Apr 06 22:20:00 PDT 2009", "NO_QUERY", "bob", "yes"]),
    "quora/train.csv": ('"id","qid1","qid2","question1","question2","is_duplicate"\n"0","1","2","What is ""it"", really?","What is it?","1"\n"1","3","4","Who?","Why?","0"\n', {}, ["1", "3", "4", "Who?", "Why?", "0"]),
    "jigsaw/train.csv": ('"id","comment_text","toxic","insult"\n"00ab","You said\n""this"", why?",0,0\n"00ac","Go, now!",1,1\n', {}, ["00ac", "Go, now!", "1", "1"]),
    "disaster tweets/train.csv": ('id,keyword,location,text,target\n1,,,Fire near here,1\n4,ablaze,"Kent, UK","He said ""hi"", so what",0\n', {}, ["4", "ablaze", "Kent, UK", 'He said "hi", so what', "0"]),
    "Tweets.csv": ('tweet_id,airline_sentiment,name,text,tweet_coord\n57,neutral,ann,@fly What,\n58,negative,bob,"@fly late,\nagain","[40.7, -73.9]"\n', {}, ["58", "negative", "bob", "@fly late,\nagain", "[40.7, -73.9]"]),
    "Restaurant_Reviews.tsv": ('Review\tLiked\nWow... good place.\t1\nThe "best, ever\t0\n', {"sep": "\t", "quoting": 3}, ['The "best, ever', "0"]),
    "SST-2/train.tsv": ("sentence\tlabel\nhide new secretions \t0\nno wit , only `` gags '' \t1\n", {"sep": "\t"}, ["no wit , only `` gags '' ", "1"]),
    "rotten tomatoes/train.tsv": ("PhraseId\tSentenceId\tPhrase\tSentiment\n1\t1\tA series of 'old' jokes , .\t1\n2\t1\t\t2\n", {"sep": "\t"}, ["2", "1", "", "2"]),
    "CoLA/in_domain_train.tsv": ('gj04\t1\t\tAnn said "go" to Bob.\ngj04\t0\t*\tBob the cat.\n', {"sep": "\t", "quoting": 3}, ["gj04", "0", "*", "Bob the cat."]),
    "emotion/train.txt": ("i feel fine;joy\ni do not;sadness\n", {"sep": ";"}, ["i do not", "sadness"]),
    "bbc-text.csv": ("category,text\ntech,tv future in the hands of viewers  with plasma\nsport,win at last\n", {}, ["sport", "win at last"]),
    "Fake.csv": ('title,text,subject,date\n"A, b","He said: ""No."" https://t.co/x",News,"December 31, 2017"\nC,D,News,"May 1, 2017"\n', {}, ["C", "D", "News", "May 1, 2017"]),
    "Reviews.csv": ('Id,ProductId,Score,Summary,Text\n1,B0,5,Good,"I like it. <a href=""http://x"">y</a>"\n2,B1,1,"""Not"", really",Bad\n', {}, ["2", "B1", "1", '"Not", really', "Bad"]),
    "Womens Clothing E-Commerce Reviews.csv": (',Clothing ID,Title,Review Text,Rating\n0,767,,"So soft,\r\nand 5\'8"" long",4\n1,108,Fine,Good,5\n', {}, ["1", "108", "Fine", "Good", "5"]),
    "tweet_eval.csv": ("text,label\n\"\"\"QT @user, see\"\" it\\u2019s\",2\nyes,1\n", {}, ["yes", "1"]),
}  # fmt: skip


def test_every_public_file_is_read_without_an_option_as_pandas_reads_it(tmp_path):
    found = {}
    for name, (text, _, last) in FILES.items():
        path = tmp_path / name.replace("/", " ")
        path.write_bytes(text.encode())
        found[path] = rows_of(path)
        assert found[path][-1] == last, name
    pandas = pytest.importorskip("pandas")
    plain = {"header": None, "dtype": str, "keep_default_na": False}
    for (_, how, _), (path, rows) in zip(FILES.values(), found.items(), strict=True):
        assert rows == pandas.read_csv(path, **plain, **how).to_numpy().tolist(), path
