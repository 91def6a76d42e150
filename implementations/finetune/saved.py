"""A saved fine-tuned model and its predictions: scores, answers, probabilities of labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bert import kernels
from bert.checkpoint import huggingface
from bert.core.dist import World, why_no_gpu
from bert.data.batch import Batch
from bert.data.tokens import WordPiece
from bert.kernels import precision
from bert.model.config import BertConfig
from common.env import ConfigError
from common.files import object_of
from finetune import glue, models
from finetune.batches import Samples
from finetune.models import (
    Classification,
    Embedding,
    FineTuned,
    SpanPrediction,
    Tagging,
)
from finetune.squad import answers
from finetune.squad.data import Dataset, Question
from finetune.squad.features import Limits, make_features, settings_of
from finetune.tasks import samples_of


@torch.no_grad()
def batch_scores(model: FineTuned, batch: Batch) -> list[np.ndarray]:
    """Scores of each sequence of a batch: (tokens, classes) or (classes,). The batch is on the
    model's device.
    """
    # The host waits here for the device.
    scores = model.scores(batch).cpu().numpy()
    if model.of_tokens:
        return np.split(scores, batch.cu_seqlens.cpu().numpy()[1:-1])
    return list(scores)


def scores_of(
    model: FineTuned,
    samples: Samples,
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> dict[int, np.ndarray]:
    """Scores of a rank's share of the samples, by index."""
    # Dealt by length, so that all ranks have nearly as many tokens.
    order = np.argsort(-samples.lengths, kind="stable")[rank::num_ranks]
    by_number: dict[int, np.ndarray] = {}
    for begin in range(0, len(order), batch_size):
        numbers = order[begin : begin + batch_size]
        scores = batch_scores(model, samples.batch(numbers).to(device))
        by_number |= zip(numbers.tolist(), scores, strict=True)
    return by_number


def predict(
    model: FineTuned, samples: Samples, world: World, batch_size: int
) -> list[np.ndarray]:
    """Scores of every sample, in order, on rank 0; empty elsewhere. A collective: each rank
    computes its share.
    """
    model.eval()
    mine = scores_of(model, samples, batch_size, world.device, world.rank, world.size)
    # Of objects, as a rank's windows have different lengths.
    parts = world.objects(mine)
    scores = {number: row for part in parts for number, row in part.items()}
    return [scores[number] for number in range(len(scores))] if world.is_main else []


class Saved(NamedTuple):
    """A model on its device. facts: task.json, the training settings that prediction needs."""

    model: FineTuned
    tokenizer: WordPiece
    facts: dict[str, Any]
    device: torch.device

    @property
    def answers(self) -> bool:
        """Whether the model answers questions, rather than classifying or predicting a number."""
        return bool(self.facts["task"] == "squad")

    def scores(self, samples: Samples, batch_size: int) -> list[np.ndarray]:
        """Scores of all samples, in order."""
        by_number = scores_of(self.model, samples, batch_size, self.device)
        return [by_number[number] for number in range(len(by_number))]

    def predict(
        self, texts: Sequence[tuple[str, ...]], batch_size: int = 32
    ) -> list[dict[str, Any]]:
        """Predictions for texts, pairs, or (question, context) pairs.

        Keys: "prediction"; "probabilities" by label, or "probability" and "n_best" of answers ("":
        no answer); except of answers "full": whether a text may have been cut.
        """
        if self.answers:
            return self._answer(texts, batch_size)
        predictions = list[dict[str, Any]]()
        for row, is_full in self.rows_of(texts, batch_size):
            several = self.facts.get("several_labels", False)
            prediction, shares = glue.prediction(row, self.facts["labels"], several)
            predictions.append({"prediction": prediction, "full": is_full})
            if shares:
                predictions[-1]["probabilities"] = shares
        return predictions

    def rows_of(
        self, texts: Sequence[tuple[str, ...]], batch_size: int
    ) -> list[tuple[np.ndarray, bool]]:
        """Scores of each text or pair, and whether it may have been cut."""
        length = self.facts["max_seq_length"]
        sequences = glue.encode(texts, self.tokenizer, length)
        # The labels are never read; their name makes it a batch of classes.
        samples = Samples(sequences, {"labels": np.zeros(len(texts))})
        rows = self.scores(samples, batch_size)
        return [
            (row, len(ids) == length)
            for row, (ids, _) in zip(rows, sequences, strict=True)
        ]

    def cut_note(self, predictions: Sequence[dict[str, Any]]) -> str:
        """What to say of the predictions' texts that may have been cut."""
        full = sum(prediction.get("full", False) for prediction in predictions)
        return glue.cut_note(full, len(predictions), self.facts["max_seq_length"])

    def _answer(
        self, texts: Sequence[tuple[str, ...]], batch_size: int
    ) -> list[dict[str, Any]]:
        # A context is tokenized once for all of its questions.
        contexts = list(dict.fromkeys(context for _, context in texts))
        number_of = {context: number for number, context in enumerate(contexts)}
        questions = [
            Question(str(i), question, number_of[context])
            for i, (question, context) in enumerate(texts)
        ]
        limits = settings_of(Limits, self.facts)
        dataset = Dataset(contexts, questions)
        features, _ = make_features(dataset, self.tokenizer, limits, training=False)
        scores = self.scores(samples_of(features), batch_size)
        rules = settings_of(answers.Rules, self.facts)
        logits = [answers.Logits(*window.T) for window in scores]
        predicted = answers.predict(features, logits, rules)
        predictions = []
        for question, answer in predicted.answers.items():
            best = predicted.n_best[question]
            shares = [entry["probability"] for entry in best if entry["text"] == answer]
            share = shares[0] if shares else 0.0
            predictions.append(
                {"prediction": answer, "probability": share, "n_best": best}
            )
        return predictions


def load(folder: Path, device: str = "auto", embeds: bool = False) -> Saved:
    """Loads a fine-tuned model's folder, or the first model of a run's folder. Raises
    ConfigError.

    embeds: the encoder alone, of any BERT in Hugging Face's layout.
    """
    if (folder / "model_0" / "task.json").is_file():
        folder = folder / "model_0"
    facts = object_of(folder / "task.json")
    if not (facts or embeds):
        message = (
            "no fine-tuned model (task.json): give the folder of a run, or its model_N"
        )
        raise ConfigError(f"{folder}: {message}")
    if device == "cuda" and not torch.cuda.is_available():
        message = f"no GPU found ({why_no_gpu()}): fix the driver, or omit --device"
        raise ConfigError(f"--device cuda: {message}")
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(usual if device == "auto" else device)
    # PRECISION's default on this device: prediction does not read the run's environment.
    numerics = precision.PrecisionConfig().resolve(target)
    # The fast backends need 16 bits.
    attention = "auto" if numerics.is_low else "sdpa_loop"
    bound = kernels.bind_kernels(kernels.KernelsConfig(attention=attention), target)
    shape = BertConfig.from_json(folder / "config.json")
    names = "vocab.txt", "tokenizer.json"
    words = next((w for n in names if (w := folder / n).is_file()), folder / names[0])
    huggingface.check_vocabulary(words, shape)
    model: FineTuned
    if embeds:
        model = Embedding(shape, bound)
        facts = {
            "task": "",
            "max_seq_length": shape.max_position_embeddings,
            "lower_case": huggingface.lower_case(words),
        }
    elif facts["task"] == "squad":
        model = SpanPrediction(shape, bound)
    else:
        kind = Tagging if facts["task"] == "ner" else Classification
        model = kind(shape, bound, len(facts["labels"]) or 1)
    weights = huggingface.weights_in(folder) or folder / "model.safetensors"
    lacking, _ = models.load(model, weights)
    # A head drawn at random would predict noise without a word.
    if lacking:
        raise ConfigError(f"{weights} lacks {', '.join(lacking)}")
    model.to(target, numerics.dtype).eval()
    return Saved(model, WordPiece(words, facts["lower_case"]), facts, target)
