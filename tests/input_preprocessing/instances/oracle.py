"""A slow, plain re-statement of the reference's instance maker, on lists of strings and Python's
own random module.

Written from its description to check the compiled one; shares no code with it.
"""

import random
import unicodedata
from dataclasses import dataclass

ASCII_SYMBOLS = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
IDEOGRAPHS = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
]  # fmt: skip


@dataclass
class Instance:
    tokens: list[str]
    positions: list[int]
    labels: list[str]
    segment_b_start: int
    random_next: bool


def basic_tokens(text: str) -> list[str]:
    clean = ""
    for char in text:
        category = unicodedata.category(char)
        if char in " \t\n\r" or category == "Zs":
            clean += " "
        elif char in "\0\ufffd" or category in ("Cc", "Cf"):
            continue
        elif any(low <= ord(char) <= high for low, high in IDEOGRAPHS):
            clean += f" {char} "
        else:
            clean += char
    spaced = ""
    for word in clean.split():
        for char in unicodedata.normalize("NFD", word.lower()):
            category = unicodedata.category(char)
            if category == "Mn":
                continue
            is_apart = char in ASCII_SYMBOLS or category[0] == "P"
            spaced += f" {char} " if is_apart else char
        spaced += " "
    return spaced.split()


def word_pieces(word: str, vocab: dict[str, int]) -> list[str]:
    if len(word) > 200:
        return ["[UNK]"]
    pieces: list[str] = []
    while word:
        prefix = "##" if pieces else ""
        for end in range(len(word), 0, -1):
            if prefix + word[:end] in vocab:
                pieces.append(prefix + word[:end])
                word = word[end:]
                break
        else:
            return ["[UNK]"]
    return pieces


def read_vocabulary(data: bytes) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for line in data.replace(b"\r", b"").removesuffix(b"\n").split(b"\n"):
        vocab.setdefault(line.decode("utf-8", "ignore").strip(), len(vocab))
    return vocab


def read_documents(data: bytes, vocab: dict[str, int]) -> list[list[list[str]]]:
    documents: list[list[list[str]]] = [[]]
    # TensorFlow's line reader drops every carriage return.
    for raw in data.replace(b"\r", b"").split(b"\n"):
        line = raw.decode("utf-8", "ignore").strip()
        if not line:
            documents.append([])
        pieces = (word_pieces(word, vocab) for word in basic_tokens(line))
        if tokens := [piece for word in pieces for piece in word]:
            documents[-1].append(tokens)
    return [document for document in documents if document]


def make_instances(
    data: bytes, vocab: dict[str, int], *, max_seq_length: int = 512, max_predictions: int = 76, dupe_factor: int = 10,
    seed: int = 12345, masked_lm_prob: float = 0.15, short_seq_prob: float = 0.1,
) -> list[Instance]:  # fmt: skip
    rng = random.Random(seed)
    documents = read_documents(data, vocab)
    rng.shuffle(documents)
    room = max_seq_length - 3
    instances = []
    for _ in range(dupe_factor):
        for index in range(len(documents)):
            target = rng.randint(2, room) if rng.random() < short_seq_prob else room
            for a, b, random_next in pairs_of(documents, index, target, rng):
                truncate(a, b, room, rng)
                tokens = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
                count = max(1, round(len(tokens) * masked_lm_prob))
                made = mask(tokens, min(max_predictions, count), list(vocab), rng)
                instances.append(Instance(*made, len(a) + 2, random_next))
    rng.shuffle(instances)
    return instances


def pairs_of(documents, index, target, rng):  # type: ignore[no-untyped-def]
    document = documents[index]
    i = 0
    chunk: list[list[str]] = []
    while i < len(document):
        chunk.append(document[i])
        i += 1
        if i < len(document) and sum(map(len, chunk)) < target:
            continue
        cut = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
        a = [token for segment in chunk[:cut] for token in segment]
        random_next = len(chunk) == 1 or rng.random() < 0.5
        if random_next:
            for _ in range(10):
                other = rng.randint(0, len(documents) - 1)
                if other != index:
                    break
            start = rng.randint(0, len(documents[other]) - 1)
            b: list[str] = []
            for segment in documents[other][start:]:
                b += segment
                if len(b) >= target - len(a):
                    break
            i -= len(chunk) - cut
        else:
            b = [token for segment in chunk[cut:] for token in segment]
        yield a, b, random_next
        chunk = []


def truncate(a: list[str], b: list[str], room: int, rng: random.Random) -> None:
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if rng.random() < 0.5 else -1)


def mask(
    tokens: list[str], count: int, words: list[str], rng: random.Random
) -> tuple[list[str], list[int], list[str]]:
    special = ("[CLS]", "[SEP]")
    candidates = [i for i, token in enumerate(tokens) if token not in special]
    rng.shuffle(candidates)
    masked = list(tokens)
    for i in candidates[:count]:
        if rng.random() < 0.8:
            masked[i] = "[MASK]"
        elif rng.random() >= 0.5:
            masked[i] = words[rng.randint(0, len(words) - 1)]
    positions = sorted(candidates[:count])
    return masked, positions, [tokens[i] for i in positions]
