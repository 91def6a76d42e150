"""What the layers of a model share in one forward pass: its sequences, its dropout, what is computed once for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from bert.kernels.dropout import DropoutSites


class ForwardPass:
    """One forward pass over a varlen batch. The model makes one in each call and hands it down to the kernels.

    cu_seqlens: int32 [S+1], offsets of the sequences, on the device of the pass; they must not change while it lasts.
    max_seqlen: no sequence is longer.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen
        self.sites = DropoutSites(cu_seqlens.device)
        self._made: dict[Hashable, Tensor] = {}

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` computes, computed once in the pass for each ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
