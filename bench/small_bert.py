"""The model of the benchmarks that run on a CPU: small, with BERT's own vocabulary."""

from __future__ import annotations

import torch

from bert import kernels
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.model.init import initialize

SMALL = {
    "vocab_size": 30522,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
}


def new_model(config: BertConfig) -> BertForPreTraining:
    """A model on the CPU, without fused kernels, with its first weights."""
    model = BertForPreTraining(config, kernels.select(kernels.Config(fused="none"), torch.device("cpu")))
    initialize(model, 0)
    return model
