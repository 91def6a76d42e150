"""Input embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from bert.data.batch import Batch
from bert.kernels import Kernels
from bert.kernels.dropout import ForwardPass
from bert.model.config import BertConfig


class BertEmbeddings(nn.Module):
    """Word, position and segment embeddings, LayerNorm, dropout. Word rows past the vocabulary are padding."""

    def __init__(self, config: BertConfig, kernels: Kernels) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = config.hidden_dropout_prob
        self.kernel = kernels.embeddings

    def forward(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Embeds a batch: [T, D]."""
        return self.kernel(
            batch.input_ids,
            batch.segment_ids,
            batch.position_ids,
            self.word_embeddings.weight,
            self.position_embeddings.weight,
            self.token_type_embeddings.weight,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            self.LayerNorm.eps,
            self.dropout if self.training else 0.0,
            forward_pass.sites,
        )
