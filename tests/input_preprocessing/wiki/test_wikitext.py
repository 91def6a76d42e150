"""Wiki mark-up becomes the sentences that a reader sees, without templates, tables, references and lists."""

import sys

import pytest

from input_preprocessing.wiki import clean
from input_preprocessing.wiki.clean import paragraphs_of, require, sentences_of

from ...refused import refused

pytest.importorskip("mwparserfromhell")
pytest.importorskip("nupunkt")

NASTY = """{{Short description|never shown}}
{{Infobox person
| name = Foo | birth = {{birth date|1900|1|2}} | known = [[a|b]]
| nested = {{d|{{e|f=[[g]]}}}}
}}
[[File:x.jpg|thumb|A [[caption|label]] with [[File:y.png|10px]] inside it. It has sentences.]]
'''Foo Bar''' ({{IPA|f}}; {{lang-grc|x}}; born [[1 January]] 1900<ref name=x>{{cite|url=http://a.b}}
</ref>) was an [[United States|American]] [[writer]]<ref name="x" /> of J. K. Rowling, e.g. of the U.S.&nbsp;Navy<!--
a comment over lines -->. He ran {{convert|10|km|mi}} &amp; said: "No. 5 is alive." Then he left.

== Life ==
{| class="wikitable"
|-
| a || b {{c}} || A sentence in a table.
|
{| class="nested"
| deeper. It goes on.
|}
|}
* item one is a sentence.
** item [[two]].
# numbered.
; term : definition.
: An indented remark.
He was born in St. Louis on Jan. 5, 1900. Dr. Smith knew him. See [http://x.y the site]. E = mc<sup>2</sup>.
<gallery>
File:a.jpg|some text that is long enough to be a sentence.
</gallery><math>\\frac{x}{2}</math>
<blockquote>To be, or not to be.</blockquote>
<ul><li>An item in HTML.</li></ul>
A line with an unclosed {{template and more words here.

Another [[link with ''italics'']] and '''''both'''''. __NOTOC__ Done ( , ) now .
=== Sub ===
Sub text stays here. <syntaxhighlight lang="c">int main() { return 0; }</syntaxhighlight>
== References ==
{{reflist}}
Text among the references is left out.
=== Deeper ===
So is this.
== Legacy ==
Back again here.
[[Category:People]]
[[de:Foo]] [[:Category:Shown because of the colon]]
"""

SEEN = [
    "Foo Bar (born 1 January 1900) was an American writer of J. K. Rowling, e.g. of the U.S. Navy.",
    'He ran 10 km & said: "No. 5 is alive."',
    "Then he left.",
    "He was born in St. Louis on Jan. 5, 1900.",
    "Dr. Smith knew him.",
    "See the site.",
    "E = mc2.",
    "To be, or not to be.",
    "Another link with italics and both.",
    "Done now.",
    "Sub text stays here.",
    "Back again here.",
    "Category:Shown because of the colon",
]


def test_a_reader_sees_only_the_running_text():
    assert sentences_of(NASTY) == SEEN


@pytest.mark.parametrize("dropped", [
    "[[Datei:K.jpg|mini|Die Kirche im Ort ist alt.]]",
    "[[Quelle:K.jpg|mini|hochkant|Die Kirche im Ort ist alt.]]",
    "[[Kategorie:Ort]]",
    "\n== Einzelnachweise ==\nDas steht hier nicht.\n=== Mehr ===\nDas auch nicht.",
    "\n== Liens externes ==\nUn site que voici.",
])  # fmt: skip
def test_other_languages_have_names_of_their_own(dropped):
    assert sentences_of(f"Der Ort ist klein.{dropped}") == ["Der Ort ist klein."]


def test_a_link_whose_title_has_a_colon_keeps_its_text():
    link = "[[Blitz: Der Film|{{lang|de|Der Film}} von [[A|damals]]]]"
    assert sentences_of(f"{link} ist alt.") == ["Der Film von damals ist alt."]


@pytest.mark.parametrize(("markup", "text"), [
    ("{{nowrap|30 June}} and {{lang|fr|vin de pays}}, {{circa|1850}}.", "30 June and vin de pays, c. 1850."),
    ("The {{lang|de|'''Haus'''|extra=1}} {{unknown|x}}stands.", "The Haus stands."),
    ("From 1914{{ndash}}18, {{as of|2010}} it was so.", "From 1914–18, as of 2010 it was so."),
    ("A&ndash;B &lt;tag&gt; &#x41; is here.", "A–B <tag> A is here."),
    ("It is {{{1|the default}}} of a template.", "It is the default of a template."),
    ("One<br />two three four.", "One two three four."),
    ("Odd \u200bspaces\u00a0and\ttabs\u200e are gone .", "Odd spaces and tabs are gone."),
    ("He {{sic|hte}} said [[Foo (bar)|]] so [[Mexico|''Mexico'']].", "He hte said so Mexico."),
    ("Bare http://a.b/c links vanish in it.", "Bare links vanish in it."),
    # What stood behind the comma is gone.
    ("It was sold to Foo, {{unknown|x}}.", "It was sold to Foo."),
])  # fmt: skip
def test_inline_markup(markup, text):
    assert sentences_of(markup) == [text]


@pytest.mark.parametrize("line", [
    "", "|", "|-", "{| class=x", "Short label", "12 34", "* item of a list.", "1984–1990.",
])  # fmt: skip
def test_lines_that_are_no_prose_are_left_out(line):
    assert paragraphs_of(line) == []


@pytest.mark.parametrize("hopeless", [
    "{{" * 3000, "[[" * 3000, "<div>" * 3000, "'''" * 3000, "{|" * 2000, "<ref>" * 999, "{{{" * 999 + "}}}",
    "\x00\ud800",
])  # fmt: skip
def test_hopeless_markup_costs_one_article_at_the_most(hopeless):
    found = sentences_of(f"A good sentence before it.\n{hopeless}\n")
    assert not any(mark in " ".join(found or []) for mark in ("{{", "[["))


def test_a_parser_that_fails_costs_its_article_only(monkeypatch):
    def parse(_):
        raise RecursionError

    _, nodes, tokenize = clean._libraries()
    monkeypatch.setattr(clean, "_libraries", lambda: (parse, nodes, tokenize))
    assert sentences_of("Text.") is None


@pytest.mark.parametrize("name", ["mwparserfromhell", "nupunkt"])
def test_a_missing_library_is_named_in_one_line(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with refused(rf"{name}.*not installed.*requirements/wiki.txt") as caught:
        require()
    assert "\n" not in str(caught.value)


def test_nowiki_keeps_its_paragraph_and_what_it_shows():
    text = "Links are written <nowiki>[[title]]</nowiki> or <nowiki>{{name|x}}</nowiki> in its mark-up. It has rules.\n"
    assert sentences_of(text) == [
        "Links are written [[title]] or {{name|x}} in its mark-up.",
        "It has rules.",
    ]
    assert sentences_of("A broken [[link stays in this paragraph here.\n") == []
