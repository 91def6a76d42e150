"""Operations of the model, and what GPUs do at most: the share of it is MFU."""

import torch

from bert.data.batch import PretrainingBatch
from bert.model.config import BertConfig
from common.accelerators import bf16_tflops, model_of


def peak_flops(device: torch.device) -> float:
    """Operations a second of a GPU in bf16 at most; 0 for one that is not known."""
    return 1e12 * bf16_tflops(model_of(torch.cuda.get_device_name(device)))


def model_flops(
    config: BertConfig, batch: PretrainingBatch, in_fp8: bool = False
) -> float:
    """Operations of both passes on real tokens: 2 per multiply-add, backward twice forward. in_fp8:
    those of QKV and feed-forward count half, as GPUs do twice as many in that time.

    Matrix products only: encoder, attention (each sequence's length squared), masked-LM head on
    masked tokens with the unpadded vocabulary, pooler and next-sentence head.
    """
    width, inner = config.hidden_size, config.intermediate_size
    # Query, key and value projections, two products of the feed-forward layers; the output
    # projection.
    products = (3 * width * width + 2 * width * inner) * (0.5 if in_fp8 else 1)
    per_token = 2 * (products + width * width)
    # Queries by keys and probabilities by values, 2 operations each.
    attention = 4 * width * batch.num_pairs
    encoder = config.num_hidden_layers * (per_token * batch.num_tokens + attention)
    # Transform and decoder, of the M masked tokens only.
    masked = 2 * batch.num_masked * (width * width + width * config.vocab_size)
    # Pooler, and the next-sentence head with its two classes.
    sequences = 2 * batch.num_sequences * (width * width + 2 * width)
    return 3 * (encoder + masked + sequences)
