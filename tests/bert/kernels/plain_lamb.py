"""The passes of kernels/operations/lamb.py in plain PyTorch, for buffers of fp64 too."""

import itertools

import torch

from bert.kernels.operations import lamb


def make_layout(sizes, decays, device):
    """Layout of whole tensors of the given sizes, one after the other."""
    padded = (-(-size // lamb.ALIGNMENT) * lamb.ALIGNMENT for size in sizes)
    ends = [*itertools.accumulate(padded)]
    spans = [[span] for span in itertools.pairwise([0, *ends])]
    return lamb.spans_layout(ends[-1], spans, decays, device)


def _update_direction(layout, master, first, second, scalars, eps):
    direction = (first * scalars[2]) / ((second * scalars[3]).sqrt() + eps)
    for spans, decay in zip(layout.spans, layout.decay, strict=True):
        for begin, end in spans:
            direction[begin:end] += decay * master[begin:end]
    return direction


def moments(layout, gradient, master, first, second, scalars, beta1, beta2, eps):
    valid = ~torch.isnan(scalars[1])
    scaled = gradient.to(master.dtype) * scalars[1]
    first.copy_(torch.where(valid, torch.lerp(first, scaled, 1 - beta1), first))
    squares = torch.lerp(second, scaled * scaled, 1 - beta2)
    second.copy_(torch.where(valid, squares, second))
    direction = _update_direction(layout, master, first, second, scalars, eps)
    sums = torch.zeros(len(layout.spans), 2, dtype=master.dtype, device=master.device)
    for spans, of_tensor in zip(layout.spans, sums, strict=True):
        for begin, end in spans:
            parts = (flat[begin:end] for flat in (master, direction))
            of_tensor += torch.stack([part.square().sum() for part in parts])
    return sums


def update(layout, master, first, second, parameters, norms, scalars, eps):
    direction = _update_direction(layout, master, first, second, scalars, eps)
    scaled = (layout.decay > 0) & (norms > 0).all(dim=1)
    ratios = torch.where(scaled, (norms[:, 0] / norms[:, 1]).sqrt(), 1.0)
    for spans, ratio in zip(layout.spans, ratios, strict=True):
        for begin, end in spans:
            direction[begin:end] *= ratio
    moved = master - scalars[0] * direction
    master.copy_(torch.where(torch.isnan(scalars[1]), master, moved))
    if parameters is not None:
        parameters.copy_(master)
