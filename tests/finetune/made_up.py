"""A synthetic vocabulary, text of words, numbers, marks and odd spaces, and random models."""

import string
from functools import partial

import torch

from bert import kernels
from finetune import models

_WORDS = (
    "the a an of in on at he she it is was were said cat cats dog mat red blue house river sat ran wrote here there "
    "where who when and or not with from ##s ##ed ##ing un ##happy lake north south east west king queen year old new"
)
WORDS = _WORDS.split()
LETTERS = string.ascii_lowercase + string.digits
SYMBOLS = [*string.punctuation, "漢", "字", "–", "“", "”"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *WORDS, *LETTERS.replace("a", "")]
VOCABULARY += [*(f"##{letter}" for letter in LETTERS), *SYMBOLS]
BLANKS = [" "] * 12 + ["  ", "\n", "\t", "\u202f", "\u00a0", " \r\n"]
ODD = ["Café", "naïve", "漢字", "字漢字", "“red”", "(cat)", "re-run", "U.S.", "e\u0301a", "ﷲ"]  # fmt: skip


def prose(generator, num_words):
    """Words with punctuation around and within them, separated by all kinds of whitespace."""
    text = ""
    for _ in range(num_words):
        word = generator.choice(WORDS).removeprefix("##")
        kind = generator.random()
        if kind < 0.1:
            mark = generator.choice(["", "-", ",", "%"])
            word = f"{generator.randrange(3000)}{mark}"
        elif kind < 0.15:
            word = generator.choice(ODD)
        elif kind < 0.3:
            word = word.capitalize() + generator.choice([".", ",", "?", "'s", ";"])
        text += word + generator.choice(BLANKS)
    return text


def model_of(kind, shape, num_classes=3, seed=1):
    """A model of spans for squad, else of so many classes; initialised, not training."""
    plain = kernels.KernelsConfig(fused="none")
    bound = kernels.bind_kernels(plain, torch.device("cpu"))
    heads = {"squad": models.SpanPrediction}
    classes = partial(models.Classification, num_classes=num_classes)
    model = heads.get(kind, classes)(shape, bound)
    models.initialize(model, seed)
    return model.eval()


def lengths(features):
    """Tokens of each window."""
    return [len(features.sequence(i)[0]) for i in range(len(features))]
