"""Real weights: a saved fine-tuned model predicts the same in Hugging Face's classes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bert.data.tokens import WordPiece
from bert.model.config import BertConfig
from finetune import models, saved
from finetune.batches import Samples
from finetune.glue import encode

from . import made_up

TEXTS = [
    ("The film is a mess, but a charming one.",),
    ("Who wrote it?", "It was written in 1957 by a Welsh schoolteacher, whose name nobody in town remembered."),
    ("Dreary " * 60,),
    ("Ein Kaffee, bitte!", "\u6f22\u5b57 and caf\u00e9"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(repository):
    """The weights of `make finetune-demo`."""
    folder = (
        Path(os.environ.get("DEMO_DIR", repository / "demo")) / "finetune" / "weights"
    )
    if not (folder / "vocab.txt").is_file():
        pytest.skip(f"no weights in {folder}: make finetune-demo fetches them")
    return folder


@pytest.mark.parametrize("kind", ["QuestionAnswering", "SequenceClassification"])
def test_the_logits_of_an_exported_model_are_those_of_transformers(
    pretrained, tmp_path, kind
):
    transformers = pytest.importorskip("transformers")
    shape = BertConfig.from_json(pretrained / "config.json")
    spans = kind == "QuestionAnswering"
    model = made_up.model_of("squad" if spans else "MRPC", shape, num_classes=2)
    models.load(model, pretrained / "model.safetensors")
    labels = [] if spans else ["0", "1"]
    facts = {"task": "squad" if spans else "MRPC", "lower_case": True, "labels": labels}
    weights = dict(model.named_parameters())
    models.save(tmp_path, model, weights, pretrained / "vocab.txt", facts)
    loads = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
    other = loads(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    sequences = encode(TEXTS, WordPiece(pretrained / "vocab.txt"), 128)
    samples = Samples(sequences, {"labels": np.zeros(len(TEXTS), np.int64)})
    batch = samples.batch(np.arange(len(TEXTS)))
    names = ("start_logits", "end_logits") if spans else ("logits",)
    with torch.no_grad():
        mine = (
            np.split(model.scores(batch).numpy(), np.cumsum(samples.lengths)[:-1])
            if spans
            else saved.batch_scores(model, batch)
        )
        for text, (ids, _), row in zip(TEXTS, sequences, mine, strict=True):
            cut = {"truncation": True, "max_length": 128}
            words = tokenizer(*text, return_tensors="pt", **cut)
            assert words["input_ids"][0].tolist() == ids.tolist()
            theirs = other(**words)
            found = [theirs[name][0] for name in names]
            found = torch.stack(found, -1) if spans else found[0]
            np.testing.assert_allclose(row, found.numpy(), atol=1e-5)
