"""The tokenizer against an independent one on random Unicode, and against Python 3.7 on every code point."""

import bisect
import functools
import hashlib
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

from input_preprocessing.text import tokenization
from input_preprocessing.text.tokenization import normalise, tokenize
from input_preprocessing.text.vocabulary import Vocabulary

legacy = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")

Tokens = list[list[int]]
# One string: a list of so many would be copied by each process that is forked from the tests' one.
CHARACTERS = "".join(
    chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF and c not in (10, 13)
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]
ODD = [
    "İ", "ı", "ß", "ẞ", "Σ", "ς", "ﬁ", "Ǆ", "ǅ", "ͅ", "Ω", "K", "ϴ", "̇", "I", "i", "ᾈ", "ᾼ", "ΐ", "ΐ", "가",
    "ᄀ", "ᅡ", "[SEP]", "[MASK]", "##", "̈́", "ཱི", "क़", "שּׁ", "a", "b", "c", ".", ",", "'", "-",
]  # fmt: skip
ODD += [
    "\u00ad", "\u200d", "\u2028", "\u2029", "\u0085", "\u00a0", "\u3000", "\t", "\x1c", "\ufffd", "\x00", " ",
]  # fmt: skip
ENDS = ("", " ", "\u0301", "-")
LETTERS = "abcXYZ .,'-\t\u0301é"


@functools.cache
def by_category() -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for char in CHARACTERS:
        found.setdefault(unicodedata.category(char), []).append(char)
    return {category: "".join(chars) for category, chars in found.items()}


def sampled(rng: random.Random) -> set[str]:
    """Characters of every category, and the odd ones."""
    parts = by_category().values()
    drawn = {char for part in parts for char in rng.sample(part, min(len(part), 400))}
    return drawn | set(ODD)


def vocabulary_of(letters: str, sizes: tuple[int, int], lower_case: bool) -> Vocabulary:
    """Of characters of all scripts and words of so many of them, so that what is dropped or kept
    shows in the tokens: without capitals and accents, or as they stand in text.
    """
    rng = random.Random(0)
    apart = lambda char: unicodedata.normalize("NFD", char.lower())  # noqa: E731
    texts = map(apart, sampled(rng)) if lower_case else sampled(rng)
    plain = sorted({char for text in texts for char in text if char.strip()})
    common = [*letters, *plain]
    longer = ["".join(rng.choices(common, k=rng.randint(*sizes))) for _ in range(3000)]
    tokens = [token for text in (*common, *longer) for token in (text, f"##{text}")]
    return Vocabulary(tuple(dict.fromkeys(SPECIAL + tokens))[:32768], "")


@pytest.fixture(scope="module")
def words():
    return vocabulary_of("abcdefghijklmnopqrstuvwxyz", (2, 3), lower_case=True)


@pytest.fixture(scope="module")
def cased():
    letters = "abcdefghijklmnopqrstuvwxyzABCXYZ\u0301\u00e9\u00c9"
    return vocabulary_of(letters, (2, 2), lower_case=False)


def strings(count: int, seed: int, words: Vocabulary) -> Iterator[str]:
    """Random text: any code points, even parts of the categories, a block, odd ones, tokens, long words."""
    rng, parts = random.Random(seed), list(by_category().values())
    kinds: list[Callable[[int], Iterable[str]]] = [
        lambda size: rng.choices(CHARACTERS, k=size),
        lambda size: (rng.choice(rng.choice(parts)) for _ in range(size)),
        lambda size: map(chr, rng.choices(range(start, start + 97), k=size)),
        lambda size: rng.choices(ODD, k=size),
        lambda size: (rng.choice(words.tokens) + rng.choice(ENDS) for _ in range(size)),
        lambda size: rng.choices(LETTERS, k=size * rng.choice((1, 1, 12))),
        lambda size: "x" * rng.randint(198, 202),
    ]
    for _ in range(count):
        start = rng.randrange(0x20, 0x3000)
        yield "".join(rng.choice(kinds)(rng.randint(1, 24)))


def ours(texts: list[str], words: Vocabulary, lower_case: bool = True) -> Tokens:
    """Tokens of each text; each line starts with an extra word, since lines without tokens would be dropped."""
    lines = "\n".join(f"the {text}" for text in texts)
    found = tokenize(lines.encode(), words, lower_case)
    ends = found.segment_offsets
    return [found.tokens[start + 1 : end].tolist() for start, end in pairwise(ends)]


def theirs(texts: list[str], words: Vocabulary, lower_case: bool = True) -> Tokens:
    basic = legacy.BasicTokenizer(do_lower_case=lower_case)
    pieces = legacy.WordpieceTokenizer(words.ids, "[UNK]", 200)
    return [
        [words.ids[p] for word in basic.tokenize(text) for p in pieces.tokenize(word)]
        for text in texts
    ]


def is_dropped(text: str) -> bool:
    """Holds unassigned or private characters: transformers drops all of category C, the reference Cc and Cf only."""
    return any(unicodedata.category(char) in ("Cn", "Co") for char in text)


def is_newer(text: str) -> bool:
    """Holds characters that are treated as Unicode 11.0 did, not as this Python does."""
    return any(
        tokenization.unicode_category(ord(char)) != unicodedata.category(char)
        or char == "\u055f"
        for char in text
    )


def is_control(char: str) -> bool:
    """As the reference has it: not all of category C."""
    return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def known_in(tokens: Tokens, words: Vocabulary) -> int:
    """How many texts give known tokens."""
    return sum(set(found) != {words.ids["[UNK]"]} for found in tokens)


def compare(
    count: int, seed: int, words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All differences from transformers' tokenizer are the two of docs/data.md, and each is there for that reason."""
    texts = [text for text in strings(count, seed, words) if not is_newer(text)]
    assert len(texts) > 0.7 * count  # the fewer, the newer the Python
    plain = [text for text in texts if not is_dropped(text)]
    others = [text for text in texts if is_dropped(text)]
    tokens = ours(plain, words)
    assert tokens == theirs(plain, words)
    assert known_in(tokens, words) > len(plain) / 2
    tokens = ours(others, words)
    assert tokens != theirs(others, words)
    monkeypatch.setattr(legacy, "_is_control", is_control)
    assert tokens == theirs(others, words)


def test_random_unicode_gives_the_tokens_of_transformers(words, monkeypatch):
    compare(500, 1, words, monkeypatch)


def test_where_case_is_kept_letters_and_accents_stay_as_they_are(cased, monkeypatch):
    """As transformers' tokenizer, but for what the reference does not do: composed forms (NFC), all of category C."""
    stand_in = SimpleNamespace(
        category=unicodedata.category, normalize=lambda form, text: text
    )
    monkeypatch.setattr(legacy, "unicodedata", stand_in)
    monkeypatch.setattr(legacy, "_is_control", is_control)
    texts = [text for text in strings(500, 7, cased) if not is_newer(text)]
    tokens = ours(texts, cased, lower_case=False)
    assert tokens == theirs(texts, cased, lower_case=False)
    assert known_in(tokens, cased) > len(texts) / 2
    (found,) = ours(["\u00c9 E\u0301 a"], cased, lower_case=False)
    assert [cased.tokens[token] for token in found] == ["\u00c9", "E", "##\u0301", "a"]
    text = "\u1734\U0001e900 X\u00e9"
    assert normalise(text, lower_case=False) == text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_100_000_strings_give_the_tokens_of_transformers(words, monkeypatch, seed):
    compare(25_000, seed, words, monkeypatch)


def digest_of_words(wanted: Callable[[str], bool]) -> str:
    """Digest of the words of a text in which each code point stands at a word's start, middle and end."""
    digest = hashlib.sha256()
    for char in filter(wanted, CHARACTERS):
        text = normalise(f"a{char}\u03a3 {char}b{char}\u0301\u0327 A\u03a3{char}.")
        found = re.sub(r"([!-/:-@\[-`{-~])", r" \1 ", text).split(" ")
        digest.update((" ".join(word for word in found if word) + "\n").encode())
    return digest.hexdigest()


def is_script(char: str) -> bool:
    """Not of ideographs, syllables and what is private."""
    code = ord(char)
    blocks = (0, 0x3400, 0xA000, 0xAC00, 0xF900, 0x12000, 0x16000, 0x17000, 0x1B000)
    return code < 0x20000 and bisect.bisect(blocks, code) % 2 == 1


def test_a_text_of_more_odd_words_than_a_block_is_the_sum_of_its_lines(words):
    odd = (
        f"a{chr(0x100 + i % 500)}b the \u200b {chr(0x4E00 + i % 7)}.\x01"
        for i in range(1000)
    )
    lines = [line.encode() for line in odd]
    once = tokenize(b"\n".join(lines), words)
    repeats = tokenization._BLOCK // 3000 + 2
    often = tokenize(b"\n".join(lines * repeats), words)
    assert often.tokens.tolist() == once.tokens.tolist() * repeats


def test_all_scripts_are_split_as_by_python_3_7():
    """The digest is that of the words which oracle.basic_tokens gives on Python 3.7.16 (Unicode 11.0)."""
    found = digest_of_words(is_script)
    assert found == "783fff2a3661604cbc3c1df3abf1ce3bc8a519e7985acbbea7da5a690638e23e"


@pytest.mark.slow
def test_every_code_point_is_split_as_by_python_3_7():
    found = digest_of_words(lambda code: True)
    assert found == "f67afb867b367b7b7425e21255d35c391f61c8f46f6390f1a2a1549ec973b3d2"
