"""BERT's tokenizer, compiled: text to token ids of segments and documents.

Equal to the reference's BasicTokenizer + WordpieceTokenizer on any bytes. Words of printable ASCII
go straight to the compiled loop; words with other bytes are first normalised here. The loop
lower-cases ASCII, splits on space and ASCII punctuation, and walks the vocabulary's trie, longest
match first. For a cased vocabulary (do_lower_case=False of the reference) letters and accents are
kept.

Unicode is version 11.0 as in Python 3.7, with which the reference's data was made: characters
assigned later count as letters without case, like unassigned ones then, and four characters keep
their old category. So tokens do not depend on the Python version (3.7 or later).
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.data.compiled import compiled
from bert.data.records import Array, id_dtype
from input_preprocessing.text.vocabulary import NODE_MASK, Vocabulary, slot_of

# Of the reference's WordpieceTokenizer: a longer word is one [UNK].
MAX_CHARACTERS_PER_WORD = 200

# Byte classes of the compiled loop.
_LETTER, _SPACE, _PUNCTUATION, _NEWLINE, _NOT_BLANK = range(5)
_MARKER = "\x01"  # replaces a word that normalises to nothing
_BLOCK = 1 << 16
_CONTROLS = bytes(b for b in [*range(32), 127] if b not in b"\t\n\r")
# The reference's blocks of ideographs, each of which is a word. Hangul and kana are not among
# them: they are written in words.
_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
# Starts and ends of the unassigned ranges; the file has the difference of each to the previous one.
_DISTANCES = Path(__file__).with_name("unicode11.txt").read_text(encoding="ascii")
_BOUNDS = list(accumulate(map(int, _DISTANCES.split())))

# Later So, Mc, Mn and Mc.
_CATEGORIES = {0x166D: "Po", 0x1734: "Mn", 0xA9BD: "Mc", 0x1171E: "Mn"}
_NOT_IGNORED = (0x055F, 0xA9BD)  # in the test for a final sigma; later ignored

# Combining marks, of classes 9 and 0, that lost this property (in Unicode 14 and 16), and ones that
# kept it and are otherwise equivalent here.
_REPLACED = {0x1734: "\u1714", 0x1171E: "\U0001171d"}


class TokenizedText(NamedTuple):
    """Documents of segments of tokens, flattened."""

    # Depending on the vocabulary's size.
    tokens: Array
    segment_offsets: Array  # segment s is tokens [o[s], o[s + 1])
    document_offsets: Array  # document d is segments [o[d], o[d + 1])


def _was_assigned(code: int) -> bool:
    """Whether the code point is assigned in Unicode 11.0."""
    return bisect_right(_BOUNDS, code) % 2 == 0


def unicode_category(code: int) -> str:
    """General category in Unicode 11.0; Cn if unassigned."""
    return _CATEGORIES.get(code) or (
        unicodedata.category(chr(code)) if _was_assigned(code) else "Cn"
    )


def _needs_shield(code: int) -> bool:
    """Whether lower() or normalize() treat the code point or its neighbours differently in newer
    Unicode.
    """
    char = chr(code)
    if _was_assigned(code):
        return code in _NOT_IGNORED
    return (
        unicodedata.category(char) in ("Lu", "Ll", "Lt", "Lm", "Mn", "Me", "Cf", "Sk")
        or char.lower() != char
        or unicodedata.combining(char) != 0
        or unicodedata.decomposition(char) != ""
    )


class _Table(dict[int, "str | None"]):
    """A table for str.translate, filled by a function on first use of a character."""

    def __init__(self, replacement: Callable[[int], str | None]) -> None:
        super().__init__()
        self.replacement = replacement

    def __missing__(self, code: int) -> str | None:
        value = self[code] = self.replacement(code)
        return value


def _tables(lower_case: bool) -> tuple[_Table, _Table]:
    """Tables of the first and the last pass over a text; in between come lower() and normalize(),
    unless cased.

    Characters newer than Unicode 11.0 that these two would change are replaced by lone surrogates,
    which never occur in decoded text and which both leave alone; `shielded` maps them back.
    """
    shielded: dict[int, str] = {}

    def clean(code: int) -> str | None:
        """Drops control characters, normalises spaces, puts spaces around CJK ideographs."""
        char, category = chr(code), unicode_category(code)
        if char == "\n":
            return char  # our own separator: lines contain none
        if char in "\t\r" or category == "Zs":
            return " "
        if code in (0, 0xFFFD) or category in ("Cc", "Cf"):
            return None
        if any(first <= code <= last for first, last in _CJK):
            return f" {char} "
        if lower_case and _needs_shield(code):
            shield = 0xD800 + len(shielded)
            assert shield <= 0xDFFF
            shielded[shield] = char
            return chr(shield)
        if lower_case and code in _REPLACED:
            return _REPLACED[code]
        # U+2028, U+2029: the reference's str.split() splits there.
        return " " if char.isspace() else char

    def split(code: int) -> str | None:
        """Drops combining marks unless cased, puts spaces around punctuation, removes shields."""
        char = shielded.get(code, chr(code))
        category = unicode_category(ord(char))
        if category == "Mn" and lower_case:
            return None
        if ord(char) >= 128 and category.startswith("P"):
            return f" {char} "  # ASCII punctuation is left to the compiled loop
        return " " if char != "\n" and char.isspace() else char

    return _Table(clean), _Table(split)


_LOWER_CASED, _CASED = _tables(lower_case=True), _tables(lower_case=False)


def normalise(text: str, lower_case: bool = True) -> str:
    """The text lower-cased, without accents and control characters, with spaces around non-ASCII
    punctuation.

    Keeps newlines; without ``lower_case``, also letters and accents. The result for a text is that
    of its words, since nothing here looks beyond a space (final sigma, canonical order).
    """
    clean, split = _LOWER_CASED if lower_case else _CASED
    text = text.translate(clean)
    return (
        unicodedata.normalize("NFD", text.lower()) if lower_case else text
    ).translate(split)


def prepare(data: bytes, lower_case: bool = True) -> bytes:
    """The text as the compiled loop expects it: UTF-8, words that are not plain ASCII normalised.

    Each distinct string between spaces or line ends is normalised once, however often it occurs.
    """
    data = data.replace(b"\r", b"")  # like TensorFlow's line reader
    spans = _odd_words(np.frombuffer(data, dtype=np.uint8), _IS_ODD)
    if not len(spans):
        return data
    # A Python list of all of them would take gigabytes.
    blocks = np.split(spans, range(_BLOCK, len(spans), _BLOCK))
    originals = list(
        dict.fromkeys(
            data[start:end] for block in blocks for start, end in block.tolist()
        )
    )
    decoded = [original.decode("utf-8", "ignore") for original in originals]
    words = normalise("\n".join(decoded), lower_case).split("\n")
    normalised = {}
    for original, text, word in zip(originals, decoded, words, strict=True):
        # A word that was not blank must not become blank, or its line could end the document.
        normalised[original] = (
            _MARKER.encode() if text.strip() and not word.strip(" ") else word.encode()
        )
    parts = []
    at = 0
    for block in blocks:
        pieces: list[bytes] = []
        for start, end in block.tolist():
            pieces += data[at:start], normalised[data[start:end]]
            at = end
        parts.append(b"".join(pieces))
    return b"".join([*parts, data[at:]])


@compiled
def grown(array):  # type: ignore[no-untyped-def]
    """A copy of the array with twice as many rows."""
    larger = np.empty((2 * array.shape[0], *array.shape[1:]), dtype=array.dtype)
    larger[: array.shape[0]] = array
    return larger


@compiled
def _odd_words(text, is_odd):  # type: ignore[no-untyped-def]
    """Start and end, (N, 2), of every run of bytes between spaces and line ends that contains an
    odd byte.
    """
    spans = np.empty((16, 2), dtype=np.int64)
    count = 0
    i = 0
    while i < text.size:
        if not is_odd[text[i]]:
            i += 1
            continue
        start = i
        while start > 0 and text[start - 1] != 32 and text[start - 1] != 10:
            start -= 1
        while i < text.size and text[i] != 32 and text[i] != 10:
            i += 1
        if count == spans.shape[0]:
            spans = grown(spans)
        spans[count, 0] = start
        spans[count, 1] = i
        count += 1
    return spans[:count]


def tokenize(
    data: bytes, vocabulary: Vocabulary, lower_case: bool = True
) -> TokenizedText:
    """Token ids of a text: a line is a segment, a blank line ends a document; empty ones are
    dropped.
    """
    text = np.frombuffer(prepare(data, lower_case), dtype=np.uint8)
    # A token has at least one byte.
    tokens = np.empty(text.size, dtype=id_dtype(len(vocabulary)))
    # The last line need not end with a line feed, hence one more.
    num_lines = int(np.count_nonzero(text == ord("\n"))) + 1
    segment_offsets = np.zeros(num_lines + 1, dtype=np.int64)
    document_offsets = np.zeros(num_lines + 1, dtype=np.int64)
    (entries, ids), unknown = vocabulary.trie, vocabulary.ids["[UNK]"]
    num_tokens, num_segments, num_documents = _tokenize(
        text,
        _BYTE_CLASS,
        _LOWER if lower_case else _AS_IS,
        entries,
        ids,
        unknown,
        tokens,
        segment_offsets,
        document_offsets,
    )
    segment_offsets, document_offsets = (
        segment_offsets[: num_segments + 1],
        document_offsets[: num_documents + 1],
    )
    # Copied to free the rest: the array has room for a token a byte, and a token takes about three.
    return TokenizedText(tokens[:num_tokens].copy(), segment_offsets, document_offsets)


# Bytes above 127, of UTF-8, are letters here: prepare() has set all other characters apart.
_BYTE_CLASS = np.full(256, _LETTER, dtype=np.uint8)
_BYTE_CLASS[[ord(" "), ord("\t")]] = _SPACE
# All ASCII symbols, also $ + < = > ^ ` | ~, which Unicode does not call punctuation but BERT does.
_BYTE_CLASS[33:48] = _BYTE_CLASS[58:65] = _BYTE_CLASS[91:97] = _BYTE_CLASS[123:127] = (
    _PUNCTUATION
)
_BYTE_CLASS[ord("\n")] = _NEWLINE
_BYTE_CLASS[ord(_MARKER)] = _NOT_BLANK
_AS_IS = np.arange(256, dtype=np.uint8)
_LOWER = np.frombuffer(bytes(range(256)).lower(), dtype=np.uint8)
_IS_ODD = np.array([byte > 127 or byte in _CONTROLS for byte in range(256)])


@compiled
def _split_word(text, start, end, case, entries, ids, unknown, tokens, num_tokens):  # type: ignore[no-untyped-def]
    """Appends the pieces of the word text[start:end], or `unknown` if it cannot be split; returns
    the new count.
    """
    first = num_tokens
    i = start
    # The vocabulary's trie has two roots: 0 for a token that starts a word, 1 for one after ##.
    root = 0
    while i < end:
        node = root
        best = 0
        best_end = i
        for j in range(i, end):
            byte = case[text[j]]
            entry = entries[slot_of(entries, (np.int64(node) << 8) | np.int64(byte))]
            if entry == -1:
                break
            node = (entry >> 1) & NODE_MASK
            # A token ends here, and a longer one may follow: the longest match counts.
            if entry & 1:
                best = node
                best_end = j + 1
        if best == 0:  # the root: no token matched
            # One [UNK] for the whole word, in place of the pieces found so far, like the reference.
            tokens[first] = unknown
            return first + 1
        tokens[num_tokens] = ids[best]
        num_tokens += 1
        i = best_end
        root = 1
    return num_tokens


@compiled
def _tokenize(  # type: ignore[no-untyped-def]
    text,
    byte_class,
    case,
    entries,
    ids,
    unknown,
    tokens,
    segment_offsets,
    document_offsets,
):
    num_tokens = num_segments = num_documents = 0
    blank = True
    i = 0
    size = text.size
    while i <= size:
        # The end of the text ends its last line, and below its last document.
        kind = byte_class[text[i]] if i < size else _NEWLINE
        if kind == _NEWLINE:
            # A line without tokens makes no segment, but ends the document only if it is blank.
            if num_tokens > segment_offsets[num_segments]:
                num_segments += 1
                segment_offsets[num_segments] = num_tokens
            if (blank or i == size) and num_segments > document_offsets[num_documents]:
                num_documents += 1
                document_offsets[num_documents] = num_segments
            blank = True
            i += 1
        elif kind == _SPACE:
            i += 1
        elif kind == _NOT_BLANK:
            blank = False
            i += 1
        else:
            blank = False
            start = i
            characters = 0
            i += 1
            # A punctuation mark is a word of its own and has no more bytes.
            if kind == _LETTER:
                characters = 1
                while i < size and byte_class[text[i]] == _LETTER:
                    if text[i] & 0xC0 != 0x80:  # not a UTF-8 continuation byte
                        characters += 1
                    i += 1
            if characters > MAX_CHARACTERS_PER_WORD:
                tokens[num_tokens] = unknown
                num_tokens += 1
            else:
                num_tokens = _split_word(
                    text, start, i, case, entries, ids, unknown, tokens, num_tokens
                )
    return num_tokens, num_segments, num_documents
