"""A stand-in for quack-kernels: two of its functions as documented, computed by PyTorch on a CPU.

As strict as the package: matrices whose last or last but one stride is 1, of one type, no argument that it has not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = {"gelu_tanh_approx": "tanh", "gelu_erf": "none"}


def _product(a: Tensor, b: Tensor) -> Tensor:
    assert a.ndim == b.ndim == 2
    assert a.dtype == b.dtype
    assert all(1 in matrix.stride() for matrix in (a, b))
    return a @ b


def gemm_act(
    A: Tensor, B: Tensor, *, bias: Tensor, activation: str, store_preact: bool = True, tuned: bool = True
) -> tuple[Tensor | None, Tensor]:
    """(A B + bias, GELU of it); the first only if it is to be stored."""
    assert not torch.is_grad_enabled()
    linear = _product(A, B) + bias
    return linear if store_preact else None, F.gelu(linear, approximate=FORMS[activation])


def gemm_dact(A: Tensor, B: Tensor, PreAct: Tensor, activation: str, *, tuned: bool = True) -> tuple[Tensor, Tensor]:
    """(A B times GELU's slope at PreAct, GELU of PreAct)."""
    with torch.enable_grad():
        linear = PreAct.detach().requires_grad_()
        activated = F.gelu(linear, approximate=FORMS[activation])
        (inner,) = torch.autograd.grad(activated, linear, _product(A, B))
    return inner, activated.detach()
