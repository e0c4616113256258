"""A count of memory that knows nothing of devices: every tensor that torch makes in this thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts memory that torch makes, from when it is made until nothing uses it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        for given in self._storages((args, kwargs)):
            if given._cdata not in self._known:  # made before
                self._known.add(given._cdata)
                weakref.finalize(given, self._known.discard, given._cdata)
        result = func(*args, **(kwargs or {}))
        for storage in self._storages(result):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes

    @staticmethod
    def _storages(tree: object) -> Iterator[Any]:
        return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
