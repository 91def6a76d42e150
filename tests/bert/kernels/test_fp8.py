"""fp8: casts and transposes are PyTorch's own cast bit for bit, and hide neither NaN nor infinity; products
are linear's, on a CPU by the scaling arithmetic, on a GPU by the hardware.
"""

import pytest
import torch
import torch.nn.functional as F

from bert.kernels.fp8 import BACKWARD, FORWARD, GRADIENT, INPUT, WEIGHT, Scaling, linear
from bert.kernels.fp8.cast import cast_transpose
from bert.kernels.fp8.linear import Fp8Linear

from ..plain import CPU, alone
from ..states import same
from .fp8_cases import LARGE, cast_problems, new_target, relative_difference, same_bits

ALONE = alone()
# e4m3 has 3 mantissa bits, e5m2 has 2: relative rounding error of a product of random numbers, with
# some room.
FORWARD_ERROR, BACKWARD_ERROR = 0.045, 0.075
INF, NAN = float("inf"), float("nan")


def _product(rows=48, width=32, outputs=64, device=CPU, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(spread, *shape):
        return (spread * torch.randn(*shape, generator=generator)).to(device, dtype)

    x = draw(1.0, rows, width).requires_grad_()
    weight = draw(0.02, outputs, width).requires_grad_()
    bias = draw(1.0, outputs).requires_grad_()
    return Scaling(2, device), x, weight, bias, draw(1e-6, rows, outputs)


def _run(scaling, x, weight, bias, upstream):
    for tensor in (x, weight, bias):
        tensor.grad = None
    y = Fp8Linear(scaling, 1)(x, weight, bias)
    y.backward(upstream)
    return y.detach(), x.grad, weight.grad, bias.grad


def _check(results, x, weight, bias, upstream):
    y, x_gradient, weight_gradient, bias_gradient = results
    assert relative_difference(y - bias, F.linear(x, weight)) < FORWARD_ERROR
    assert relative_difference(x_gradient, upstream @ weight) < BACKWARD_ERROR
    assert relative_difference(weight_gradient, upstream.t() @ x) < BACKWARD_ERROR
    torch.testing.assert_close(bias_gradient, upstream.sum(0))


@pytest.mark.parametrize("rows", [48, 37], ids=["multiple-of-16", "padded"])
def test_product_and_gradients_are_those_of_linear_within_fp8(rows):
    scaling, *tensors = _product(rows=rows)
    _check(_run(scaling, *tensors), *tensors)  # the first step measures
    scaling.calibrated = True
    scaling.update(ALONE)
    _check(_run(scaling, *tensors), *tensors)


def test_scales_come_from_the_step_before_and_saturate():
    scaling, x, weight, bias, upstream = _product()
    scaling.calibrated = True
    _run(scaling, x, weight, bias, upstream)
    assert scaling.largest[1, INPUT] == x.abs().max()
    assert scaling.largest[1, GRADIENT] == upstream.abs().max()
    scaling.update(ALONE)
    for what, largest, of in ((WEIGHT, 448, weight), (GRADIENT, 57344, upstream)):
        expected = largest / of.abs().max().item()
        assert scaling.scales[1, what].item() == pytest.approx(expected)
    # The other product was not used.
    assert torch.equal(scaling.scales[0], torch.ones(3))
    assert not scaling.largest.any()
    with torch.no_grad():
        # Beyond the scale of the step before: clipped to the format's largest number, not inf.
        x.mul_(4)
    y = Fp8Linear(scaling, 1)(x, weight, bias)
    assert torch.isfinite(y).all()
    scaling.update(ALONE)
    _check(_run(scaling, x, weight, bias, upstream), x, weight, bias, upstream)


def test_several_micro_batches_leave_the_largest_magnitude_unless_it_is_infinite():
    scaling, x, weight, bias, _ = _product()
    layer = Fp8Linear(scaling, 0)
    for factor in (1.0, 8.0, 2.0):
        layer(x * factor, weight, bias)
    assert scaling.largest[0, INPUT].item() == pytest.approx(8 * x.abs().max().item())
    layer(x * INF, weight, bias)
    before = scaling.scales.clone()
    scaling.update(ALONE)
    assert scaling.scales[0, INPUT] == before[0, INPUT]
    assert torch.isfinite(scaling.scales).all()


@pytest.mark.parametrize("exponent", [-20, -33, -34, -36, -38])
def test_a_tensor_of_tiny_numbers_has_a_finite_scale_and_product(exponent):
    """As measured in the first step, and as known in advance."""
    scaling = Scaling(1, CPU)
    layer = Fp8Linear(scaling, 0)
    x, weight = (torch.randn(16, 16).requires_grad_() for _ in range(2))
    for _ in range(2):
        y = layer(x * 10.0**exponent, weight, None)
        y.backward(torch.randn_like(y) * 10.0**exponent)
        assert scaling.update(ALONE)
        for tensor in (y, x.grad, weight.grad, scaling.scales, scaling.inverses):
            assert tensor.isfinite().all()
        assert scaling.inverses.all()


@pytest.mark.parametrize("fast", [False, True])
def test_sums_of_the_backward_pass_are_fast_on_request_alone(fast, monkeypatch):
    asked, product = [], linear.product

    def noted(*given, **named):
        asked.append(named.get("fast", given[6:7]))
        return product(*given, **named)

    monkeypatch.setattr(linear, "product", noted)
    layer = Fp8Linear(Scaling(1, CPU, fast_backward=fast), 0)
    x, weight = (torch.randn(16, 16).requires_grad_() for _ in range(2))
    layer(x, weight, None).sum().backward()
    assert asked == [True, (fast,), (fast,)]


def test_state_restores_scales():
    scaling, *tensors = _product()
    _run(scaling, *tensors)
    scaling.update(ALONE)
    again = Scaling(2, CPU)
    again.load_state_dict({**scaling.state_dict(), "calibrated": True})
    assert same([*scaling.state_tensors()], [*again.state_tensors()])
    assert again.calibrated
    again.load_state_dict({**scaling.state_dict(), "calibrated": False})
    assert not again.calibrated, "the next step measures them"


@pytest.mark.parametrize("largest", [0.0, INF, NAN])
def test_a_tensor_without_a_largest_number_is_not_scaled_in_the_first_step(largest):
    scaling = Scaling(1, CPU)
    target = scaling.target_for(torch.tensor([[0.0, largest]]), 0, INPUT)
    assert (target.scale, target.inverse) == (1, 1)


@pytest.mark.gpu
def test_hardware_product_equals_the_emulated_one(gpu):
    shape = {"rows": 256, "width": 1024, "outputs": 512}
    on_gpu, *tensors = _product(**shape, device=gpu, dtype=torch.bfloat16)
    on_cpu, *copies = _product(**shape, dtype=torch.bfloat16)
    for _ in range(2):
        pairs = zip(_run(on_gpu, *tensors), _run(on_cpu, *copies), strict=True)
        for ours, reference in pairs:
            assert relative_difference(ours.cpu(), reference) < 5e-3
        for scaling in (on_gpu, on_cpu):
            scaling.calibrated = True
            scaling.update(ALONE)
    torch.testing.assert_close(on_gpu.scales.cpu(), on_cpu.scales)


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (144, 272)], ids=str)
def test_kernels_equal_the_cast_of_pytorch_in_both_orders(shape, device):
    assert cast_problems(device, *shape) == {}


@pytest.mark.gpu
def test_kernels_equal_the_cast_of_pytorch_at_real_size(gpu):
    assert cast_problems(gpu, LARGE[0], LARGE[2]) == {}


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("fused", [False, True], ids=["pytorch", "kernel"])
def test_nan_stays_nan_and_what_is_not_finite_is_seen(dtype, bad, fused, request):
    device = request.getfixturevalue("device") if fused else CPU
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
