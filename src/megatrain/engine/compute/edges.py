"""The edges of a model, front, tail and scores, without asking the device anything.

Models inspect their inputs to decide what to do: is there padding at all, is this a packed row? On
a device with its own memory each such question stops the host until the device has answered,
once per micro-batch and edge, and the pipeline runs dry. But the answers are known:

    front         the host has the inputs too. It runs the front ahead of the step, with weights of
                  zero and without large tensors (models/probing/host_answers.py), and its answers
                  are given to both runs on the device, in FORWARD(0, m) and BACKWARD(0, m)
    tail, scores  before its last layer the model sees our stand-ins, the same for every input
                  of a shape: the first answers hold for all of them. Scores that could be traced
                  (models/probing/logits.py) ask nothing

What a model does next depends on tensors only by its questions. So where it asked nothing, it never
asks anything about inputs of these shapes, and the host need not run at all.

Laws (tests/engine/compute/test_edges.py)
    1. The first time, for each set of inputs and each mode (train, eval), the device is asked too:
       answers are used only where host and device have asked the same and got the same answers.
    2. A device without its own memory has one run and no questions.
    3. A model that remembers the inputs it had before (dynamic rotary tables) is asked on the host
       each time just before it runs on the device, so that both remember the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatrain.models.probing.host_answers import (
    Answers,
    answers_alone,
    run_answered,
    run_listening,
)
from megatrain.models.probing.stand_ins import Call
from megatrain.models.template import NamedTensors, Template

Result = TypeVar("Result")


class Edges:
    """Front, tail and scores of `template`, which is `on_host` or its likeness on a device."""

    def __init__(self, on_host: Template, template: Template, *, answers: bool = True) -> None:
        """`answers`: the device can be asked, and is, the first time."""
        self._on_host, self._template = on_host, template
        self._answers = answers
        self._asks_device = template is not on_host
        self._remembers = any(map(_remembers_inputs, template.model.modules()))
        self._trusted: dict[tuple[object, ...], bool] = {}
        self._remembered: dict[tuple[object, ...], Answers] = {}
        self._silent: set[tuple[object, ...]] = set()
        """Forms of inputs about which the front asks nothing."""

    def asked(self, host_inputs: Mapping[str, Any], *, by_document: bool) -> Answers | None:
        """Return the answers to what the front will ask about these inputs, ahead of its run.

        None: not ahead. `by_document`: documents are attended to one by one meanwhile.
        """
        if not self._asks_device or self._remembers:
            return None
        if self._trusted.get(self._key(host_inputs)) is False:
            return None
        form = (self._template.model.training, by_document, *_form(host_inputs))
        if form in self._silent:
            return []
        answers = self._ask_host(lambda: self._on_host.front({}, host_inputs))
        if not answers and None not in form:
            self._silent.add(form)
        return answers

    def front(
        self,
        weights: NamedTensors,
        host_inputs: Mapping[str, Any],
        inputs: Mapping[str, Any],
        rows: Tensor | None = None,
        answers: Answers | None = None,
    ) -> tuple[Tensor, list[Call]]:
        """Return the embedding's output, and the call that each layer is to get.

        `answers` are those of `asked`; without them the host is asked now.
        """

        def run() -> tuple[Tensor, list[Call]]:
            return self._template.front(weights, inputs, rows)

        key = self._key(inputs)
        if not self._asks_device or self._trusted.get(key) is False:
            return run()
        if answers is None:
            answers = self._ask_host(lambda: self._on_host.front({}, host_inputs))
        if key in self._trusted or not self._answers:
            return run_answered(run, answers)
        result, told = run_listening(run)
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

    def _key(self, inputs: Mapping[str, Any]) -> tuple[object, ...]:
        return self._template.model.training, frozenset(inputs)

    def _ask_host(self, run: Callable[[], object]) -> Answers:
        """Return the host's answers; its random numbers continue as if it had not run."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if not self._remembers:
                try:
                    return answers_alone(run)
                except Exception:  # code that cannot do without its tensors, or is at fault itself
                    pass
            return run_listening(run)[1]

    def _repeated(
        self, key: tuple[object, ...], run: Callable[[], Result], on_host: Callable[[], object]
    ) -> Result:
        if not self._asks_device:
            return run()
        key = (self._template.model.training, *key)
        part = key[:2]
        if key in self._remembered:
            return run_answered(run, self._remembered[key])
        if self._answers and not self._trusted.get(part, False):
            result, told = run_listening(run)
            self._remembered[key] = told
            self._trusted.setdefault(part, self._ask_host(on_host) == told)
            return result
        self._remembered[key] = self._ask_host(on_host)
        return run_answered(run, self._remembered[key])


def _remembers_inputs(module: nn.Module) -> bool:
    """Return whether a module's rotary tables depend on the rows that it had before."""
    types = getattr(module, "rope_type", None)
    return "dynamic" in (types.values() if isinstance(types, dict) else [types])


def _form(inputs: Mapping[str, Any]) -> list[object]:
    """Return all that inputs tell without a question, in turn; None if that is not known."""
    form: list[object] = []
    for name, value in sorted(inputs.items()):
        plain = isinstance(value, bool | int | str)
        form += [name, value if plain else None]
        if isinstance(value, Tensor):
            form[-1] = (value.shape, value.dtype)
    return form
