"""Blocks as pure functions of weights they do not own: front, layers, tail, scores.

    front   inputs --------> hidden states, and the arguments of every layer   (embedding block)
    layer   hidden states -> hidden states                                     (each layer block)
    tail    hidden states -> what enters the output projection                 (head block)
    scores  logits --------> logits                                (soft-cap, scale: no weights)

All four are the model's own code. A layer is its own module, called with the arguments that the
model's forward would have given it. Front, tail and scores are the model's forward itself, with
stand-ins that mark where one part ends and the next begins. Weights that a part does not need are
stand-ins too, so that it cannot read them by mistake.

Weights are bound by `functional_call` for the time of a call; nothing is copied or kept. The
skeleton is changed during a call and restored after it: one caller at a time.

Laws (tests/models/test_template.py)
    1. front, layers, tail, projection and scores give the logits of the plain model, bit for bit.
    2. No part reads a weight that it was not given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from megatrain.media import MEDIA, MediaItem
from megatrain.models import optional
from megatrain.models.classes import scores_texts
from megatrain.models.decoder import Decoder
from megatrain.models.documents import (
    attending_in_graph,
    by_document,
    masks_put_off,
    with_packed_masks,
)
from megatrain.models.layer_call import LayerOutput, apply_layer, has_cache
from megatrain.models.passed import shared_mapping
from megatrain.models.probing.dispatch import intercepted
from megatrain.models.probing.logits import Function, TracedScores, Tracer, examined
from megatrain.models.probing.stand_ins import (
    Call,
    ForwardEnded,
    head_replaced,
    layers_replaced,
    rows_looked_up,
    stand_in_weights,
)

if TYPE_CHECKING:
    from megatrain.models.compiled import Backend
    from megatrain.models.probing.tile_cuts import LayerSample
    from megatrain.models.tiled_layer import Cut, CutLayer

NamedTensors = Mapping[str, Tensor]
"""Params by their names in the model."""
_CUTS: WeakKeyDictionary[PreTrainedModel, list[Cut | None]] = WeakKeyDictionary()
"""Cuts of skeletons that were tiled before: a model can have several engines, one after another."""


class Template:
    """The parts of one decoder."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        compile: bool = False,
        backend: Backend = "inductor",
        routed: bool = False,
        tiled: bool = False,
    ) -> None:
        """`compile`: layers are compiled, those of equal structure once (compiled.py).

        `routed`: `routed_layer` returns router logits too. `tiled`: find where layers can be cut.
        """
        self._decoder = decoder
        self._routed = routed
        if routed:
            optional.balance.record_router_logits(decoder.model, decoder.layers_path)
        self._modules = list(decoder.layers)
        self._regions = (
            optional.compiled.Regions(self._modules, backend, routed=routed) if compile else None
        )
        self._names = [{name for name, _ in layer.named_parameters()} for layer in self._modules]
        self._stand_ins = {
            name: zero.detach()
            for name, zero in stand_in_weights(
                decoder.model, decoder.layers_path, decoder.head_path
            ).items()
        }
        self._traced = self._find_scores()
        self.bytes_per_token = self._find_width()
        """Bytes of hidden states per token, as a layer gets them."""
        self.cuts: list[Cut | None] = self._find_cuts() if tiled else [None] * len(self._modules)
        """Cut of each layer; None where it is not cut into tiles."""

    def placed(self, place: Callable[[Tensor], Tensor]) -> Template:
        """Return this template for a device; `place` returns a tensor's copy there."""
        other = copy.copy(self)
        other._decoder = self._decoder.placed(place)
        other._modules = list(other._decoder.layers)
        if self._regions is not None:
            other._regions = optional.compiled.Regions(
                other._modules, self._regions.backend, routed=self._routed
            )
        zeros = {zero.dtype: zero for zero in self._stand_ins.values()}
        placed = {dtype: place(zero.new_zeros(())) for dtype, zero in zeros.items()}
        other._stand_ins = {n: placed[z.dtype].expand(z.shape) for n, z in self._stand_ins.items()}
        return other

    @property
    def model(self) -> PreTrainedModel:
        """The skeleton: its mode, train or eval, is the mode of all parts."""
        return self._decoder.model

    def front(
        self, weights: NamedTensors, inputs: Mapping[str, Any], rows: Tensor | None = None
    ) -> tuple[Tensor, list[Call]]:
        """Return the embedding's output, and the call that each layer is to get.

        `rows` is the row of each token in a table that does not have all tokens.
        """
        first: list[Tensor] = []
        calls: list[Call] = []
        answers: list[Tensor] = []
        inputs = dict(inputs)
        media: Sequence[MediaItem] = inputs.pop(MEDIA, ())

        def receive(call: Call, hidden: Tensor) -> Tensor:
            first.append(hidden)
            if answers and not one_memory(hidden, answers[0]):  # features of several levels
                call = replace(call, added=hidden)
            calls.append(call)
            if len(calls) == len(self._modules):
                raise ForwardEnded
            if not media:
                return hidden
            if not answers:  # what is added to zero is itself
                answers.append(torch.zeros_like(hidden))
            return answers[0]

        decoder = self._decoder
        inputs = with_packed_masks(decoder.config, decoder.model.dtype, inputs)
        with (
            nullcontext()
            if decoder.towers is None
            else optional.towers.media_given(decoder.model, decoder.towers, media),
            layers_replaced(decoder.layers, receive, decoder.num_layer_outputs),
            rows_looked_up(decoder.model.get_input_embeddings(), rows),
        ):
            self._forward(weights, inputs)
        return first[0], calls

    def routed_layer(self, weights: NamedTensors, hidden: Tensor, call: Call) -> LayerOutput:
        """Return what the layer of `call` makes of `hidden`, and the logits of its routers."""
        bound, module = self.bound(weights, call), self._modules[call.layer]
        # A cache grows by a token with each call: every length would be compiled again. A mapping
        # that layers leave tensors in is not an output of a graph.
        if self._regions is not None and not has_cache(call) and shared_mapping(call) is None:
            with attending_in_graph() as for_graph:
                args = tuple(map(for_graph, call.args))
                kwargs = {name: for_graph(value) for name, value in call.kwargs.items()}
                return self._regions.call(call.layer, bound, hidden, args, kwargs)
        return apply_layer(module, bound, hidden, call.args, call.kwargs, self._routed)

    def cut_layer(self, call: Call) -> CutLayer | None:
        """Return the layer of `call` as parts that run over tiles; None if it is to run whole."""
        cut = self.cuts[call.layer]
        if cut is None or has_cache(call):
            return None
        return optional.tiled_layer.CutLayer(self._modules[call.layer], cut, routed=self._routed)

    def bound(self, weights: NamedTensors, call: Call) -> dict[str, Tensor]:
        """Return the weights of a layer by their names in its module."""
        prefix = f"{self._decoder.layers_path}.{call.layer}."
        bound = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        names = self._names[call.layer]
        # A weight left on meta is not always an error in torch: a product with it gives noise.
        assert bound.keys() == names, f"layer {call.layer} lacks {names - bound.keys()}"
        return bound

    def tail(self, weights: NamedTensors, hidden: Tensor) -> Tensor:
        """Return the rows (tokens, width) that the output projection gets after `hidden`."""
        received: list[Tensor] = []

        def receive(rows: Tensor) -> Tensor:
            received.append(rows)
            raise ForwardEnded

        self._run_tail(weights, hidden, receive)
        return received[0].reshape(-1, received[0].shape[-1])

    @property
    def changes_logits(self) -> bool:
        """Whether `scores` does anything."""
        return self._traced.changes

    @property
    def scores_traced(self) -> bool:
        """Whether `scores` runs without the model's forward."""
        return not self._traced.changes or self._traced.function is not None

    def scores(self, logits: Tensor) -> Tensor:
        """Return what the model makes of `logits` (rows, vocabulary) behind its projection."""
        if not self._traced.changes:
            return logits
        return (self._traced.function or self._own_scores)(logits)

    def _own_scores(self, logits: Tensor) -> Tensor:
        return self._behind_projection(logits, lambda _: None)[0]

    def _behind_projection(self, logits: Tensor, begin: Callable[[Tensor], None]) -> Tensor:
        """Run the model's forward; `begin` gets its logits (1, rows, vocabulary), when they are."""
        width = self._projection.shape[1]
        hidden = logits.new_zeros((1, 1, width), dtype=self._decoder.model.dtype)
        given = logits[None]

        def receive(_: Tensor) -> Tensor:
            begin(given)
            return given

        result = self._run_tail({}, hidden, receive).logits
        assert isinstance(result, Tensor)
        return result

    @property
    def _projection(self) -> Tensor:
        weight = self._decoder.model.get_submodule(self._decoder.head_path).weight
        assert isinstance(weight, Tensor)
        return weight

    def _find_scores(self) -> TracedScores:
        if scores_texts(self._decoder.config):  # a token is chosen, no logit changed
            return TracedScores(changes=False, function=None)
        num_tokens = self._projection.shape[0]
        return examined(self._own_scores, self._trace_scores, num_tokens, self._decoder.model.dtype)

    def _trace_scores(self, logits: Tensor) -> Function | None:
        tracer = Tracer()
        with intercepted(tracer):
            result = self._behind_projection(logits, tracer.begin)
        trace = tracer.trace(result)
        return None if trace is None else lambda logits: trace(logits[None])[0]

    def _find_width(self) -> int:
        """Return how many bytes of hidden states a token takes."""
        ids = torch.zeros((1, 8), dtype=torch.long)
        with torch.no_grad():
            hidden, _ = self.front({}, {"input_ids": ids})
        return hidden.nbytes // ids.numel()

    def _find_cuts(self) -> list[Cut | None]:
        """Return the cut of each layer; layers of equal structure have the same."""
        if self._decoder.passes_more:  # tiles know of hidden states alone
            return [None] * len(self._modules)
        if self.model in _CUTS:
            return _CUTS[self.model]
        firsts = optional.compiled.representatives(self._modules)
        pairs = [
            [self._sampled(inputs) for inputs in kind]
            for kind in optional.tile_cuts.sample_inputs(self.model)
        ]
        cuts = {
            first: optional.tile_cuts.find_cut(
                self._modules[first], [(a[first], b[first]) for a, b in pairs]
            )
            for first in sorted(set(firsts))
        }
        return _CUTS.setdefault(self.model, [cuts[first] for first in firsts])

    def _sampled(self, inputs: Mapping[str, Any]) -> list[LayerSample]:
        """Return a call of each layer, to learn from."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            hidden, calls = self.front({}, inputs)
        return [optional.tile_cuts.sampled_call(hidden, call) for call in calls]

    def _run_tail(self, weights: NamedTensors, hidden: Tensor, receive: Any) -> Any:
        """Run the model's forward from the last layer's answer on, whatever came before."""
        decoder, last = self._decoder, len(self._modules) - 1

        def answer(call: Call, passing: Tensor) -> Tensor:
            return hidden if call.layer == last else passing

        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        inputs = {"input_ids": ids}
        no_masks = by_document(decoder.config)  # others do something with theirs
        if no_masks:  # a flat row has more tokens than a table may have positions
            inputs["position_ids"] = ids
        with (
            masks_put_off() if no_masks else nullcontext(),
            layers_replaced(decoder.layers, answer, decoder.num_layer_outputs),
            head_replaced(decoder.model, decoder.head_path, receive),
        ):
            return self._forward(weights, inputs)

    def _forward(self, weights: NamedTensors, inputs: Mapping[str, Any]) -> Any:
        """Run the model's forward, to its end or until a stand-in ends it."""
        prefix = f"{self._decoder.head_path}."
        given = {name: w for name, w in weights.items() if not name.startswith(prefix)}
        bound, kwargs = {**self._stand_ins, **given}, {"use_cache": False, **inputs}
        try:
            return functional_call(self._decoder.model, bound, (), kwargs, tie_weights=False)
        except ForwardEnded:
            return None


def one_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are views of one memory: a model may take all tokens of one."""
    return int(one.untyped_storage()._cdata) == int(other.untyped_storage()._cdata)
