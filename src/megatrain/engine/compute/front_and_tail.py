"""The model's own code before its layers and behind them: front, tail and scores.

They are the edges of a model, and run without asking the device anything.

Models inspect their inputs to decide what to do: is there padding at all, is this a packed row? On
a device with its own memory each such question stops the host until the device has answered,
once per micro-batch and edge, and the pipeline runs dry. But the answers are known:

    front         the host has the inputs too. It runs the front ahead of the step, with weights of
                  zero and without large tensors (models/probing/host_answers.py), and its answers
                  are given to both runs on the device, in FORWARD(0, m) and BACKWARD(0, m)
    tail, scores  before its last layer the model sees our stand-ins, the same for every input
                  of a shape: the first answers hold for all of them. Scores that could be traced
                  (models/probing/logits.py) ask nothing

A front with media runs on the device alone, and waits for it: the host would compute projectors.

A model's next operation depends on tensors only by its questions. So where it asked nothing, it
never asks anything about inputs of these shapes, and the host need not run at all.

The tail may run over tiles of tokens. A norm keeps and makes several times what it is given. It
acts on each token alone, as everything does that models have there, so over tiles only its input,
its output and the gradient exist for the row; backward computes each tile once more.

Laws (tests/engine/compute/test_front_and_tail.py; of tiles: test_tail.py)
    1. The first time, for each set of inputs and each mode (train, eval), the device is asked too:
       answers are used only where host and device have asked the same and got the same answers.
    2. A device without its own memory has one run and no questions.
    3. A model that remembers the inputs it had before (dynamic rotary tables) is asked on the host
       each time just before it runs on the device, so that both remember the same.
    4. Over tiles, rows and the gradient of hidden states are those of the full row, bit for bit, in
       every family; those of params are summed in fp32, in order of tiles.
    5. A row that is one tile, or without tiles, is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatrain.engine.compute.graph import gradients_of
from megatrain.engine.compute.layers import AddGradients, tiles_of
from megatrain.media import MEDIA
from megatrain.models.probing.host_answers import (
    Answers,
    answers_alone,
    run_answered,
    run_listening,
)
from megatrain.models.probing.stand_ins import Call
from megatrain.models.template import NamedTensors, Template, one_memory

Result = TypeVar("Result")


class Edges:
    """Front, tail and scores of `template`, which is `on_host` or its likeness on a device."""

    def __init__(self, on_host: Template, template: Template, *, answers: bool = True) -> None:
        """`answers`: the device can be asked, and is, the first time."""
        self._on_host = on_host
        self._template = template
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
        if not self._asks_device or self._remembers or MEDIA in host_inputs:
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
        if not self._asks_device or self._trusted.get(key) is False or MEDIA in inputs:
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


class Tail:
    """One call of a model's tail, forward and back."""

    def __init__(
        self,
        edges: Edges,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        tile: int | None,
    ) -> None:
        """`hidden` (rows, length, width) wants a gradient if it is to be passed on.

        `tile` has so many tokens; None to compute every row at once.
        """
        self._edges = edges
        self._weights = weights
        self._hidden = hidden
        self._tiles = [] if tile is None else tiles_of(hidden, tile)
        self._graph: Tensor | None = None

    def rows(self, *, goes_back: bool = True) -> Tensor:
        """Return the rows (tokens, width) that the output projection gets, without a graph.

        `goes_back`: a call of `back` follows.
        """
        if len(self._tiles) < 2:
            with torch.set_grad_enabled(goes_back):
                rows = self._edges.tail(self._weights, self._hidden)
            self._graph = rows if goes_back else None
            return rows.detach()
        found: Tensor | None = None
        with torch.no_grad():
            for columns in self._tiles:
                part = self._hidden[:, columns]
                rows = self._edges.tail(self._weights, part).view(*part.shape[:2], -1)
                if found is None:
                    found = rows.new_empty((*self._hidden.shape[:2], rows.shape[-1]))
                found[:, columns] = rows
        assert found is not None
        return found.flatten(0, 1)

    def back(self, d_rows: Tensor, add: AddGradients) -> Tensor | None:
        """Add up the gradients of the weights; return that of `hidden`, if it is wanted.

        It may take the place of `d_rows`.
        """
        hidden, passes = self._hidden, self._hidden.requires_grad
        if self._graph is not None:
            grads = gradients_of([(self._graph, d_rows)], self._weights, hidden)
            self._graph = None
            add(grads.params)
            return grads.given
        d_rows = d_rows.view(*hidden.shape[:2], -1)
        fits = (d_rows.shape, d_rows.dtype) == (hidden.shape, hidden.dtype)
        d_hidden = d_rows if fits else torch.empty_like(hidden)
        for columns in self._tiles:
            part = hidden[:, columns].detach().requires_grad_(passes)
            with torch.enable_grad():
                rows = self._edges.tail(self._weights, part)
            d_tile = d_rows[:, columns].reshape(rows.shape)
            grads = gradients_of([(rows, d_tile)], self._weights, part)
            add(grads.params)
            if grads.given is not None and not one_memory(grads.given, d_tile):
                d_hidden[:, columns] = grads.given  # a tail that does nothing gives d_tile back
            del grads, rows
        return d_hidden if passes else None


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
