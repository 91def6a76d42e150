"""A fine-tuned model as it was saved: loaded, asked, and timed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert import kernels
from bert.core.env import ConfigError
from bert.data.tokens import WordPiece
from bert.kernels import precision
from bert.model.config import BertConfig
from finetune import weights
from finetune.batches import Labelled, Samples
from finetune.glue.examples import encode
from finetune.inference import batch_scores
from finetune.models import Classification, FineTuned, SpanPrediction
from finetune.squad import answers
from finetune.squad.examples import Dataset, Question
from finetune.squad.features import Limits, make_features
from finetune.tasks import spans_of

PERCENTILES = (50, 90, 95, 99, 100)


@dataclass(frozen=True)
class Saved:
    """A model on its device, with what prediction must know of its training (task.json)."""

    model: FineTuned
    tokenizer: WordPiece
    facts: dict[str, Any]
    device: torch.device

    @property
    def finds_spans(self) -> bool:
        """Whether it answers questions; else it classifies."""
        return isinstance(self.model, SpanPrediction)


def load(folder: Path, device: str = "auto") -> Saved:
    """Loads the folder that training wrote, or the first model of a run's folder. Raises ConfigError."""
    if (folder / "model_0" / "task.json").is_file():
        folder = folder / "model_0"
    if not (folder / "task.json").is_file():
        raise ConfigError(f"{folder}: no fine-tuned model (task.json): name the folder of a run, or its model_N")
    facts = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    place = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    numerics = precision.Config().resolve(place)
    backend = "auto" if numerics.is_low else "sdpa_loop"
    bound = kernels.select(kernels.Config(attention=backend), place)
    shape = BertConfig.from_json(folder / "config.json")
    labels = facts.get("labels", [])
    model = SpanPrediction(shape, bound) if facts["task"] == "squad" else Classification(shape, bound, len(labels))
    lacking, _ = weights.load(model, folder / "model.safetensors")
    if lacking:
        raise ConfigError(f"{folder}: model.safetensors lacks {', '.join(lacking)}")
    model.to(place, numerics.dtype).eval()
    return Saved(model, WordPiece(folder / "vocab.txt", facts["lower_case"]), facts, place)


def scores(saved: Saved, samples: Samples) -> list[np.ndarray]:
    """Scores of all samples, in one batch."""
    return batch_scores(saved.model, samples.batch(np.arange(len(samples.lengths))).to(saved.device))


def answer(saved: Saved, question: str, context: str, rules: answers.Rules) -> list[dict[str, str | float]]:
    """The best answers to a question about a context, with their probabilities; the first one may be "" (no answer)."""
    if not context.strip():
        raise ConfigError("--context is empty: give the text that holds the answer")
    facts = saved.facts
    limits = Limits(**{name: facts[name] for name in ("max_seq_length", "max_query_length", "doc_stride")})
    dataset = Dataset([context], [Question("question", question, 0)])
    features, _ = make_features(dataset, saved.tokenizer, limits, training=False)
    logits = [answers.Logits(*window.T) for window in scores(saved, spans_of(features, known=False))]
    return answers.predict(features, logits, rules).n_best["question"]


def classify(saved: Saved, texts: list[tuple[str, ...]]) -> list[dict[str, float]]:
    """The probability of each label, of each text or pair."""
    samples = samples_of(saved, texts)
    found = []
    for row in scores(saved, samples):
        shares = np.exp(row - row.max(), dtype=np.float64)
        found.append(dict(zip(saved.facts["labels"], (shares / shares.sum()).tolist(), strict=True)))
    return found


def samples_of(saved: Saved, texts: list[tuple[str, ...]]) -> Labelled:
    """Texts as samples without labels."""
    sequences = encode(texts, saved.tokenizer, saved.facts["max_seq_length"])
    lengths = np.array([len(ids) for ids, _ in sequences], dtype=np.int32)
    return Labelled(sequences, np.zeros(len(sequences), dtype=np.int64), lengths)


def benchmark(saved: Saved, batch_size: int, length: int, batches: int, warm_up: int = 3) -> dict[str, float]:
    """Latency of batches of made-up tokens in milliseconds, and sequences a second, after warm-up.

    Args: length: tokens of every sequence; batches: how many are timed. The device is waited for after each.
    """
    ids = np.random.default_rng(0).integers(1000 % saved.model.config.vocab_size, saved.model.config.vocab_size, length)
    sequences = [(ids.astype(np.int32), length)] * batch_size
    samples = Labelled(sequences, np.zeros(batch_size, np.int64), np.full(batch_size, length, np.int32))
    milliseconds = []
    for number in range(warm_up + batches):
        begin = time.perf_counter()
        scores(saved, samples)  # its scores come back to the host, so the device is done
        if number >= warm_up:
            milliseconds.append(1000 * (time.perf_counter() - begin))
    values = np.array(milliseconds)
    figures = {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
    speed = 1000 * batch_size / float(values.mean())
    return {**figures, "mean": float(values.mean()), "std": float(values.std()), "sequences_per_second": speed}
