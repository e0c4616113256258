"""The actions of a plain step: the tensor work of each kind of op.

An op is data, its action does the work and touches only what the op declares. State that belongs
to one step (hidden states, their gradients, losses, the layers' arguments) lives here, by
micro-batch, and is dropped as it is used up.

Random numbers (dropout) are a function of seed, step, block, micro-batch and tile, so that
recompute draws what forward drew, whatever the order of ops and the rank.

Laws (tests/engine/test_exactness.py)
    1. Losses and gradients are those of ordinary autograd through the resident model.
    2. Gradients add up in fp32, micro-batch by micro-batch; the two gradients of a tied table too,
       the head's part first.
    3. No gradient that is not finite reaches a weight.
    4. Gradients are computed by the lane's own thread (tests/gpu/test_memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.batch import StepPart
from megatrain.devices.device import draw_seed
from megatrain.engine import optional
from megatrain.engine.compute.graph import gradients_of
from megatrain.engine.compute.head import Head
from megatrain.engine.compute.layers import Returned
from megatrain.engine.machine import Machine
from megatrain.lanes.lane import Action
from megatrain.losses.loss import NEXT_TOKEN, Loss
from megatrain.models.documents import attending
from megatrain.models.passed import LayerCalls
from megatrain.models.probing.stand_ins import Call
from megatrain.step.ops import Op, OpKind, Role

if TYPE_CHECKING:
    from megatrain.engine.compute.drawing import SamplingParams
    from megatrain.models.key_values import TextCache


class StepActions:
    """The actions of one step, or of one evaluation."""

    def __init__(
        self,
        machine: Machine,
        part: StepPart,
        step: int,
        loss: Loss = NEXT_TOKEN,
        *,
        predicts: bool = False,
        caches: Sequence[TextCache | None] | None = None,
        drawing: SamplingParams | None = None,
        notes_likeliest: bool = False,
    ) -> None:
        """Lay out the inputs; nothing may be under way, and the machine has room for the step.

        `predicts`: an evaluation computes logits after the last tokens, not log-probabilities, with
        keys and values of earlier tokens in `caches`, by micro-batch; `drawing`: and chooses a
        token by them. `notes_likeliest`: it also notes which tokens are the likeliest.
        """
        self.machine = machine
        self._step = step
        self.part = part
        self._hidden: dict[int, Tensor] = {}
        self._d_hidden: dict[int, Tensor] = {}
        self._calls: dict[int, LayerCalls] = {}
        self._sent = machine.inputs.laid_out(
            part.batch, machine.weights.rows, predicts=predicts, caches=caches
        )
        self._inputs = self._sent.micros
        self.head = Head(
            machine, part, self._inputs, loss, drawing=drawing, notes_likeliest=notes_likeliest
        )
        self._predicts = predicts
        self.aux_loss: Tensor | None = None
        """Load-balancing loss, known once the first HEAD is complete; None: nothing is balanced."""
        # A prediction has no loss, and a router in it sees less than the mask, which keys extend.
        self.routing = None if predicts else machine.routing()

    def table(self) -> dict[OpKind, Action]:
        """Return the action of each kind of op: those of a plain step, and those of its features.

        A feature may wrap what is there before it.
        """
        table: dict[OpKind, Action] = {
            OpKind.FETCH: self._fetch,
            OpKind.FORWARD: self._visiting(self._forward),
            OpKind.HEAD: self._visiting(_in_this_thread(self._head)),
            OpKind.BACKWARD: self._visiting(_in_this_thread(self._backward)),
            OpKind.DRAIN: self._drain,
            OpKind.NORM: self._norm,
            OpKind.CLIP: self._clip,
            OpKind.UPDATE: self._update,
        }
        for feature in self.machine.features:
            table |= feature.actions(self, table)
        return table

    def _visiting(self, action: Action) -> Action:
        """Return an action that finds weights as ops before it have narrowed them."""
        narrow = self.machine.narrow_weights
        if narrow is None:
            return action

        def act(op: Op) -> int | None:
            with narrow.visited(op):
                return action(op)

        return act

    def _fetch(self, op: Op) -> int:
        # All that computes waits for the embedding, and so for the inputs.
        num_bytes = self._sent.send() if op.role is Role.EMBEDDING else 0
        return num_bytes + self.machine.weights.fetch(op)

    def _forward(self, op: Op) -> int:
        machine, block, micro = self.machine, _block(op), _micro(op)
        weights = machine.weights.of(op)
        self._seed(block, micro)
        with torch.no_grad():
            if op.role is Role.EMBEDDING:
                rows = self._inputs[micro].rows
                hidden, calls = self._front(weights, micro, rows)
                self._calls[micro] = machine.layer_calls(calls)
            else:
                given, layer = self._hidden.pop(micro), block - 1
                passing = self._calls[micro]
                given = passing.entering(layer, given)
                with attending(self._inputs[micro].documents), self._paging(op):
                    if op.touches("kept", block, micro):
                        leaves = machine.weights.leaves(op)
                        leaf = given.detach().requires_grad_(op.passes_gradient)
                        link = passing.linked(layer, passes_gradient=op.passes_gradient)
                        assert machine.kept is not None
                        hidden, logits = machine.kept.forward((block, micro), leaves, leaf, link)
                        passing.after_forward(layer, link)
                    else:
                        hidden, logits = machine.layers.forward(
                            weights,
                            given,
                            passing[layer],
                            lambda tile: self._seed(block, micro, tile),
                        )
                        passing.after_forward(layer)
                if self.routing is not None:
                    inputs = self._inputs[micro]
                    self.routing.add(logits, inputs.mask, inputs.num_tokens)
                if op.touches("saved_input", block, micro):
                    machine.tape.keep((block, micro), _ring_slot(op), given)
        self._hidden[micro] = machine.device.counted(hidden, "hidden states")
        return self._paged_bytes(op)

    def _head(self, op: Op) -> None:
        if self.routing is not None and op.micro == 0:
            with torch.no_grad():
                self.aux_loss = self.machine.device.to_host(self.routing.loss())
        micro = _micro(op)
        take = self._hidden.__getitem__ if op.comes_again else self._hidden.pop
        if op.trains or op.comes_again:
            self._seed(_block(op), micro)
        if op.trains:
            self._pass_gradient(op, self.head.train(op, take(micro)))
            return
        if not op.comes_again:
            self._calls.pop(micro)
        run = self.head.predict if self._predicts else self.head.evaluate
        run(op, take(micro))

    def _backward(self, op: Op) -> int:
        machine, block, micro = self.machine, _block(op), _micro(op)
        leaves = machine.weights.leaves(op)
        d_hidden = self._d_hidden.pop(micro)
        self._seed(block, micro)
        if op.role is Role.EMBEDDING:
            machine.gradients.begin(op)
            self._backward_embedding(leaves, micro, d_hidden)
            self._pass_gradient(op, None)
            return 0
        returned = Returned(d_hidden, lambda logits, columns: self._balance(logits, micro, columns))
        if op.touches("kept", block, micro):  # its graph has its link
            assert machine.kept is not None
            machine.gradients.begin(op)
            with self._paging(op):
                passed = machine.kept.backward(
                    (block, micro), leaves, returned, machine.gradients.add
                )
            self._calls[micro].left(block - 1, passed)
            self._pass_gradient(op, passed)
            return self._paged_bytes(op)
        kept = machine.tape.take((block, micro), _ring_slot(op), stays=op.comes_again)
        given = kept.detach().requires_grad_(op.passes_gradient)
        link = self._calls[micro].linked(block - 1, passes_gradient=op.passes_gradient)
        machine.gradients.begin(op)
        with attending(self._inputs[micro].documents), self._paging(op):
            passed = machine.layers.backward(
                leaves,
                given,
                link.call,
                returned._replace(link=link),
                machine.gradients.add,
                lambda tile: self._seed(block, micro, tile),
            )
        self._calls[micro].left(block - 1, passed)
        self._pass_gradient(op, passed)
        return self._paged_bytes(op)

    def _backward_embedding(
        self, leaves: Mapping[str, Tensor], micro: int, d_hidden: Tensor
    ) -> None:
        machine, tokens = self.machine, self.machine.token_rows
        given, selected = self._inputs[micro], None
        rows = given.rows
        if tokens is not None and leaves[tokens.name].requires_grad:
            selected = tokens.select(leaves, self.part.batch[micro].input_ids)
            leaves, rows = selected.leaves, selected.places
        with torch.enable_grad():
            hidden, calls = self._front(leaves, micro, rows)
        outputs = [(hidden, d_hidden), *self._calls[micro].front_outputs(calls)]
        grads = dict(gradients_of(outputs, leaves, None).params)
        if tokens is not None and selected is not None:
            found = grads.pop(tokens.name)
            if found is not None:
                grad = tokens.trained(selected.ids, found)
                machine.gradients.add_rows(tokens.name, selected.ids, grad)
        machine.gradients.add(grads)

    def _balance(
        self, logits: Sequence[Tensor], micro: int, columns: slice
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the sums of a layer's routers that the balancing loss is made of, with gradients.

        `logits` are those of the micro-batch's `columns`. Backward's own: forward has counted the
        routers of all layers.
        """
        if self.routing is None:
            return []
        with torch.no_grad():
            d_sums = self.routing.d_sums(self.machine.settings.router_aux_loss)
        mask = self._inputs[micro].mask
        mask = None if mask is None else mask[:, columns]
        return [(optional.balance.probability_sums(one, mask), d_sums) for one in logits]

    def _drain(self, op: Op) -> int:
        return self.machine.gradients.drain(op)

    def _norm(self, op: Op) -> None:
        gradients = self.machine.gradients
        gradients.finish(op)
        self.machine.updates.measure(op, gradients.flat(op), self._step)

    def _clip(self, op: Op) -> None:
        self.machine.updates.judge(self._step)

    def _update(self, op: Op) -> int:
        region = self.machine.tier_region(op)
        return self.machine.updates.apply(op, self.machine.gradients.flat(op), region)

    def _pass_gradient(self, op: Op, gradient: Tensor | None) -> None:
        if gradient is not None:
            counted = self.machine.device.counted
            self._d_hidden[_micro(op)] = counted(gradient, "gradients of hidden states")
        elif not op.comes_again:
            self._calls.pop(_micro(op), None)

    def _paging(self, op: Op) -> AbstractContextManager[None]:
        """Return the time in which a layer finds its experts in pages, if they come so."""
        pages = self.machine.pages
        return nullcontext() if pages is None else pages.visiting(op, self.machine.gradients)

    def _paged_bytes(self, op: Op) -> int:
        pages = self.machine.pages
        return 0 if pages is None or op.role is not Role.LAYER else pages.num_bytes

    def _seed(self, block: int, micro: int, tile: int | None = None) -> None:
        """Set the generator that layers draw from, for a block or for a tile of it."""
        number = self.part.numbers[micro]
        seed = draw_seed(self.machine.settings.seed, self._step, number, block, tile)
        self.machine.device.seed(seed)

    def _front(
        self, weights: Mapping[str, Tensor], micro: int, rows: Tensor | None
    ) -> tuple[Tensor, list[Call]]:
        given = self._inputs[micro]
        with attending(given.documents):
            return self.machine.edges.front(
                weights, given.on_host, given.model, rows, given.answers
            )


def _in_this_thread(action: Action) -> Action:
    """Return an action whose gradients are computed by the thread that runs it.

    A device has a thread of autograd's own otherwise. It frees what it made when the op has ended
    already, so that the peak of equal steps is not equal, and the lane hands work to it and back.
    """

    def act(op: Op) -> int | None:
        with torch.autograd.set_multithreading_enabled(False):
            return action(op)

    return act


def _ring_slot(op: Op) -> int | None:
    """Return where in the ring a layer's input is; None: it has a place of its own."""
    family, slot, *_ = op.place("saved_input", op.block, op.micro)
    return int(slot) if family == "tape_slot" else None


def _block(op: Op) -> int:
    assert op.block is not None
    return op.block


def _micro(op: Op) -> int:
    assert op.micro is not None
    return op.micro
