"""Casts to fp8 and transposes: every bit is that of PyTorch's own cast, and what is no number is not hidden."""

from __future__ import annotations

import pytest
import torch

from bert.kernels.fp8 import BACKWARD, FORWARD, Target
from bert.kernels.fp8_cast import cast_transpose, transpose

INF, NAN = float("inf"), float("nan")


def target_of(dtype, scale, device):
    """A target with nothing seen yet."""
    scale = torch.tensor(scale, device=device)
    return Target(dtype=dtype, scale=scale, inverse=1 / scale, largest=torch.zeros((), device=device))


def same_bits(a, b):
    """Equal, the sign of zero and NaN included."""
    return torch.equal(a.contiguous().cpu().view(torch.uint8), b.contiguous().cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (160, 96)], ids=str)
def test_cast_kernel_equals_the_cast_of_pytorch_in_both_orders(dtype, source, shape, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x[::7, ::5] *= 2.0**14  # beyond the ends of both formats
    x[1::5] *= 2.0**-16  # down to their smallest numbers
    x = x.to(source)
    target = target_of(dtype, 37.0, device)
    cast, transposed, sums = cast_transpose(x.to(device), target, column_sums=True)
    largest = torch.finfo(dtype).max
    reference = (x.float() * 37.0).clamp(-largest, largest).to(dtype)
    assert same_bits(cast, reference)
    assert same_bits(transposed, reference.t())
    assert target.largest.cpu() == x.abs().max()
    torch.testing.assert_close(sums.cpu().float(), x.double().sum(0).float(), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("fused", [False, True], ids=["pytorch", "kernel"])
def test_nan_stays_nan_and_what_is_not_finite_is_seen(dtype, bad, fused, request):
    device = request.getfixturevalue("device") if fused else torch.device("cpu")
    x = torch.ones(48, 48)
    x[3, 5] = bad
    x[17, 40] = -7.0
    target = target_of(dtype, 1.0, device)
    cast, transposed, _ = cast_transpose(x.to(device), target)
    assert not torch.isfinite(target.largest)
    values = cast.cpu().float()
    assert same_bits(cast, transposed.t())
    if bad != bad:
        assert values[3, 5].isnan()
    else:
        assert values[3, 5] == torch.finfo(dtype).max * (1 if bad > 0 else -1)  # cut off
    assert values.isnan().sum() == (bad != bad)
    assert values[17, 40] == -7.0
    # A finite tensor of the same product, of a later micro-batch, does not hide it.
    cast_transpose(torch.full((16, 16), 1e30).to(device), target)
    assert not torch.isfinite(target.largest)


@pytest.mark.parametrize("shape", [(16, 16), (48, 32), (144, 272), (128, 128)], ids=str)
def test_transpose_moves_every_byte(shape, device):
    count = shape[0] * shape[1]
    x = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    x = x.view(shape).view(FORWARD)
    assert torch.equal(transpose(x.to(device)).view(torch.uint8).cpu(), x.view(torch.uint8).t())
