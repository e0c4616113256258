"""Which tensors a forward reads: the others are not a part of the text decoder.

A tower is not found by its name. The model's own forward runs over tokens, and every function of
torch that gets one of its tensors is noted: a tensor that none got is carried, also one of a module
that is called (a newline between images), and a tensor that is read past its module is not.

Laws (tests/models/chain/test_reads.py)
    1. A tensor is noted if a function gets it, alone or in a list, and not for its shape or dtype.
    2. A product with a tensor larger than any projection beside layers is refused before it is
       made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatrain.errors import NotSplittable
from megatrain.models.stand_ins import tensors_in


class Reads(TorchFunctionMode):
    """While it is entered, notes which of `tensors` are read."""

    def __init__(self, tensors: Mapping[str, Tensor], too_large: frozenset[str]) -> None:
        """Reading one of `too_large` raises NotSplittable."""
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._tensors = tensors  # so that no other tensor gets the id of one of these
        self._too_large = too_large
        self.names: set[str] = set()
        """Of the tensors that were read."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for tensor in tensors_in((args, kwargs or {})):
                name = self._names.get(id(tensor))
                if name in self._too_large:
                    raise NotSplittable(f"{name} is outside the layers and too large to multiply")
                if name is not None:
                    self.names.add(name)
        return func(*args, **(kwargs or {}))
