"""Operations of the model, and what GPUs do at most: the share of it is MFU."""

import re

import torch

from bert.data.batch import PretrainingBatch
from bert.model.config import BertConfig

# Dense Tflop/s in bf16 by the GPU's name, a pattern: NVIDIA's datasheets.
PEAKS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    r"GH200 \S+( HBM\S+)?": 989,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100 .*HBM3": 989,
    r"A100[- ]\S+( PCIe)?": 312,
    "A30": 165,
    "L40S": 362,
    "L40": 181,
}


def peak_flops(device: torch.device) -> float:
    """Operations a second of a GPU in bf16 at most; 0 for one that is not known."""
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float:
    """``peak_flops`` of a GPU's name, such as NVIDIA H100 80GB HBM3."""
    model = name.removeprefix("NVIDIA ")
    known = (peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, model))
    return 1e12 * next(known, 0)


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
