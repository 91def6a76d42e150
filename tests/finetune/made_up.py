"""A synthetic vocabulary and text with words, numbers, punctuation, accents, Chinese and odd
spaces.
"""

from __future__ import annotations

import string

_WORDS = (
    "the a an of in on at he she it is was were said cat cats dog mat red blue house river sat ran wrote here there "
    "where who when and or not with from ##s ##ed ##ing un ##happy lake north south east west king queen year old new"
)
WORDS = _WORDS.split()
LETTERS = string.ascii_lowercase + string.digits
SYMBOLS = [*string.punctuation, "漢", "字", "–", "“", "”"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [
    *SPECIAL,
    *WORDS,
    *LETTERS.replace("a", ""),
    *(f"##{letter}" for letter in LETTERS),
    *SYMBOLS,
]
BLANKS = [" "] * 12 + ["  ", "\n", "\t", "\u202f", "\u00a0", " \r\n"]


def prose(generator, num_words):
    """Words with punctuation around and within them, separated by all kinds of whitespace."""
    text = ""
    for _ in range(num_words):
        word = "".join(
            generator.choice([w.removeprefix("##"), w])
            for w in generator.choices(WORDS, k=1)
        )
        kind = generator.random()
        if kind < 0.1:
            word = str(generator.randrange(3000)) + generator.choice(
                ["", "-", ",", "%"]
            )
        elif kind < 0.15:
            word = generator.choice(
                [
                    "Café",
                    "naïve",
                    "漢字",
                    "字漢字",
                    "“red”",
                    "(cat)",
                    "re-run",
                    "U.S.",
                    "e\u0301a",
                    "ﷲ",
                ]
            )
        elif kind < 0.3:
            word = word.capitalize() + generator.choice([".", ",", "?", "'s", ";"])
        text += word + generator.choice(BLANKS)
    return text


def lengths(features):
    """Tokens of each window."""
    return [len(features.sequence(i)[0]) for i in range(len(features))]
