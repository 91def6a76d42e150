"""The most bytes that tensors hold at once, counted operation by operation, on any device, the meta device included."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts while inside. ``now`` and ``most``: bytes of what was made inside and of ``before``, what was there."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}
        for tensor in before:
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        self._known[key] = weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.now -= size
        self._known.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and notes its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result
