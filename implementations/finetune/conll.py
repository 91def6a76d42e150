"""CoNLL's files: a word a line with its tag in the last column, and a blank line after each
sentence; and sentences as sequences of tokens.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from bert.data.records import DataError
from bert.data.tokens import WordPiece
from finetune.batches import Samples
from finetune.dialect import text_of
from finetune.labels import shortened
from finetune.tables import Layout, Table

IGNORED = -100  # the label of a token that begins no word, as cross_entropy has it
_TAG = re.compile("O|[BIES](-.*)?", re.DOTALL)  # of IOB1, IOB2 and BIOES


def read(
    path: Path, layout: Layout, num_texts: int = 0, labelled: bool = True
) -> Table:
    """Reads a file: each sentence is an example, a tuple of words, and its label a list of tags.

    Raises DataError for an unreadable file, and for the first row that has another number of
    columns than those before, or no tag of a known scheme.
    """
    text, note = text_of(path, layout.reading.encoding)
    # Words may have spaces where tabs separate.
    separator = re.compile("\t" if "\t" in text else " +")
    lines = [separator.split(line.strip("\r ")) for line in text.split("\n")]

    def is_word(cells: list[str]) -> bool:
        return any(cells) and not cells[0].startswith("-DOCSTART-")

    groups = groupby(lines, is_word)
    sentences = [list(rows) for are_words, rows in groups if are_words]
    if not sentences:
        raise DataError(f"{path}: has no words")
    width = len(sentences[0][0])
    for number, cells in enumerate(lines, 1):
        is_right = len(cells) == width and (not labelled or _TAG.fullmatch(cells[-1]))
        if is_word(cells) and not is_right:
            wanted = (
                f"{width} columns, in the last a tag: O, B-..., I-..., E-... or S-..."
            )
            found = f"{' '.join(cells)!r:.60}"
            raise DataError(f"{path}:{number}: {found}: expected {wanted}")
    words = [tuple(row[0] for row in rows) for rows in sentences]
    # A list each: an array of objects, as they differ in length.
    each = ([row[-1] for row in rows] for rows in sentences)
    tags = np.fromiter(each, object, len(words))
    names = layout.labels or tuple(sorted({tag for own in tags for tag in own}))
    counts = f"{len(words):,} sentences, {sum(map(len, words)):,} words"
    summary = f"{path.name}: {note}{counts}, tags {shortened(names)}"
    return Table(words, tags, names, (), "", False, summary)


read_words = partial(read, labelled=False)


def encode(
    table: Table, names: Sequence[str], tokenizer: WordPiece, length: int
) -> Samples:
    """Sequences of each sentence, as many whole words as fit in each. The first token of a word has
    its tag as label, len(names) for a tag that is not among them.

    A word without tokens is unknown, and one that no sequence holds is cut.
    """
    tokens = iter(tokenizer([word for words in table.texts for word in words]))
    numbers = {name: number for number, name in enumerate(names)}
    sequences, labels = list[list[int]](), list[list[int]]()
    for tags in table.labels:
        room = 0
        for tag in tags:
            ids = next(tokens).ids[: length - 2].tolist() or [tokenizer.ids["[UNK]"]]
            if len(ids) > room:
                sequences.append([tokenizer.cls])
                labels.append([IGNORED])
                room = length - 2
            room -= len(ids)
            sequences[-1] += ids
            others = [IGNORED] * (len(ids) - 1)
            labels[-1] += [numbers.get(tag, len(names)), *others]
    ended = (np.array([*row, IGNORED]) for row in labels)
    return Samples(
        [
            (np.array([*ids, tokenizer.sep], np.int32), len(ids) + 1)
            for ids in sequences
        ],
        {"labels": np.fromiter(ended, object, len(labels))},
    )
