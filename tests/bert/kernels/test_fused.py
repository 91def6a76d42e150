"""Every fused operation against its reference: result and every gradient, on the cases of
fused_cases.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bert.kernels import OPERATIONS

from .fused_cases import CASES, Case

# An exponential that overflows to infinity is meant: its reciprocal is 0. NumPy warns of it in the
# interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
LARGE, SMALL = (
    [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name, cases in CASES.items()
        for case in cases
        if case.large is large
    ]
    for large in (True, False)
)


def test_every_operation_has_cases():
    assert CASES.keys() == OPERATIONS.keys()


def _double(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_()
    return value


def error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest element, or to 1; nan counts as infinite."""
    difference = (ours.double() - theirs).abs().max().item()
    worst = difference / max(1.0, theirs.abs().max().item())
    return worst if worst == worst else float("inf")


def tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of an operation that may have several."""
    return result if isinstance(result, tuple) else (result,)


def compare(name: str, case: Case, device: torch.device) -> None:
    """Asserts that result and gradients of ``fused`` are those of ``reference`` in fp64."""
    module = OPERATIONS[name]
    ours = case.arguments(device)
    theirs = tuple(_double(value) for value in ours)
    results, expected = tensors(module.fused(*ours)), tensors(module.reference(*theirs))
    errors = {
        "result": max(
            error(a.detach(), b.detach())
            for a, b in zip(results, expected, strict=True)
        )
    }
    generator = torch.Generator().manual_seed(5)
    upstream = [
        torch.randn(a.shape, generator=generator).to(device, a.dtype) for a in results
    ]
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(expected, [gradient.double() for gradient in upstream])
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, Tensor) and a.requires_grad:
            errors[f"gradient of argument {position}"] = error(a.grad, b.grad)
    wrong = {what: worst for what, worst in errors.items() if worst > case.tolerance}
    assert not wrong, f"above {case.tolerance:.1e} ({case.reason}): {wrong}"


@pytest.mark.parametrize(("name", "case"), SMALL)
def test_fused_equals_reference_forward_and_backward(name, case, device):
    compare(name, case, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), LARGE)
def test_fused_equals_reference_at_real_size(name, case, gpu):
    compare(name, case, gpu)


@pytest.mark.parametrize(
    ("name", "case"), [param for param in SMALL if "bfloat16" in param.id]
)
def test_the_same_input_gives_the_same_bits(name, case, device):
    results = []
    for _ in range(2):
        arguments = case.arguments(device)
        result = tensors(OPERATIONS[name].fused(*arguments))
        sum(tensor.float().square().sum() for tensor in result).backward()
        results.append(
            [
                *result,
                *(
                    a.grad
                    for a in arguments
                    if isinstance(a, Tensor) and a.requires_grad
                ),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
