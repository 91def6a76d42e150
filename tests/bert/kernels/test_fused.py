"""Every fused operation against its reference: result and every gradient, on the cases of fused_cases.py."""

import pytest
import torch
from torch import Tensor

from bert.kernels import OPERATIONS

from ..states import same
from .fused_cases import CASES, Case, errors_of, tensors

# An exponential that overflows to infinity is meant: its reciprocal is 0. NumPy warns of it in the
# interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
NAMED = [pytest.param(name, case, id=f"{name}-{case.name}") for name, cases in CASES.items() for case in cases]  # fmt: skip
SMALL = [param for param in NAMED if not param.values[1].large]
LARGE = [param for param in NAMED if param.values[1].large]


def test_every_operation_has_cases():
    assert CASES.keys() == OPERATIONS.keys()


def compare(name: str, case: Case, device: torch.device) -> None:
    """Asserts that result and gradients of ``fused`` are those of ``reference`` in fp64."""
    errors = errors_of(OPERATIONS[name], case, device)
    wrong = {what: worst for what, worst in errors.items() if worst > case.tolerance}
    assert not wrong, f"above {case.tolerance:.1e} ({case.reason}): {wrong}"


@pytest.mark.parametrize(("name", "case"), SMALL)
def test_fused_equals_reference_forward_and_backward(name, case, device):
    compare(name, case, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), LARGE)
def test_fused_equals_reference_at_real_size(name, case, gpu):
    compare(name, case, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), [*SMALL, *LARGE])
def test_the_same_input_gives_the_same_bits(name, case, gpu):
    results = []
    for _ in range(2):
        arguments = case.arguments(gpu)
        result = tensors(OPERATIONS[name].fused(*arguments))
        sum(tensor.float().square().sum() for tensor in result).backward()
        drawn = (a.grad for a in arguments if isinstance(a, Tensor) and a.requires_grad)
        results.append([*result, *drawn])
    assert same(*results)
