"""Entities of tagged words, and their scores.

As conlleval and seqeval find them, whose scores these are: I- behind nothing, or behind another
kind, begins an entity, so that IOB1, IOB2 and BIOES need not be told apart.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from finetune import glue


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Kind, first and last word of each entity of a sentence."""
    before, kind, first = "O", "", 0
    for at, tag in enumerate([*tags, "O"]):
        goes_on = before in "BI" and tag[0] in "IE" and kind == tag[2:]
        if before != "O" and not goes_on:
            yield kind or "_", first, at - 1
        if not goes_on:
            kind, first = tag[2:], at
        before = tag[0]


def scores(
    said: Sequence[Sequence[str]], true: Sequence[Sequence[str]]
) -> tuple[dict[str, float], list[list[str]]]:
    """Metrics of all sentences, the main one first, and the rows of the kinds."""
    found, wanted = (
        {(*entity, at) for at, tags in enumerate(part) for entity in entities(tags)}
        for part in (said, true)
    )
    every = sorted(found | wanted)
    kinds = sorted({kind for kind, *_ in every})
    # An entity is an example of its kind, or of none, -1, on the side that lacks it.
    labels, others = (
        np.array([kinds.index(one[0]) if one in part else -1 for one in every])
        for part in (found, wanted)
    )
    hits = len(found & wanted)
    precision, recall = (hits / max(len(part), 1) for part in (found, wanted))
    words = glue.accuracy(np.concatenate(said), np.concatenate(true))
    metrics = {"f1": 2 * hits / max(len(found) + len(wanted), 1)}
    metrics |= {"precision": precision, "recall": recall, "accuracy": words}
    return metrics, glue.by_class(labels, others, kinds)
