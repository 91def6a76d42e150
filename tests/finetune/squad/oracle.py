"""A slow, plain re-statement of how SQuAD's questions become windows and scores become answers, one character, word and
window at a time. Written from its description, to check the vectorised one against; shares no code with it.
"""

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


def pieces_of_words(words, vocab):
    """Pieces of all words, the first piece of each word, the number of each piece's word."""
    pieces, first_piece, word_of = [], [], []
    for word in words:
        first_piece.append(len(pieces))
        pieces += pieces_of(word, vocab)
        word_of += [len(first_piece) - 1] * (len(pieces) - len(word_of))
    return pieces, first_piece, word_of


def windows_of(
    context, question, answer, vocab, *, length=384, query_length=64, stride=128
):
    """None where the answer is not found, else windows as dicts. answer: (text, start) or None."""
    words, number = words_of(context)
    pieces, first_piece, _ = pieces_of_words(words, vocab)
    span = None
    if answer is not None:
        text, start = answer
        if start + len(text) > len(context):
            return None
        first, last = number[start], number[start + len(text) - 1]
        if " ".join(text.split()) not in " ".join(words[first : last + 1]):
            return None
        begin = first_piece[first]
        end = first_piece[last + 1] - 1 if last + 1 < len(words) else len(pieces) - 1
        span = begin, end
        wanted = " ".join(pieces_of(text, vocab))
        spans = [(a, b) for a in range(begin, end + 1) for b in range(end, a - 1, -1)]
        span = next(
            ((a, b) for a, b in spans if " ".join(pieces[a : b + 1]) == wanted), span
        )
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
        places = (
            [place - begin + len(query) + 2 for place in span] if inside else (0, 0)
        )
        most = []
        for piece in range(begin, end):
            scores = {
                a: min(piece - a, b - 1 - piece) + 0.01 * (b - a)
                for a, b in bounds
                if a <= piece < b
            }
            most.append(max(scores, key=lambda a: (scores[a], -a)) == begin)
        segments = [0] * (len(query) + 2) + [1] * (end - begin + 1)
        found.append({"tokens": tokens, "segments": segments, "answer": (*places,), "most": most, "offset": len(query) + 2,
                      "begin": begin})  # fmt: skip
    return found


def answer_of(context, pieces, word_of, first, last):
    """The answer of pieces first to last of a context: their characters in its words, or else the
    words themselves.

    pieces: the tokens of the whole context; word_of: of each the number of its word.
    """
    words, _ = words_of(context)
    whole = " ".join(words[word_of[first] : word_of[last] + 1])
    joined = " ".join(pieces[first : last + 1]).replace(" ##", "").replace("##", "")
    wanted = " ".join(joined.split())
    normal = " ".join(basic_tokens(whole))
    at = normal.find(wanted)
    if at == -1 or len(whole.replace(" ", "")) != len(normal.replace(" ", "")):
        return whole
    ahead, held = len(normal[:at].replace(" ", "")), len(wanted.replace(" ", ""))
    if not held:
        return whole
    found, seen = "", 0
    for character in whole:
        if character != " ":
            seen += 1
        if ahead < seen <= ahead + held and (found or character != " "):
            found += character
    return found.rstrip(" ")


def answers_of(
    windows, logits, text_of, *, n_best=20, longest=30, version_2=False, threshold=0.0
):
    """(answer, [(text, probability, start, end)], odds) of one question.

    text_of(a, b): the answer of the context's pieces a to b; logits: (starts, ends) of each window.
    """
    everything, null = [], None
    for window, (starts, ends) in zip(windows, logits, strict=True):
        offset, most = window["offset"], window["most"]
        shift = window["begin"] - offset
        best_ends = sorted(range(len(ends)), key=lambda i: -ends[i])[:n_best]
        for a in sorted(range(len(starts)), key=lambda i: -starts[i])[:n_best]:
            for b in best_ends:
                is_short = offset <= a <= b < min(offset + len(most), a + longest)
                if is_short and most[a - offset]:
                    everything.append((a + shift, b + shift, starts[a], ends[b]))
        if null is None or starts[0] + ends[0] < null[2] + null[3]:
            null = (None, None, starts[0], ends[0])
    if version_2:
        everything.append(null)
    everything.sort(key=lambda entry: entry[2] + entry[3], reverse=True)
    kept = []
    for a, b, start, end in everything:
        if len(kept) == n_best:
            break
        text = "" if a is None else text_of(a, b)
        if a is None or text not in [entry[0] for entry in kept]:
            kept.append((text, start, end))
    if version_2 and "" not in [entry[0] for entry in kept]:
        kept.append(("", null[2], null[3]))
    kept = kept or [("empty", 0.0, 0.0)]
    total = sum(math.exp(a + b) for _, a, b in kept)
    n_bests = [(text, math.exp(a + b) / total, a, b) for text, a, b in kept]
    if not version_2:
        return kept[0][0], n_bests, None
    best = next(entry for entry in kept if entry[0])
    odds = null[2] + null[3] - best[1] - best[2]
    return "" if odds > threshold else best[0], n_bests, odds
