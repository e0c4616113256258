"""Nested arguments and results of modules: their tensors, by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

TensorPath = tuple[object, ...]
"""Keys and numbers, from the outside in."""


def tensors_by_path(value: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """Yield every tensor inside `value`, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_by_path(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_by_path(item, (*path, number))


def with_tensors(
    value: Any, change: Callable[[TensorPath, Tensor], Any], path: TensorPath = ()
) -> Any:
    """Return `value` with what `change` makes of each of its tensors in that tensor's place."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [with_tensors(item, change, (*path, n)) for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def growing(short: Any, long: Any) -> dict[TensorPath, tuple[int, ...]]:
    """Return, by path, the dimensions in which tensors of `long` exceed those of `short`.

    Raises ValueError if the two are not made alike.
    """
    before, after = dict(tensors_by_path(short)), dict(tensors_by_path(long))
    if before.keys() != after.keys():
        raise ValueError("other tensors for another length")
    found = {}
    for path, tensor in after.items():
        sizes = before[path].shape
        if len(sizes) != tensor.dim():
            raise ValueError("another number of dimensions for another length")
        found[path] = tuple(d for d, size in enumerate(tensor.shape) if size != sizes[d])
    return found
