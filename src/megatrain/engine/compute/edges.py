"""The edges of a model, front, tail and scores, without asking the device anything.

Models inspect their inputs to decide what to do: is there padding at all, is this a packed row? On
a device with its own memory each such question stops the host until the device has answered,
once per micro-batch and edge, and the pipeline runs dry. But the answers are known:

    front         the host has the inputs too. It runs the front first, with weights of zero, and
                  its answers are given to the run on the device
    tail, scores  before its last layer the model sees our stand-ins, the same for every input
                  of a shape: the first answers hold for all of them. Scores that could be traced
                  (models/scores.py) ask nothing

Laws (tests/engine/compute/test_edges.py)
    1. The first time, for each set of inputs and each mode (train, eval), the device is asked too:
       answers are used only where host and device have asked the same and got the same answers.
    2. A device without its own memory has one run and no questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.models.stand_ins import Call
from megatrain.models.template import NamedTensors, Template

_QUESTION = torch.ops.aten._local_scalar_dense.default
Answers = list[tuple[torch.dtype, Any]]
Result = TypeVar("Result")


class Edges:
    """Front, tail and scores of `template`, which is `on_host` or its likeness on a device."""

    def __init__(self, on_host: Template, template: Template, *, answers: bool = True) -> None:
        """`answers`: the device can be asked, and is, the first time."""
        self._on_host, self._template = on_host, template
        self._answers = answers
        self._asks_device = template is not on_host
        self._trusted: dict[tuple[object, ...], bool] = {}
        self._remembered: dict[tuple[object, ...], Answers] = {}

    def front(
        self,
        weights: NamedTensors,
        host_inputs: Mapping[str, Any],
        inputs: Mapping[str, Any],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Call]]:
        """Return the embedding's output, and the call that each layer is to get."""

        def run() -> tuple[Tensor, list[Call]]:
            return self._template.front(weights, inputs, rows)

        key = (self._template.model.training, frozenset(inputs))
        if not self._asks_device or self._trusted.get(key) is False:
            return run()
        answers = self._ask_host(lambda: self._on_host.front({}, host_inputs))
        if key in self._trusted or not self._answers:
            return _answered(run, answers)
        result, told = _listened(run)
        self._trusted[key] = told == answers
        return result

    def tail(self, weights: NamedTensors, hidden: Tensor) -> Tensor:
        """Return the rows (tokens, width) that the output projection gets after `hidden`."""

        def on_host() -> Tensor:
            return self._on_host.tail({}, torch.zeros((), dtype=hidden.dtype).expand(hidden.shape))

        key = ("tail", *hidden.shape)
        return self._repeated(key, lambda: self._template.tail(weights, hidden), on_host)

    def scores(self, logits: Tensor) -> Tensor:
        """Return what the model makes of `logits` (rows, vocabulary) behind its projection."""
        if self._template.scores_traced:
            return self._template.scores(logits)

        def on_host() -> Tensor:
            return self._on_host.scores(torch.zeros((1, logits.shape[1]), dtype=logits.dtype))

        return self._repeated(("scores",), lambda: self._template.scores(logits), on_host)

    def _ask_host(self, run: Callable[[], object]) -> Answers:
        """Return the host's answers; its random numbers continue as if it had not run."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _listened(run)[1]

    def _repeated(
        self, key: tuple[object, ...], run: Callable[[], Result], on_host: Callable[[], object]
    ) -> Result:
        if not self._asks_device:
            return run()
        key = (self._template.model.training, *key)
        if key not in self._remembered and self._answers:
            result, self._remembered[key] = _listened(run)
            return result
        if key not in self._remembered:
            self._remembered[key] = self._ask_host(on_host)
        return _answered(run, self._remembered[key])


def _listened(run: Callable[[], Result]) -> tuple[Result, Answers]:
    with _Listening() as mode, _Filling():
        return run(), mode.answers


def _answered(run: Callable[[], Result], answers: Answers) -> Result:
    with _Answering(answers), _Filling():
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


class _Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every question about a tensor, with its answer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: Answers = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _QUESTION:
            self.answers.append((args[0].dtype, result))
        return result


class _Answering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers questions from a list, in place of the device."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = iter(answers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _QUESTION:
            return func(*args, **(kwargs or {}))
        dtype, answer = next(self._answers, (None, None))
        assert dtype is args[0].dtype, "the device got another question than the host"
        return answer
