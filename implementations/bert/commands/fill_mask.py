"""``python -m bert fill-mask``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from bert.checkpoint import huggingface
from bert.commands import weights as trained
from bert.core.dist import World
from bert.data.batch import PretrainingBatch, make_batch
from bert.data.records import Records
from bert.data.tokens import WordPiece
from bert.kernels.operations.cross_entropy import IGNORE
from common.env import ConfigError, from_env

MASK = "[MASK]"


@torch.no_grad()
def fill_mask(
    parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]
) -> int:
    """The most likely words for each [MASK], as in "Paris is the [MASK] of France.".

    PATH is an exported model, any folder in the Hub's layout, a run's folder or a checkpoint.
    """
    parser.add_argument(
        "path", type=Path, help="an exported model, a run's folder, or a checkpoint"
    )
    parser.add_argument("text", nargs="+", help=f"with {MASK} for each word to be found")
    parser.add_argument(
        "--top", type=int, default=5, help="words to show for each (default %(default)s)"
    )
    parser.add_argument(
        "--vocab", type=Path, help="the model's vocab.txt (default: the one beside it)"
    )
    parser.add_argument(
        "--bert-config", type=Path, help="the model's bert_config.json, if not found otherwise"
    )
    options = parser.parse_args(arguments)
    settings = from_env(trained.Source, environ)
    source = trained.describe(trained.find(options.path)[-1], options.bert_config)
    vocab_file = trained.vocabulary(source, options.vocab)
    tokenizer = WordPiece(vocab_file, huggingface.lower_case(vocab_file))
    model = settings.model(source.shape, World(settings.dist))
    trained.load(source, model)
    count = min(max(1, options.top), source.shape.vocab_size)
    names = tokenizer.names
    for text in options.text:
        batch = batch_of(text, tokenizer, source.shape.max_position_embeddings).to(settings.device)
        # Scores in fp32: rounded to bf16, close words would be in arbitrary order.
        likeliest = model.scored(batch).mlm.softmax(dim=1).topk(count)
        print(text)
        blocks = (
            "\n".join(
                # Rows that only pad the model's vocabulary have no word.
                f"  {share:.4f}  {names.get(number, f'#{number}')}"
                for share, number in zip(*row, strict=True)
            )
            for row in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
        )
        print("\n\n".join(blocks))
    return 0


def batch_of(text: str, tokenizer: WordPiece, longest: int) -> PretrainingBatch:
    """A batch of one sequence, [CLS] text [SEP]. Raises ConfigError for a text without [MASK], or one too long."""
    # Cut at [MASK], as the tokenizer splits special tokens that are spelled out in a text.
    parts = [pieces.ids.tolist() for pieces in tokenizer(text.split(MASK))]
    ids = [tokenizer.cls, *parts[0]]
    for part in parts[1:]:
        ids += [tokenizer.mask, *part]
    ids.append(tokenizer.sep)
    positions = np.flatnonzero(np.array(ids) == tokenizer.mask)
    if not len(positions):
        raise ConfigError(f"{text!r}: no {MASK} in it: write {MASK} where a word is to be found")
    if len(ids) > longest:
        raise ConfigError(
            f"the text has {len(ids)} tokens, and the model takes {longest}: give a shorter one"
        )
    none = np.full(len(positions) + 1, IGNORE)  # labels of masked words and the sequence
    ends = {"sequence_offsets": len(ids), "masked_lm_offsets": len(positions)}
    records = Records(
        # 32 bits for any vocabulary; both arrays of ids alike, as the compiled loops want them.
        input_ids=np.array(ids, np.int32),
        # Segment B begins at the end: there is none.
        segment_b_start=np.array([len(ids)], np.int16),
        masked_lm_positions=positions.astype(np.int16),
        masked_lm_ids=none[1:].astype(np.int32),
        next_sentence_labels=none[:1].astype(np.int8),
        **{name: np.array([0, end], np.int64) for name, end in ends.items()},
    )
    return make_batch(records, np.arange(1), len(ids))
