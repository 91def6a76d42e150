"""One LAMB update of BERT-large's 336 million parameters: the flat Triton passes against PyTorch's foreach operations.

fp32 masters and moments, bf16 gradients and parameters, norm of the gradient included. GB/s counts 42 bytes a parameter
(the gradient twice, masters and moments read twice and written once, parameters written). Prints one JSON line.

usage: python bench/lamb.py [--repeats 15] [--layers 24]
"""

from __future__ import annotations

import gpu
import result
import torch
from command_line import Parser, integer

from bert import kernels
from bert.kernels import lamb
from bert.model.bert import BertForPreTraining
from bert.model.config import BertConfig
from bert.optim.rule import is_decayed

BYTES_A_PARAMETER = 42
BETA1, BETA2, EPS, DECAY = 0.60466, 0.85437, 1e-6, 0.1


def parameters(num_layers: int) -> dict[str, torch.Size]:
    """Names and shapes of BERT-large's parameters."""
    with torch.device("meta"):
        bound = kernels.select(kernels.Config(fused="none", attention="sdpa_loop"), torch.device("cpu"))
        model = BertForPreTraining(BertConfig(num_hidden_layers=num_layers), bound)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def flat_step(shapes: dict[str, torch.Size], device: torch.device) -> gpu.Call:
    """The two passes on flat buffers, after the norm of the gradient."""
    sizes = [shape.numel() for shape in shapes.values()]
    decays = [DECAY if is_decayed(name) else 0.0 for name in shapes]
    layout = lamb.make_layout(sizes, decays, device)
    gradient = torch.randn(layout.size, device=device, dtype=torch.bfloat16) * 1e-3
    master, first = torch.randn(layout.size, device=device) * 0.02, torch.randn(layout.size, device=device) * 1e-3
    second, low = first.square(), torch.empty_like(gradient)
    scalars = torch.tensor([1e-6, 1.0, 1 / (1 - BETA1), 1 / (1 - BETA2)], device=device)

    def step(_: int) -> None:
        norm = lamb.fused.squared_norm(gradient).sqrt()
        scalars[1] = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        norms = lamb.fused.moments(layout, gradient, master, first, second, scalars, BETA1, BETA2, EPS)
        lamb.fused.update(layout, master, first, second, low, norms, scalars, EPS)

    return step


def foreach_step(shapes: dict[str, torch.Size], device: torch.device) -> gpu.Call:
    """The same update with torch._foreach operations, tensor by tensor."""
    gradients = [torch.randn(shape, device=device, dtype=torch.bfloat16) * 1e-3 for shape in shapes.values()]
    masters = [torch.randn(shape, device=device) * 0.02 for shape in shapes.values()]
    low = [gradient.clone() for gradient in gradients]
    first = [torch.randn_like(master) * 1e-3 for master in masters]
    second = [moment.square() for moment in first]
    decayed = [n for n, name in enumerate(shapes) if is_decayed(name)]

    def step(_: int) -> None:
        norm = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).norm()
        scaled = torch._foreach_mul([g.float() for g in gradients], (1.0 / (norm + 1e-6)).clamp(max=1.0))
        torch._foreach_lerp_(first, scaled, 1 - BETA1)
        torch._foreach_mul_(second, BETA2)
        torch._foreach_addcmul_(second, scaled, scaled, 1 - BETA2)
        roots = torch._foreach_div(second, 1 - BETA2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPS)
        updates = list(torch._foreach_div(first, 1 - BETA1))
        torch._foreach_div_(updates, roots)
        chosen = [updates[n] for n in decayed]
        torch._foreach_add_(chosen, [masters[n] for n in decayed], alpha=DECAY)
        norms = torch._foreach_norm([masters[n] for n in decayed])
        ratios = torch._foreach_div(norms, torch._foreach_norm(chosen))
        torch._foreach_mul_(chosen, ratios)
        torch._foreach_add_(masters, updates, alpha=-1e-6)
        torch._foreach_copy_(low, masters)

    return step


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=integer, default=15, help="replays of each (default 15)")
    parser.add_argument("--layers", type=integer, default=24, help="encoder layers (default 24: BERT-large)")
    options = parser.parse_args()
    device = gpu.require_gpu()
    shapes = parameters(options.layers)
    count = sum(shape.numel() for shape in shapes.values())
    functions = {"triton": flat_step(shapes, device), "foreach": foreach_step(shapes, device)}
    figures = gpu.microseconds(gpu.seconds_in_turns(functions, num_calls=3, repeats=options.repeats))
    ceiling = gpu.copy_bandwidth()
    for figure in figures.values():
        rate = BYTES_A_PARAMETER * count / figure["us"] / 1e3
        figure |= {"gb_per_s": round(rate), "share_of_copy": round(rate / ceiling, 3)}
    everything = {"parameters": count, "copy_gb_per_s": round(ceiling), "step": figures}
    result.emit("lamb", everything, data="random", targets={})


if __name__ == "__main__":
    main()
