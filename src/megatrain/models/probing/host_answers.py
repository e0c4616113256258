"""Questions of a model's own code about its inputs, answered by the host.

A front looks at its inputs, makes hidden states, rotary tables and masks of them, and asks for one
number or none: is there padding, is this row packed? On a device each question stops the host until
the device has answered. There are three ways to run such code:

    answers_alone(run)         on the host: returns the answers, and computes no large tensor
    run_listening(run)         on a device that is asked: returns the result, and its answers
    run_answered(run, answers) on a device that is not asked: the answers are given

A large result, of more than LARGE_ELEMENTS, is not computed by the first, nor what is made of it.
It has shape, dtype and device, and is computed only if a number is asked that depends on it.

Laws (tests/models/probing/test_host_answers.py)
    1. Answers are those of the same code run in full.
    2. A result that no question depends on is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from megatrain.models.probing.dispatch import Operation, intercepted

QUESTION = torch.ops.aten._local_scalar_dense.default
"""The operation behind `bool(tensor)`, `tensor.item()` and their like."""
LARGE_ELEMENTS = 4096
Answers = list[tuple[torch.dtype, Any]]
"""The dtype and the value of every number that was asked for, in turn."""
Result = TypeVar("Result")


def answers_alone(run: Callable[[], object]) -> Answers:
    """Return the answers to what `run` asks. Raises CannotWait if it must be run in full."""
    postponed = _Postponed()
    with intercepted(postponed):
        run()
    return postponed.answers


def run_listening(run: Callable[[], Result]) -> tuple[Result, Answers]:
    """Return the result of `run`, and the answers that it got."""
    answers: Answers = []

    def listen(func: Operation, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func is QUESTION:
            answers.append((args[0].dtype, result))
        return result

    with intercepted(listen), _Filling():
        return run(), answers


def run_answered(run: Callable[[], Result], answers: Answers) -> Result:
    """Return the result of `run`, whose questions get these answers in turn."""
    left = iter(answers)

    def answer(func: Operation, args: Any, kwargs: Any) -> Any:
        if func is not QUESTION:
            return func(*args, **kwargs)
        dtype, value = next(left, (None, None))
        assert dtype is args[0].dtype, "the device got another question than the host"
        return value

    with intercepted(answer), _Filling():
        return run()


class _Filling(TorchFunctionMode):
    """Makes numbers on the device by filling, where torch.tensor would copy them and wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.tensor
            and kwargs.get("device")
            and isinstance(args[0], bool | int | float)
        ):
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


class CannotWait(Exception):
    """This code writes into tensors that are not computed yet: it must be run in full."""


class _Postponed:
    """Handles operations without computing large results."""

    def __init__(self) -> None:
        self.answers: Answers = []
        self._needed: set[int] = set()
        """Storages that postponed results will be computed from."""

    def __call__(self, func: Operation, args: Any, kwargs: Any) -> Any:
        # Modes that watch the device must not see what the host asks itself.
        with _disable_current_modes():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is QUESTION:
            answer = func(_computed(args[0]))
            self.answers.append((args[0].dtype, answer))
            return answer
        if func._schema.is_mutable:
            return self._written(func, args, kwargs)
        form = _form(func, args, kwargs)
        waits = any(isinstance(given, _Later) for given in _tensors((args, kwargs)))
        if waits or any(part.numel() > LARGE_ELEMENTS for part in _tensors(form)):
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
    """A tensor that has a shape, and is computed when it is asked about."""

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
        self.compute = compute
        self.is_needed = False

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
