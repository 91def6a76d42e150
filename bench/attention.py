"""Every attention backend of this machine on packed rows: forward alone and with backward, with and without dropout.

BERT-large's 16 heads of 64 in bf16, sequences of Wikipedia's mix of lengths, each in a CUDA graph over two sets of
inputs. TFLOP/s counts two products forward and five backward on the real lengths, for all alike. `padded_sdpa` is
PyTorch's own on one sequence a row of 512, for scale. Prints one JSON line.

usage: python bench/attention.py [--rows 24] [--repeats 15]
"""

from __future__ import annotations

import gpu
import numpy as np
import result
import torch
import torch.nn.functional as F
from command_line import Parser, integer
from torch import Tensor

from bert.data.synthetic import wikipedia_like_lengths
from bert.kernels import attention
from bert.kernels.dropout import ForwardPass

HEADS, HEAD_SIZE, LENGTH = 16, 64, 512
NUM_SETS = 2


def calls(run: attention.Attention, inputs: list[Tensor], offsets: Tensor, dropout: float) -> dict[str, gpu.Call]:
    """Forward alone, and forward with backward."""
    upstream = torch.randn_like(inputs[0][:, 0])

    def forward(number: int) -> Tensor:
        return run(inputs[number % len(inputs)], ForwardPass(offsets, LENGTH), dropout)

    def both(number: int) -> object:
        return torch.autograd.grad(forward(number), inputs[number % len(inputs)], upstream)

    return {"forward": forward, "forward+backward": both}


def padded_sdpa(num_rows: int, dropout: float, device: torch.device) -> dict[str, gpu.Call]:
    """scaled_dot_product_attention on full rows, without a mask."""
    shape = (num_rows, HEADS, LENGTH, HEAD_SIZE)
    q, k, v, upstream = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))

    def forward(_: int) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    return {"forward": forward, "forward+backward": lambda n: torch.autograd.grad(forward(n), (q, k, v), upstream)}


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--rows", type=integer, default=24, help="rows of 512 tokens, two sequences in each (default 24)"
    )
    parser.add_argument("--repeats", type=integer, default=15, help="replays of each (default 15)")
    options = parser.parse_args()
    device = gpu.require_gpu()
    lengths = wikipedia_like_lengths(2 * options.rows, LENGTH, np.random.default_rng(0)).tolist()
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    shape = (sum(lengths), 3, HEADS, HEAD_SIZE)
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(NUM_SETS)]
    functions = {
        f"{name} dropout={dropout:g} {what}": call
        for name, run in attention.candidates(device).items()
        for dropout in (0.0, 0.1)
        for what, call in calls(run, inputs, offsets, dropout).items()
    }
    for dropout in (0.0, 0.1):
        for what, call in padded_sdpa(len(lengths), dropout, device).items():
            functions[f"padded_sdpa dropout={dropout:g} {what}"] = call
    figures = gpu.microseconds(gpu.seconds_in_turns(functions, repeats=options.repeats))
    ceiling = gpu.gemm_rate()
    packed = 4 * HEADS * HEAD_SIZE * sum(length**2 for length in lengths)
    padded = 4 * HEADS * HEAD_SIZE * len(lengths) * LENGTH**2
    for name, figure in figures.items():
        operations = (padded if name.startswith("padded") else packed) * (3.5 if name.endswith("backward") else 1)
        rate = operations / figure["us"] / 1e6
        figure |= {"tflop_per_s": round(rate, 1), "share_of_gemm": round(rate / ceiling, 3)}
    everything = {
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "gemm_tflop_per_s": round(ceiling),
        "attention": figures,
    }
    result.emit("attention", everything, data="Wikipedia mix of lengths (synthetic)", targets={})


if __name__ == "__main__":
    main()
