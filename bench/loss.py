"""The masked-LM cross-entropy: ours in Triton, in place, against PyTorch, eager and compiled.

Logits [M, 30528] in bf16, 30,522 of them words; 10% of the rows have no label, as in a batch of fixed capacity. Each
call copies fresh logits first, since ours are overwritten; the copy is timed alone and taken off. GB/s counts two reads
and one write of the logits. Prints one JSON line.

usage: python bench/loss.py [--masked 2048] [--repeats 15] [--no-compile]
"""

from __future__ import annotations

from collections.abc import Callable

import gpu
import result
import torch
from command_line import Parser, integer
from torch import Tensor

from bert.kernels import cross_entropy

VOCABULARY, WIDTH = 30_522, 30_528


def call(loss: Callable[..., Tensor], source: Tensor, labels: Tensor, upstream: Tensor) -> gpu.Call:
    """Copies the logits, takes the losses and the gradient of the logits."""
    logits = torch.empty_like(source, requires_grad=True)

    def run(_: int) -> object:
        with torch.no_grad():
            logits.copy_(source)
        return torch.autograd.grad(loss(logits, labels, VOCABULARY), logits, upstream)

    return run


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--masked", type=integer, default=2_048, help="rows of logits (default 2048: 24 rows of tokens)"
    )
    parser.add_argument("--repeats", type=integer, default=15, help="replays of each (default 15)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    device = gpu.require_gpu()
    source = 3 * torch.randn(options.masked, WIDTH, device=device).bfloat16()
    labels = torch.randint(VOCABULARY, (options.masked,), device=device)
    labels[options.masked * 9 // 10 :] = cross_entropy.IGNORE
    upstream = torch.rand(options.masked, device=device) / options.masked
    variants: dict[str, Callable[..., Tensor]] = {"triton": cross_entropy.fused, "eager": cross_entropy.reference}
    if not options.no_compile:
        variants["compile"] = torch.compile(cross_entropy.reference, dynamic=False)
    functions = {name: call(loss, source, labels, upstream) for name, loss in variants.items()}
    target = torch.empty_like(source)
    functions["copy"] = lambda _: target.copy_(source)
    times = gpu.seconds_in_turns(functions, repeats=options.repeats)
    copies = times.pop("copy")
    alone = {name: [a - b for a, b in zip(spans, copies, strict=True)] for name, spans in times.items()}
    ceiling = gpu.copy_bandwidth()
    figures = gpu.microseconds(alone)
    for figure in figures.values():
        rate = 3 * source.numel() * source.element_size() / figure["us"] / 1e3
        figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    everything = {"masked": options.masked, "copy_gb_per_s": round(ceiling), "forward+backward": figures}
    result.emit("loss", everything, data="random bf16", targets={})


if __name__ == "__main__":
    main()
