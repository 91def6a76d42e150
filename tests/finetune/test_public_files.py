"""Files as public data sets and the programs that made them have them, with cells made up here, are
read without an option as pandas reads them.
"""

from __future__ import annotations

import pytest

from finetune.dialect import Reading, read

# Name: contents, how pandas has to read it, and what both have in the last row.
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


def rows_of(name, folder):
    path = folder / name.rpartition("/")[2]
    path.write_bytes(FILES[name][0].encode())
    return path, [row for _, row in read(path, Reading()).rows]


@pytest.mark.parametrize("name", FILES)
def test_a_public_file_is_read_without_an_option(name, tmp_path):
    assert rows_of(name, tmp_path)[1][-1] == FILES[name][2]


def test_every_row_is_as_pandas_reads_it(tmp_path):
    pandas = pytest.importorskip("pandas")
    for name, (_, how, _) in FILES.items():
        path, rows = rows_of(name, tmp_path)
        frame = pandas.read_csv(
            path, header=None, dtype=str, keep_default_na=False, **how
        )
        assert rows == frame.to_numpy().tolist(), name
