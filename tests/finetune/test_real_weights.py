"""Real weights: a saved fine-tuned model predicts the same in Hugging Face's classes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bert import kernels
from bert.data.tokens import WordPiece
from bert.model.config import BertConfig
from finetune import models, saved
from finetune.batches import Samples
from finetune.glue import encode
from finetune.models import Classification, SpanPrediction

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
    plain = kernels.bind_kernels(
        kernels.KernelsConfig(fused="none"), torch.device("cpu")
    )
    spans = kind == "QuestionAnswering"
    model = SpanPrediction(shape, plain) if spans else Classification(shape, plain, 2)
    models.initialize(model, seed=1)
    models.load(model, pretrained / "model.safetensors")
    facts = {
        "task": "squad" if spans else "MRPC",
        "lower_case": True,
        "labels": [] if spans else ["0", "1"],
    }
    models.save(
        tmp_path,
        model.eval(),
        dict(model.named_parameters()),
        pretrained / "vocab.txt",
        facts,
    )
    other = (
        getattr(transformers, f"AutoModelFor{kind}").from_pretrained(tmp_path).eval()
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    sequences = encode(TEXTS, WordPiece(pretrained / "vocab.txt"), 128)
    samples = Samples(sequences, {"labels": np.zeros(len(TEXTS), np.int64)})
    batch = samples.batch(np.arange(len(TEXTS)))
    with torch.no_grad():
        mine = (
            np.split(model.scores(batch).numpy(), np.cumsum(samples.lengths)[:-1])
            if spans
            else saved.batch_scores(model, batch)
        )
        for text, (ids, _), row in zip(TEXTS, sequences, mine, strict=True):
            words = tokenizer(
                *text, truncation=True, max_length=128, return_tensors="pt"
            )
            assert words["input_ids"][0].tolist() == ids.tolist()
            theirs = other(**words)
            found = (
                torch.stack([theirs.start_logits[0], theirs.end_logits[0]], 1)
                if spans
                else theirs.logits[0]
            )
            np.testing.assert_allclose(row, found.numpy(), atol=1e-5)
