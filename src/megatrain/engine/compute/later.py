"""Answers of a model's own code without its large tensors.

A front looks at its inputs, makes hidden states, rotary tables and masks of them, and asks for one
number or none. Under `Listener` a large result, of more than PUT_OFF_ELEMENTS, is not computed, nor
what is made of it: it has form, dtype and device, and is computed only if a number is asked that
depends on it.

    with Listener() as listener:
        template.front({}, inputs)
    listener.answers                    # dtype and value of every number that was asked for

Laws (tests/engine/compute/test_later.py)
    1. Answers are those of the same code run in full.
    2. What no question depends on is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

QUESTION = torch.ops.aten._local_scalar_dense.default
PUT_OFF_ELEMENTS = 4096
Answers = list[tuple[torch.dtype, Any]]


class CannotWait(Exception):
    """This code writes into tensors that are not computed yet: it must be run in full."""


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every question about a tensor, with its answer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: Answers = []
        self._needed: set[int] = set()
        """Storages that what is not computed yet will be computed from."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Modes that watch the device must not see what the host asks itself.
        with _disable_current_modes():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is QUESTION:
            answer = func(_computed(args[0]))
            self.answers.append((args[0].dtype, answer))
            return answer
        if func._schema.is_mutable:
            return self._written(func, args, kwargs)
        form = _form(func, args, kwargs)
        waits = any(isinstance(given, _Later) for given in _tensors((args, kwargs)))
        if waits or any(part.numel() > PUT_OFF_ELEMENTS for part in _tensors(form)):
            return self._put_off(form, func, args, kwargs)
        return func(*args, **kwargs)

    def _put_off(self, form: Any, func: Any, args: Any, kwargs: Any) -> Any:
        for given in _tensors((args, kwargs)):
            if isinstance(given, _Later):
                given.is_needed = True
            else:
                self._needed.add(given.untyped_storage()._cdata)
        found: list[Any] = []

        def part(number: int) -> Tensor:
            if not found:
                result = func(*tree_map(_computed, args), **tree_map(_computed, kwargs))
                found.append(_tensors(result))
            result_part: Tensor = found[0][number]
            return result_part

        numbers = iter(range(len(_tensors(form))))

        def later(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            number = next(numbers)
            return _Later(value, lambda: part(number))

        return tree_map(later, form)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write into a tensor: into the first argument, and if nothing was made of it before."""
        target, others = args[0], (args[1:], kwargs)
        if not isinstance(target, Tensor) or not _writes_first_alone(func):
            raise CannotWait(str(func))
        if not isinstance(target, _Later):
            if target.untyped_storage()._cdata in self._needed:
                raise CannotWait(str(func))
            rest, named = tree_map(_computed, others)
            return func(target, *rest, **named)
        if target.is_needed:
            raise CannotWait(str(func))
        before = target.compute

        def compute() -> Tensor:
            rest, named = tree_map(_computed, others)
            written: Tensor = func(before(), *rest, **named)
            return written

        target.compute = compute
        return target


class _Later(Tensor):
    """Has a form, and is computed when it is asked about."""

    compute: Callable[[], Tensor]
    is_needed: bool
    """Whether other tensors will be computed from it as it is now."""

    @staticmethod
    def __new__(cls, form: Tensor, compute: Callable[[], Tensor]) -> _Later:
        made: _Later = Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride(),
            dtype=form.dtype,
            device=torch.device("cpu"),
        )
        return made

    def __init__(self, form: Tensor, compute: Callable[[], Tensor]) -> None:
        self.compute, self.is_needed = compute, False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs or {}))


def _computed(value: Any) -> Any:
    if not isinstance(value, _Later):
        return value
    result = value.compute()
    value.compute = lambda: result
    return result


def _form(func: Any, args: Any, kwargs: Any) -> Any:
    """Return results on the meta device: their forms, without their elements."""
    named = tree_map(_without_elements, kwargs)
    if any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = torch.device("meta")
    return func(*tree_map(_without_elements, args), **named)


def _without_elements(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _writes_first_alone(func: Any) -> bool:
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    return written[:1] == [True] and not any(written[1:])
