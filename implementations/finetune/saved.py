"""A fine-tuned model as it was saved, and what it says: scores of many sequences, answers, probabilities of labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed

from bert import kernels
from bert.checkpoint import huggingface
from bert.core.dist import World, why_no_gpu
from bert.core.env import ConfigError
from bert.data.batch import Batch
from bert.data.tokens import WordPiece
from bert.kernels import precision
from bert.model.config import BertConfig
from finetune import models, squad
from finetune.batches import LabelledBatch, Samples
from finetune.models import Classification, FineTuned, SpanPrediction
from finetune.tasks import samples_of


@torch.no_grad()
def batch_scores(model: FineTuned, batch: Batch) -> list[np.ndarray]:
    """Scores of each sequence of a batch on the model's device: (tokens, 2), or (classes,)."""
    scores = model.scores(batch).cpu().numpy()
    if isinstance(batch, LabelledBatch):
        return list(scores)
    return np.split(scores, batch.cu_seqlens.cpu().numpy()[1:-1])


def predict(model: FineTuned, samples: Samples, world: World, batch_size: int) -> list[np.ndarray]:
    """Scores of every sample, in their order, on rank 0; elsewhere nothing. A collective.

    Each sample is computed by exactly one rank. Neighbours in length share a batch, the longest come first.
    """
    order = np.argsort(-samples.lengths, kind="stable")
    mine = order[world.rank :: world.size]
    was_training = model.training
    model.eval()
    found: list[tuple[int, np.ndarray]] = []
    for begin in range(0, len(mine), batch_size):
        chosen = mine[begin : begin + batch_size]
        found += zip(chosen.tolist(), batch_scores(model, samples.batch(chosen).to(world.device)), strict=True)
    model.train(was_training)
    gathered: list[Any] = [found] * world.size
    if world.size > 1:
        distributed.all_gather_object(gathered, found)
    if not world.is_main:
        return []
    scores = dict(pair for part in gathered for pair in part)
    return [scores[number] for number in range(len(order))]


class Saved(NamedTuple):
    """A model on its device, with what prediction must know of its training (task.json)."""

    model: FineTuned
    tokenizer: WordPiece
    facts: dict[str, Any]
    device: torch.device

    def scores(self, samples: Samples) -> list[np.ndarray]:
        """Scores of all samples, in one batch."""
        return batch_scores(self.model, samples.batch(np.arange(len(samples.sequences))).to(self.device))

    def answer(self, question: str, context: str, rules: squad.Rules) -> list[dict[str, str | float]]:
        """The best answers to a question about a context, with their probabilities; the first may be "" (no answer)."""
        if not context.strip():
            raise ConfigError("--context is empty: give the text that holds the answer")
        limits = squad.Limits(
            **{name: self.facts[name] for name in ("max_seq_length", "max_query_length", "doc_stride")}
        )
        dataset = squad.Dataset([context], [squad.Question("question", question, 0)])
        features, _ = squad.make_features(dataset, self.tokenizer, limits, training=False)
        logits = [squad.Logits(*window.T) for window in self.scores(samples_of(features, known=False))]
        return squad.predict(features, logits, rules).n_best["question"]


def load(folder: Path, device: str = "auto") -> Saved:
    """Loads the folder that training wrote, or the first model of a run's folder. Raises ConfigError."""
    if (folder / "model_0" / "task.json").is_file():
        folder = folder / "model_0"
    if not (folder / "task.json").is_file():
        raise ConfigError(f"{folder}: no fine-tuned model (task.json): name the folder of a run, or its model_N")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: no GPU is seen ({why_no_gpu()}): fix the driver, or leave --device out")
    facts = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    place = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    numerics = precision.Config().resolve(place)
    bound = kernels.select(kernels.Config(attention="auto" if numerics.is_low else "sdpa_loop"), place)
    shape, labels = BertConfig.from_json(folder / "config.json"), facts.get("labels", [])
    model = SpanPrediction(shape, bound) if facts["task"] == "squad" else Classification(shape, bound, len(labels))
    huggingface.check_vocabulary(folder / "vocab.txt", shape)
    lacking, _ = models.load(model, folder / "model.safetensors")
    if lacking:
        raise ConfigError(f"{folder}: model.safetensors lacks {', '.join(lacking)}")
    model.to(place, numerics.dtype).eval()
    return Saved(model, WordPiece(folder / "vocab.txt", facts["lower_case"]), facts, place)
