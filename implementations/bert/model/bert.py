"""BERT and its two pretraining heads, on a varlen batch."""

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert.data.batch import Batch, PretrainingBatch
from bert.kernels import Kernels
from bert.kernels.fp8 import ROW_MULTIPLE, Scaling
from bert.kernels.operations.cross_entropy import IGNORE
from bert.kernels.precision import LOW_PRECISION
from bert.kernels.support.dropout import ForwardPass
from bert.model.config import BertConfig
from bert.model.encoder import Encoder
from bert.model.recompute import Recomputation
from bert.model.trainable import Trainable


class Losses(NamedTuple):
    """Mean losses of a batch (0-d): over its masked tokens, and over its sequences."""

    mlm: Tensor
    nsp: Tensor


class MaskedLoss(NamedTuple):
    """Mean loss of a batch (0-d) over its masked tokens, for masked-LM alone."""

    mlm: Tensor


class Scored(NamedTuple):
    """Scores at the masked positions [M, V] and their losses [M], scores of the sequences [S, 2];
    fp32 at least.

    nsp is None for masked-LM alone.
    """

    mlm: Tensor
    mlm_losses: Tensor
    nsp: Tensor | None


class BertEmbeddings(nn.Module):
    """Word, position and segment embeddings, LayerNorm, dropout. Word rows beyond the vocabulary
    are padding.
    """

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = config.hidden_dropout_prob
        self.kernel = kernels.embeddings

    def forward(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Embeds a batch: [T, D]."""
        tokens = batch.input_ids, batch.segment_ids, batch.position_ids
        tables = (
            self.word_embeddings,
            self.position_embeddings,
            self.token_type_embeddings,
        )
        norm, dropout = self.LayerNorm, self.dropout if self.training else 0.0
        weights = [*(table.weight for table in tables), norm.weight, norm.bias]
        return self.kernel(*tokens, *weights, norm.eps, dropout, forward_pass.sites)


class Pooler(nn.Module):
    """tanh(dense(x)) of the first token of every sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [S, D] -> [S, D]."""
        return torch.tanh(self.dense(x))


class Transform(nn.Module):
    """Dense, GELU and LayerNorm before the decoder."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.approximation = config.gelu_approximation
        self.kernel = kernels.bias_gelu

    def forward(self, x: Tensor) -> Tensor:
        """x [M, D] -> [M, D]."""
        # The kernel adds the bias, with GELU.
        projected = F.linear(x, self.dense.weight)
        return self.LayerNorm(
            self.kernel(projected, self.dense.bias, self.approximation)
        )


class MaskedLanguageModel(nn.Module):
    """Scores of every word at the masked positions; the decoder's weights are the word
    embeddings.
    """

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.transform = Transform(config, kernels)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def forward(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """x [M, D], word_embeddings [V, D] -> logits [M, V]."""
        return F.linear(self.transform(x), word_embeddings, self.bias)

    def scores(self, x: Tensor, word_embeddings: Tensor) -> Tensor:
        """The logits in fp32 at least, whatever the operands' precision; without gradients.

        Rounded to bf16, close ones become equal, and the accuracy is off by some 6e-5.
        """
        x = self.transform(x)
        if x.dtype not in LOW_PRECISION:
            return F.linear(x, word_embeddings, self.bias)
        # From PyTorch 2.8 on: no copies of both factors in fp32.
        if x.is_cuda and "dtype" in torch.ops.aten.mm.overloads():
            return torch.mm(x, word_embeddings.t(), out_dtype=torch.float32).add_(
                self.bias
            )
        # Without such a product the operands are widened: more memory, no less exact.
        return F.linear(x.float(), word_embeddings.float(), self.bias.float())


class PretrainingHeads(nn.Module):
    """The masked-LM and next-sentence heads."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.predictions = MaskedLanguageModel(config, kernels)
        if config.next_sentence:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertModel(nn.Module):
    """Embeddings, encoder and pooler."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, kernels)
        self.encoder = Encoder(config, kernels)
        if config.next_sentence:
            self.pooler = Pooler(config)

    def forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, D], or only those of the tokens ``rows``."""
        forward_pass = ForwardPass(batch.cu_seqlens, batch.max_seqlen)
        return self.encoder(self.embeddings(batch, forward_pass), forward_pass, rows)


class BertWithHeads(Trainable):
    """A BERT, to which a task adds its heads."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, kernels)

    def use_fp8(self, device: torch.device, trials: Collection[str] = ()) -> Scaling:
        return self.bert.encoder.use_fp8(device, trials)

    def recompute(self, recomputation: Recomputation) -> None:
        self.bert.encoder.recomputation = recomputation


class BertForPreTraining(BertWithHeads):
    """BERT with masked-LM and next-sentence heads, or the former alone; forward returns their
    losses.
    """

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__(config, kernels)
        self.cross_entropy = kernels.cross_entropy
        self.cls = PretrainingHeads(config, kernels)

    def stages(self) -> list[nn.Module]:
        # The decoder's weight belongs to the first stage, as the embeddings': its gradient is
        # complete only at the end of the backward pass.
        stages = [self.bert.embeddings, *self.bert.encoder.layer, self.cls.predictions]
        if self.config.next_sentence:
            stages += [self.bert.pooler, self.cls.seq_relationship]
        return stages

    @contextlib.contextmanager
    def evaluating(self, calibrated: bool = False) -> Iterator[None]:
        """Evaluation mode inside, for the current weights: no dropout; in fp8 if the run evaluates
        in fp8.

        calibrated: in fp8 even before the first step, see Scaling.evaluation.
        """
        was_training = self.training
        self.eval()
        try:
            with self.bert.encoder.fp8_evaluation(calibrated):
                yield
        finally:
            self.train(was_training)

    @property
    def evaluates_in_fp8(self) -> bool:
        """Whether an evaluation in fp8 is in progress."""
        scaling = self.bert.encoder.fp8_scaling
        return scaling is not None and scaling.evaluates

    def _read(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Hidden states of the masked tokens [M, D] and of each sequence's first token [S, D]: all
        that the heads read, and all that the last layer computes beyond keys and values.
        """
        masked = batch.masked_positions
        # A padding sequence may begin at T, beyond the last token; its label is ignored.
        first = batch.cu_seqlens[:-1].clamp(max=batch.input_ids.shape[0] - 1).to(masked)
        rows = torch.cat([masked, first])
        in_fp8 = self.bert.encoder.fp8_scaling is not None
        # fp8 products take multiples of 16 rows.
        padding = -len(rows) % ROW_MULTIPLE if in_fp8 else 0
        # The added rows repeat token 0, and no head reads them.
        hidden = self.bert(batch, F.pad(rows, (0, padding)))  # (M + S + padding, D)
        masked_hidden, first_hidden, _ = hidden.split(
            [len(masked), len(first), padding]
        )
        return masked_hidden, first_hidden

    def _next_sentence(self, first: Tensor) -> Tensor | None:
        if not self.config.next_sentence:
            return None
        return self.cls.seq_relationship(self.bert.pooler(first))  # (S, 2)

    def scored(self, batch: PretrainingBatch) -> Scored:
        """Scores and losses per token and sequence; without gradients."""
        masked, first = self._read(batch)
        mlm = self.cls.predictions.scores(
            masked, self.bert.embeddings.word_embeddings.weight
        )
        losses = self.cross_entropy(mlm, batch.masked_labels, self.config.vocab_size)
        nsp = self._next_sentence(first)
        if nsp is not None:
            nsp = fp32_at_least(nsp)
        return Scored(mlm[:, : self.config.vocab_size], losses, nsp)

    def forward(self, batch: PretrainingBatch) -> Losses | MaskedLoss:
        """Losses of a batch, in fp32 at least. Labels of -100 are padding and ignored."""
        masked, first = self._read(batch)
        # Tied to the word embeddings, as in the original (Devlin et al. 2019).
        mlm = self.cls.predictions(
            masked, self.bert.embeddings.word_embeddings.weight
        )  # (M, V)
        nsp = self._next_sentence(first)
        # By the true vocabulary: rows that only pad it stay out of the softmax, as in the
        # reference, which has none.
        token_losses = self.cross_entropy(
            mlm, batch.masked_labels, self.config.vocab_size
        )  # (M,)
        # Counted on the device, where padding differs from batch to batch in one graph.
        # At least 1: a batch without masked tokens has loss 0, not NaN.
        num_masked = (batch.masked_labels != IGNORE).sum().clamp(min=1)
        # As published: means over this rank's tokens and sequences, and then over ranks with equal
        # weight, however many tokens each has (as NVIDIA's submissions).
        mlm_loss = token_losses.sum() / num_masked
        if nsp is None:
            return MaskedLoss(mlm_loss)
        labels = batch.next_sentence_labels
        nsp_loss = F.cross_entropy(fp32_at_least(nsp), labels, ignore_index=IGNORE)
        return Losses(mlm_loss, nsp_loss)


def fp32_at_least(values: Tensor) -> Tensor:
    """A softmax of bf16 has 8 bits: losses are computed in fp32."""
    return values.float() if values.dtype in LOW_PRECISION else values
