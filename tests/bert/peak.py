"""Counts the memory of tensors on any device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Peak bytes held by tensors, counted operation by operation, on any device, meta included.

    ``now`` and ``most``: current and peak bytes of tensors made inside and of ``before``, those
    that existed.
    """

    def __init__(self, before=()):
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}
        for tensor in before:
            self._note(tensor)

    def _note(self, tensor):
        # By storage, so that views cost nothing.
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self.now += size
            self.most = max(self.most, self.now)
            # The only sign of a tensor's end that Python gives.
            self._known[key] = weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self.now -= size
        self._known.pop(key, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs the operation and notes its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result
