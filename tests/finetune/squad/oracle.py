"""A slow, plain re-statement of how SQuAD's questions become windows and scores become answers, one character, word and
window at a time. Written from its description, to check the vectorised one against; shares no code with it.
"""

from __future__ import annotations

import math

from ...input_preprocessing.instances.oracle import basic_tokens, word_pieces

BLANKS = (" ", "\t", "\r", "\n", chr(0x202F))


def pieces_of(text, vocab):
    return [piece for word in basic_tokens(text) for piece in word_pieces(word, vocab)]


def words_of(context):
    """Words, and of each character the number of its word or of the last one before it."""
    words, number, inside = [], [], False
    for character in context:
        if character in BLANKS:
            inside = False
        elif inside:
            words[-1] += character
        else:
            words.append(character)
            inside = True
        number.append(len(words) - 1)
    return words, number


def windows_of(context, question, answer, vocab, *, length=384, query_length=64, stride=128):
    """None where the answer is not found, else windows as dicts. answer: (text, start) or None."""
    words, number = words_of(context)
    pieces, first_piece = [], []
    for word in words:
        first_piece.append(len(pieces))
        pieces += pieces_of(word, vocab)
    span = None
    if answer is not None:
        text, start = answer
        if start + len(text) > len(context):
            return None
        first, last = number[start], number[start + len(text) - 1]
        if first < 0 or " ".join(text.split()) not in " ".join(words[first : last + 1]):
            return None
        begin = first_piece[first]
        end = first_piece[last + 1] - 1 if last + 1 < len(words) else len(pieces) - 1
        span = begin, end
        wanted = " ".join(pieces_of(text, vocab))
        spans = [(a, b) for a in range(begin, end + 1) for b in range(end, a - 1, -1)]
        span = next(((a, b) for a, b in spans if " ".join(pieces[a : b + 1]) == wanted), span)
    query = pieces_of(question, vocab)[:query_length]
    room = length - len(query) - 3
    starts = [0]
    while starts[-1] + room < len(pieces):
        starts.append(starts[-1] + min(room, stride))
    bounds = [(start, min(start + room, len(pieces))) for start in starts]
    found = []
    for begin, end in bounds:
        tokens = ["[CLS]", *query, "[SEP]", *pieces[begin:end], "[SEP]"]
        inside = span is not None and begin <= span[0] and span[1] < end
        places = tuple(place - begin + len(query) + 2 for place in span) if inside else (0, 0)
        most = []
        for piece in range(begin, end):
            scores = {}
            for a, b in bounds:
                if a <= piece < b:
                    scores[a] = min(piece - a, b - 1 - piece) + 0.01 * (b - a)
            most.append(max(scores, key=lambda a: (scores[a], -a)) == begin)
        segments = [0] * (len(query) + 2) + [1] * (end - begin + 1)
        found.append({"tokens": tokens, "segments": segments, "answer": places, "most": most, "offset": len(query) + 2,
                      "begin": begin})  # fmt: skip
    return found


def answers_of(windows, logits, text_of, *, n_best=20, longest=30, version_2=False, threshold=0.0):
    """(answer, [(text, probability, start, end)], odds) of one question.

    text_of(a, b): the words of the context that pieces a to b are of; logits: (starts, ends) of each window.
    """
    everything, null = [], None
    for window, (starts, ends) in zip(windows, logits, strict=True):
        top = [sorted(range(len(x)), key=lambda i: -x[i])[:n_best] for x in (starts, ends)]
        spans = []
        for a in top[0]:
            for b in top[1]:
                offset, size = window["offset"], len(window["most"])
                if offset <= a <= b < offset + size and b - a + 1 <= longest and window["most"][a - offset]:
                    spans.append((a, b))
        spans.sort(key=lambda span: -(starts[span[0]] + ends[span[1]]))
        texts = []
        for a, b in spans:
            text = text_of(window["begin"] + a - window["offset"], window["begin"] + b - window["offset"])
            if text not in texts and len(texts) < n_best:
                texts.append(text)
                everything.append((text, starts[a], ends[b]))
        if null is None or starts[0] + ends[0] < null[1] + null[2]:
            null = ("", starts[0], ends[0])
    if version_2:
        everything.append(null)
    everything.sort(key=lambda entry: -(entry[1] + entry[2]))
    kept = everything[:n_best] or [("", 0.0, 0.0)]
    total = sum(math.exp(a + b) for _, a, b in kept)
    n_bests = [(text, math.exp(a + b) / total, a, b) for text, a, b in kept]
    if not version_2:
        return kept[0][0], n_bests, None
    best = next(entry for entry in kept if entry[0])
    odds = null[1] + null[2] - best[1] - best[2]
    return "" if odds > threshold else best[0], n_bests, odds
