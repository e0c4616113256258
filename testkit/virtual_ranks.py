"""Several ranks, played by one process that has everything: plain PyTorch, one rank after another.

Nothing here knows of ownership, slots, lanes or wires. A virtual rank is the resident model under
ordinary autograd on every so-many-th micro-batch of a step, with the divisor of the full step. Its
gradients are rounded to the dtype of the weights. Those of all ranks are added in fp32, in the
order of ranks, and rounded again. One optimizer updates the full params: AdamW as a textbook has it
where moments are fp32, else the kernel's torch form on one store that is not divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.muon import Muon, orthogonalize
from megatrain.optim.optimizer import decays
from megatrain.optim.states import M, V
from megatrain.optim.views import UpdateViews
from testkit.adamw_by_hand import HandAdamW
from testkit.plain import next_token_loss, plain_gradients

State = dict[str, Tensor]
"""Flat, by kind and param."""


class VirtualRanks:
    """`size` ranks that share one resident model, which must want gradients where it is trained."""

    def __init__(
        self, model: PreTrainedModel, decoder: Decoder, optimizer: AdamW, size: int
    ) -> None:
        self._model, self._size, self._number = model, size, 0
        self._trained = [param.name for param in decoder.params if param.trained]
        self._update = (
            _ByHand(model, decoder, optimizer)
            if optimizer.state == "fp32" and not isinstance(optimizer, Muon)
            else _InOneStore(model, decoder, optimizer)
        )

    def gradients(self, batch: Sequence[MicroBatch]) -> tuple[list[float], dict[str, Tensor]]:
        """Return each micro-batch's loss and every gradient of a step, of all ranks."""
        self._number += 1
        losses = [0.0] * len(batch)
        of_ranks: list[dict[str, Tensor]] = []
        for rank in range(self._size):
            numbers = range(rank, len(batch), self._size)
            found, gradients = self._of_rank(batch, numbers)
            of_ranks.append(gradients)
            for number, loss in zip(numbers, found, strict=True):
                losses[number] = loss
        return losses, {name: self._added_up(name, of_ranks) for name in self._trained}

    def _of_rank(
        self, batch: Sequence[MicroBatch], numbers: Sequence[int]
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Return losses and gradients of a rank: sums in fp32, rounded."""
        if not numbers:
            return [], {name: torch.zeros_like(p) for name, p in self._model.named_parameters()}
        own = [batch[number] for number in numbers]
        return plain_gradients(self._model, own, self._number, next_token_loss(batch), numbers)

    def _added_up(self, name: str, of_ranks: Sequence[Mapping[str, Tensor]]) -> Tensor:
        total = of_ranks[0][name].float()
        for gradients in of_ranks[1:]:
            total = total + gradients[name].float()
        return total.to(of_ranks[0][name].dtype)

    def update(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        """Apply a step's gradients; the model has the new weights then."""
        self._update(gradients, self._number, scale)

    def state(self) -> State:
        """Return weights, remainders and moments of all trained params."""
        return self._update.state()


class _ByHand:
    def __init__(self, model: PreTrainedModel, decoder: Decoder, optimizer: AdamW) -> None:
        decayed = {p.name for p in decoder.params if decays(p)}
        assert not callable(optimizer.learning_rate)
        self._params = {p.name: model.get_parameter(p.name) for p in decoder.params if p.trained}
        self._adamw = HandAdamW(
            {name: param.detach().float() for name, param in self._params.items()},
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decays=decayed.__contains__,
        )

    def __call__(self, gradients: Mapping[str, Tensor], number: int, scale: float) -> None:
        self._adamw.update(gradients, number, scale)
        for name, param in self._params.items():
            param.data.copy_(self._halves(name)[0])

    def _halves(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the weight that compute sees, and what is left of the master."""
        master = self._adamw.masters[name]
        if self._params[name].dtype is torch.float32:
            return master, None
        high, low = master.bfloat16(), torch.empty_like(master, dtype=torch.int16)
        split_into(master, high, low)
        return high, low

    def state(self) -> State:
        found: State = {}
        for name in self._params:
            high, low = self._halves(name)
            found[f"{TensorKind.HI}.{name}"] = high.reshape(-1)
            if low is not None:
                found[f"{TensorKind.LO}.{name}"] = low.reshape(-1)
            found[f"{M}.{name}"] = self._adamw.m[name].reshape(-1)
            found[f"{V}.{name}"] = self._adamw.v[name].reshape(-1)
        return found


class _InOneStore:
    def __init__(self, model: PreTrainedModel, decoder: Decoder, optimizer: AdamW) -> None:
        self._optimizer, self._kinds = optimizer, (TensorKind.HI, TensorKind.LO, *optimizer.states)
        self._store = Store(build_layout(decoder.blocks, self._kinds))
        self._params = {p.name: model.get_parameter(p.name) for p in decoder.params if p.trained}
        for name, param in self._params.items():
            self._store.param(name, TensorKind.HI).copy_(param.detach())
        self._views = UpdateViews(self._store, optimizer)

    def __call__(self, gradients: Mapping[str, Tensor], number: int, scale: float) -> None:
        layout = self._store.layout
        for segment in layout.segments:
            if not segment.trained:
                continue
            flat = torch.zeros(segment.num_elements, dtype=segment.dtype)
            for place in layout.segment_places(segment):
                given = gradients[place.param.name].reshape(-1)
                flat[place.start : place.start + len(given)] = given
            for span, views in self._views.of(segment):
                if segment.matrices:
                    self._optimizer.look_ahead(views, flat[span], number=number, scale=scale)
            for place in layout.segment_places(segment) if segment.matrices else ():
                stop = place.start + place.param.num_elements
                orthogonalize(flat[place.start : stop].view(place.param.shape))
            for span, views in self._views.of(segment):
                self._optimizer.update(views, flat[span], step=number, number=number, scale=scale)
        for name, param in self._params.items():
            param.data.copy_(self._store.param(name, TensorKind.HI))

    def state(self) -> State:
        return {
            f"{kind}.{name}": self._store.param(name, kind).reshape(-1)
            for name in self._params
            for kind in self._kinds
            if self._store.layout.places[name].has(kind)
        }
