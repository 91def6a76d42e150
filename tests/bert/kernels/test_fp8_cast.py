"""Casts to fp8 and transposes: bit for bit PyTorch's own cast, and NaN and inf are not hidden."""

from __future__ import annotations

import pytest
import torch

from bert.kernels.fp8 import BACKWARD, FORWARD
from bert.kernels.fp8.cast import cast_rows, cast_transpose, transpose

from . import fp8_cases
from .fp8_cases import LARGE, cast_problems, new_target

INF, NAN = float("inf"), float("nan")


def same_bits(a, b):
    """Equal, the sign of zero and NaN included."""
    return torch.equal(*(x.contiguous().cpu().view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (160, 96)], ids=str)
def test_kernels_equal_the_cast_of_pytorch_in_both_orders(shape, device):
    assert cast_problems(device, *shape) == {}


@pytest.mark.gpu
def test_kernels_equal_the_cast_of_pytorch_at_real_size(gpu):
    assert cast_problems(gpu, LARGE[0], LARGE[2]) == {}


WRONG = ["cast", "transposed", "largest", "sums", "rows alone"]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_cast_is_found(wrong, monkeypatch):
    def broken(x, target, column_sums):
        cast, transposed, sums = cast_transpose(x, target, column_sums)
        outcome = {"cast": cast, "transposed": transposed, "sums": sums}
        outcome["largest"] = target.largest
        outcome[wrong].view(-1)[0] = 1.0
        return cast, transposed, sums

    def broken_rows(x, target):
        cast = cast_rows(x, target)
        cast.view(-1)[0] = 1.0
        return cast

    if wrong == "rows alone":
        monkeypatch.setattr(fp8_cases, "cast_rows", broken_rows)
    else:
        monkeypatch.setattr(fp8_cases, "cast_transpose", broken)
    found = cast_problems(torch.device("cpu"), 32, 48)
    assert set(found) == {"float8_e4m3fn", "float8_e5m2"}


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("fused", [False, True], ids=["pytorch", "kernel"])
def test_nan_stays_nan_and_what_is_not_finite_is_seen(dtype, bad, fused, request):
    device = request.getfixturevalue("device") if fused else torch.device("cpu")
    x = torch.ones(48, 48)
    x[3, 5] = bad
    x[17, 40] = -7.0
    target = new_target(dtype, 1.0, device)
    cast, transposed, _ = cast_transpose(x.to(device), target)
    assert not torch.isfinite(target.largest)
    values = cast.cpu().float()
    assert same_bits(cast, transposed.t())
    if bad != bad:
        assert values[3, 5].isnan()
    else:
        # Cut off.
        assert values[3, 5] == torch.finfo(dtype).max * (1 if bad > 0 else -1)
    assert values.isnan().sum() == (bad != bad)
    assert values[17, 40] == -7.0
    # A finite tensor of the same product, of a later micro-batch, does not hide it.
    cast_transpose(torch.full((16, 16), 1e30).to(device), target)
    assert not torch.isfinite(target.largest)


@pytest.mark.parametrize("shape", [(16, 16), (48, 32), (144, 272), (128, 128)], ids=str)
def test_transpose_moves_every_byte(shape, device):
    generator = torch.Generator().manual_seed(shape[0] * shape[1])
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    moved = transpose(x.view(FORWARD).to(device))
    assert torch.equal(moved.view(torch.uint8).cpu(), x.t())
