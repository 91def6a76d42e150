"""``python -m bert fill-mask PATH "Paris is the [MASK] of France."``: the likeliest words for each [MASK].

PATH is what bert export wrote, any folder of the Hub's layout, a run's folder or a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from bert.checkpoint import huggingface
from bert.commands import weights as trained
from bert.core.dist import World
from bert.core.env import ConfigError, from_env
from bert.data.batch import PretrainingBatch
from bert.data.records import DataError
from bert.data.tokens import WordPiece
from bert.kernels.cross_entropy import IGNORE
from bert.model.bert import BertForPreTraining

MASK = "[MASK]"


def batch_of(text: str, tokenizer: WordPiece, longest: int) -> PretrainingBatch:
    """A batch of one sequence, [CLS] text [SEP]. Raises ConfigError for a text without [MASK], or one too long."""
    parts = [pieces.ids.tolist() for pieces in tokenizer(text.split(MASK))]
    ids = [tokenizer.cls]
    for number, part in enumerate(parts):
        ids += [*([tokenizer.mask] if number else []), *part]
    ids.append(tokenizer.sep)
    positions = np.flatnonzero(np.array(ids) == tokenizer.mask)
    if not len(positions):
        raise ConfigError(f"{text!r}: no {MASK} in it: write {MASK} where a word is to be found")
    if len(ids) > longest:
        raise ConfigError(f"the text has {len(ids)} tokens, and the model takes {longest}: give a shorter one")
    num_tokens, num_masked = len(ids), len(positions)
    return PretrainingBatch(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        segment_ids=torch.zeros(num_tokens, dtype=torch.int32),
        position_ids=torch.arange(num_tokens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        masked_positions=torch.from_numpy(positions.astype(np.int32)),
        masked_labels=torch.full((num_masked,), IGNORE),
        next_sentence_labels=torch.full((1,), IGNORE),
        max_seqlen=num_tokens,
        num_tokens=num_tokens,
        num_sequences=1,
        num_masked=num_masked,
    )


@torch.no_grad()
def fill(model: BertForPreTraining, tokenizer: WordPiece, text: str, top: int) -> list[list[tuple[float, str]]]:
    """(probability, word) of the likeliest words for each [MASK] of the text."""
    device = next(model.parameters()).device
    batch = batch_of(text, tokenizer, model.config.max_position_embeddings).to(device)
    shares = model.scored(batch).mlm.softmax(dim=1).topk(min(top, model.config.vocab_size))
    words = {number: word for word, number in tokenizer.ids.items()}
    return [
        [(share, words.get(number, f"#{number}")) for share, number in zip(row, numbers, strict=True)]
        for row, numbers in zip(shares.values.tolist(), shares.indices.tolist(), strict=True)
    ]


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bert fill-mask",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="what bert export wrote, a run's folder, or a checkpoint")
    parser.add_argument("text", nargs="+", help=f"with {MASK} for each word to be found")
    parser.add_argument("--top", type=int, default=5, help="words to show for each (default %(default)s)")
    parser.add_argument("--vocab", type=Path, help="the model's vocab.txt (default: the one beside it)")
    parser.add_argument("--bert-config", type=Path, help="the model's bert_config.json, where nothing else tells it")
    options = parser.parse_args(arguments)
    try:
        settings = from_env(trained.Source, environ)
        source = trained.describe(trained.newest(options.path), options.bert_config)
        vocab_file = trained.vocabulary(source, options.vocab)
        tokenizer = WordPiece(vocab_file, huggingface.lower_case(vocab_file))
        model = settings.model(source.shape, World(settings.dist))
        trained.load(source, model)
        for text in options.text:
            print(text)
            for number, row in enumerate(fill(model, tokenizer, text, max(1, options.top))):
                if number:
                    print()
                for share, word in row:
                    print(f"  {share:.4f}  {word}")
    except (ConfigError, DataError) as error:
        print(f"bert fill-mask: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
