"""BERT for pretraining on one varlen batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.data.batch import Batch
from bert.data.pretraining import PretrainingBatch
from bert.kernels import Kernels
from bert.kernels.cross_entropy import IGNORE
from bert.kernels.dropout import ForwardPass
from bert.kernels.fp8 import Recipe, Scaling
from bert.kernels.precision import LOW_PRECISION
from bert.model.config import BertConfig
from bert.model.embeddings import BertEmbeddings
from bert.model.encoder import Encoder
from bert.model.heads import Pooler, PretrainingHeads
from bert.model.recompute import Recomputation
from bert.model.trainable import Trainable


class Losses(NamedTuple):
    """Mean losses of a batch (0-d): over its masked tokens, and over its sequences."""

    mlm: Tensor
    nsp: Tensor


class Scored(NamedTuple):
    """Scores at the masked positions [M, V] and their losses [M], scores of the sequences [S, 2]; fp32 at least."""

    mlm: Tensor
    mlm_losses: Tensor
    nsp: Tensor


class Logits(NamedTuple):
    """Scores at the masked positions [M, V] (V: the vocabulary without padding) and of the sequences [S, 2]."""

    mlm: Tensor
    nsp: Tensor


class BertModel(nn.Module):
    """Embeddings, encoder and pooler."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, kernels)
        self.encoder = Encoder(config, kernels)
        self.pooler = Pooler(config)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, D], or those of the tokens ``rows`` alone."""
        forward_pass = ForwardPass(batch.cu_seqlens, batch.max_seqlen)
        return self.encoder(self.embeddings(batch, forward_pass), forward_pass, rows)


class BertForPreTraining(Trainable):
    """BERT with its masked-LM and next-sentence heads; forward gives the two losses."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.cross_entropy = kernels.cross_entropy
        self.bert = BertModel(config, kernels)
        self.cls = PretrainingHeads(config, kernels)

    def stages(self) -> list[nn.Module]:
        """See Trainable."""
        return [
            self.bert.embeddings,
            *self.bert.encoder.layer,
            self.cls.predictions,
            self.bert.pooler,
            self.cls.seq_relationship,
        ]

    def use_fp8(self, recipe: Recipe, device: torch.device) -> Scaling:
        """See Trainable."""
        return self.bert.encoder.use_fp8(recipe, device)

    @contextlib.contextmanager
    def evaluating(self, calibrated: bool = False) -> Iterator[None]:
        """The mode of an evaluation inside, of the weights as they are now: no dropout; in fp8 where the run has it so.

        calibrated: in fp8 even before the first step, see Scaling.evaluation.
        """
        was_training = self.training
        self.eval()
        with self.bert.encoder.fp8_evaluation(calibrated):
            yield
        self.train(was_training)

    @property
    def evaluates_in_fp8(self) -> bool:
        """Whether an evaluation in fp8 is under way."""
        scaling = self.bert.encoder.fp8_scaling
        return scaling is not None and scaling.evaluates

    def recompute(self, recomputation: Recomputation) -> None:
        """See Trainable."""
        self.bert.encoder.recomputation = recomputation

    def _padded_logits(self, batch: PretrainingBatch) -> Logits:
        hidden = self.bert(batch)  # (T, D)
        masked = hidden.index_select(0, batch.masked_positions)  # (M, D)
        mlm = self.cls.predictions(masked, self.bert.embeddings.word_embeddings.weight)  # (M, V)
        return Logits(mlm, self._next_sentence(hidden, batch))

    def _next_sentence(self, hidden: Tensor, batch: PretrainingBatch) -> Tensor:
        # An emulated rank's states are on the meta device, and only the offsets have numbers.
        first = self._first_tokens(batch, hidden.shape[0]).to(hidden.device)
        return self.cls.seq_relationship(self.bert.pooler(hidden.index_select(0, first)))

    @staticmethod
    def _first_tokens(batch: PretrainingBatch, num_tokens: int) -> Tensor:
        # The offset of a padding sequence may be T, one past the last token; its label is ignored.
        return batch.cu_seqlens[:-1].clamp(max=num_tokens - 1)

    def logits(self, batch: PretrainingBatch) -> Logits:
        """Scores of a batch."""
        mlm, nsp = self._padded_logits(batch)
        return Logits(mlm[:, : self.config.vocab_size], nsp)

    def scored(self, batch: PretrainingBatch) -> Scored:
        """Scores and losses of a batch, one by one; without gradients.

        Of the last layer only what the heads read is computed: the masked tokens and the first of each sequence.
        """
        masked, first = batch.masked_positions, self._first_tokens(batch, batch.input_ids.shape[0])
        hidden = self.bert(batch, torch.cat([masked, first.to(masked.dtype)]))  # (M + S, D)
        mlm = self.cls.predictions.scores(hidden[: len(masked)], self.bert.embeddings.word_embeddings.weight)
        losses = self.cross_entropy(mlm, batch.masked_labels, self.config.vocab_size)
        nsp = self.cls.seq_relationship(self.bert.pooler(hidden[len(masked) :]))
        return Scored(mlm[:, : self.config.vocab_size], losses, _fp32_at_least(nsp))

    def forward(self, batch: PretrainingBatch) -> Losses:
        """Losses of a batch, in fp32 at least. Ignored labels (-100) pad the capacities and count for nothing."""
        mlm, nsp = self._padded_logits(batch)
        token_losses = self.cross_entropy(mlm, batch.masked_labels, self.config.vocab_size)  # (M,)
        num_masked = (batch.masked_labels != IGNORE).sum().clamp(min=1)
        nsp_loss = F.cross_entropy(_fp32_at_least(nsp), batch.next_sentence_labels, ignore_index=IGNORE)
        return Losses(token_losses.sum() / num_masked, nsp_loss)


def _fp32_at_least(values: Tensor) -> Tensor:
    return values.float() if values.dtype in LOW_PRECISION else values
