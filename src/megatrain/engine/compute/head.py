"""HEAD: from the last hidden states to the loss, and back, a micro-batch at a time.

The rows before the output projection come from the model's own code (front_and_tail.py), the passes
over chunks of logits from losses/head.py, and the weight of each token from the loss. A loss that
needs log-probabilities costs one more projection. In a step of two phases the first HEAD gives the
leaves to the host, and what comes back from there are the weights of the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.batch import StepPart
from megatrain.engine import optional
from megatrain.engine.compute.front_and_tail import Tail
from megatrain.engine.compute.inputs import MicroInputs
from megatrain.engine.machine import Machine
from megatrain.engine.results import SOURCE_LOSS, SOURCE_UNITS
from megatrain.losses.head import head_gradients, head_logprobs
from megatrain.losses.leaves import Notes, TokenOutputs
from megatrain.losses.loss import LogprobGrads, Loss, LossInputs, LossValue
from megatrain.losses.projection import Projection, Scores
from megatrain.step.ops import Op

if TYPE_CHECKING:
    from megatrain.engine.compute.drawing import SamplingParams


class Head:
    """The head's part of one step, or of one evaluation."""

    def __init__(
        self,
        machine: Machine,
        part: StepPart,
        inputs: Sequence[MicroInputs],
        loss: Loss,
        *,
        drawing: SamplingParams | None = None,
        notes_likeliest: bool = False,
    ) -> None:
        self._drawing = drawing
        self._machine = machine
        self._batch = part.batch
        self._loss = loss
        self._inputs = inputs
        self._notes_likeliest = notes_likeliest
        self.num_items = part.num_items
        self._losses: dict[int, Tensor] = {}
        """Parts of the step's loss by micro-batch, known once its HEAD is complete."""
        self._figures: dict[int, Mapping[str, Tensor]] = {}
        """Further figures that the loss reports."""
        self.logprobs: dict[int, Tensor] = {}
        """Log-probability of each target, in an evaluation. (rows, length)"""
        self.leaves: dict[int, TokenOutputs] = {}
        """All leaves, in an evaluation, where the loss wants more. (rows, length, ...)"""
        self._given: Sequence[Mapping[str, Tensor]] = ()
        """Further tensors for the loss that came behind the first phase, on the host."""
        self._likeliest: dict[int, Tensor] = {}
        """Tokens of the highest scores, in an evaluation that notes them. (rows, length)"""
        self.predictions: dict[int, Tensor] = {}
        """Logits after each row's last token, in a prediction. (rows, vocabulary)"""
        self.drawn: dict[int, tuple[Tensor, Tensor]] = {}
        """A token after each row and its log-probability, in a prediction that draws. (rows,)"""

    def train(self, op: Op, hidden: Tensor) -> Tensor | None:
        """Add up the gradients of the head's params; return that of `hidden`, if it is wanted."""
        machine, micro = self._machine, _micro(op)
        machine.gradients.begin(op)
        leaves = machine.weights.leaves(op)
        given = hidden.detach().requires_grad_(op.passes_gradient)
        tail = Tail(machine.edges, leaves, given, machine.tail_tile)
        d_rows = self._through_logits(micro, tail.rows(), self._projection(op))
        return tail.back(d_rows, machine.gradients.add)

    def evaluate(self, op: Op, hidden: Tensor) -> None:
        """Compute the log-probabilities of a micro-batch's targets."""
        machine, micro = self._machine, _micro(op)
        rows = self._rows(op, hidden)
        del hidden  # before there are logits
        targets, trained = self._inputs[micro].loss.targets, self._inputs[micro].trained
        projection = self._projection(op)
        likeliest = torch.zeros_like(targets).view(-1) if self._notes_likeliest else None
        notes = self._notes(self._inputs[micro].loss, rows)
        logprobs = head_logprobs(rows, trained, projection, likeliest, notes)
        self.logprobs[micro] = machine.device.to_host(logprobs.view(targets.shape))
        if likeliest is not None:
            self._likeliest[micro] = machine.device.to_host(likeliest.view(targets.shape))
        if notes is not None:
            leaves = self._leaves(notes, rows, targets.shape)
            self.leaves[micro] = leaves.mapped(machine.device.to_host)

    def given_leaves(self, micro: int) -> TokenOutputs:
        """Return the leaves of a micro-batch, behind the first of two phases. On the host."""
        return self.leaves.get(micro, TokenOutputs(logprobs=self.logprobs[micro]))

    def give(self, loss: Loss, extra: Sequence[Mapping[str, Tensor]]) -> None:
        """Let `loss` find further tensors, by micro-batch, in the second of two phases.

        They are on the host, each `pinned` by the device.
        """
        self._loss, self._given = loss, extra

    def predict(self, op: Op, hidden: Tensor) -> None:
        """Compute the logits after the last token of each row of a micro-batch."""
        machine, micro = self._machine, _micro(op)
        with torch.no_grad():
            rows = machine.edges.tail(machine.weights.of(op), hidden)
            last = self._inputs[micro].last_tokens
            assert last is not None
            rows = rows.index_select(0, last)
            if self._drawing is not None:
                self.drawn[micro] = self._draw(micro, rows, self._drawing, op)
                return
            self.predictions[micro] = machine.device.to_host(self._scores(rows, op))

    def _draw(
        self, micro: int, rows: Tensor, drawing: SamplingParams, op: Op
    ) -> tuple[Tensor, Tensor]:
        """Choose a token behind each row; logits exist for a chunk of rows at a time."""
        machine, extra = self._machine, self._inputs[micro].loss.loss_tensors
        numbers = extra.get("number", rows.new_zeros(len(rows)))
        tokens, logprobs, chunk = [], [], machine.inputs.chunk
        for first in range(0, len(rows), chunk):
            some = slice(first, first + chunk)
            logits = self._scores(rows[some], op)
            if drawing.temperature not in (0, 1):
                logits = logits / drawing.temperature
            tokens.append(optional.drawing.choose(logits, drawing, numbers[some]))
            logprobs.append(logits.log_softmax(1).gather(1, tokens[-1][:, None])[:, 0])
        to_host = machine.device.to_host
        return to_host(torch.cat(tokens)), to_host(torch.cat(logprobs))

    def _scores(self, rows: Tensor, op: Op) -> Tensor:
        """Return the logits of rows, in fp32."""
        machine = self._machine
        logits = F.linear(rows, *machine.weights.projection(op))
        return machine.edges.scores(logits).float()

    def likeliest(self) -> list[tuple[Tensor, Tensor]]:
        """Return log-probabilities and likeliest tokens of each micro-batch, if they are noted."""
        return [(self.logprobs[micro], found) for micro, found in sorted(self._likeliest.items())]

    def own_figures(self) -> list[dict[str, float]]:
        """Return what else the loss reports of each micro-batch."""
        return [
            {name: float(figure) for name, figure in found.items()}
            for _, found in sorted(self._figures.items())
        ]

    def trained(self) -> list[float]:
        """Return the loss of each micro-batch of a step."""
        return [float(loss) for _, loss in sorted(self._losses.items())]

    def evaluated(self) -> list[float]:
        """Return the loss of each micro-batch of an evaluation, in double precision."""
        totals = []
        for micro, logprobs in sorted(self.logprobs.items()):
            one = self._batch[micro]
            inputs = one.loss_inputs()
            if micro in self.leaves:
                leaves = self.leaves[micro].mapped(_in_double)
                inputs = replace(inputs, outputs=replace(leaves, logprobs=logprobs.double()))
            value = self._loss.compute_loss(inputs, logprobs.double())
            totals.append(float(value.loss_sum))
            self._figures[micro] = {
                **value.metrics,
                **_of_sources(value, self._loss.item_positions(inputs), one.source_ids),
            }
        return totals

    def _through_logits(self, micro: int, rows: Tensor, projection: Projection) -> Tensor:
        """Go through the logits of a micro-batch, once or twice, and back to the rows."""
        inputs, trained = self._loss_inputs(micro), self._inputs[micro].trained
        logprobs = None
        if self._loss.needs_logprobs:
            notes = self._notes(inputs, rows)
            logprobs = head_logprobs(rows, trained, projection, notes=notes)
            logprobs = logprobs.view(inputs.targets.shape)
            inputs = self._seen(inputs, notes, rows)
        found = self._loss.logprob_grads(inputs, logprobs, self.num_items)
        weights = found.logprob_grads.reshape(-1)
        others, d_hidden = _flat(found.others)
        result = head_gradients(rows, trained, weights, projection, self._add, others)
        self._note(micro, found, result.logprobs)
        return result.rows if d_hidden is None else result.rows.add_(d_hidden)

    def _loss_inputs(self, micro: int) -> LossInputs:
        """Return what the loss reads of a micro-batch, with what it was given since."""
        inputs = self._inputs[micro].loss
        if not self._given:
            return inputs
        to_device = self._machine.device.to_device
        given = {name: to_device(tensor) for name, tensor in self._given[micro].items()}
        return replace(inputs, loss_tensors={**inputs.loss_tensors, **given})

    def _notes(self, inputs: LossInputs, rows: Tensor) -> Notes | None:
        """Return what notes the leaves that the loss wants; None: log-probabilities alone."""
        wanted = self._loss.output_spec
        if not wanted.anything:
            return None
        tokens = None if wanted.tokens is None else inputs.loss_tensors[wanted.tokens].flatten(0, 1)
        logprobs = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
        return Notes(wanted, logprobs, tokens)

    def _leaves(self, notes: Notes, rows: Tensor, shape: torch.Size) -> TokenOutputs:
        """Return what was noted, in the shape of a micro-batch."""
        hidden = rows if self._loss.output_spec.hidden else None
        return replace(notes.leaves(), hidden=hidden).shaped(shape)

    def _seen(self, inputs: LossInputs, notes: Notes | None, rows: Tensor) -> LossInputs:
        """Return the loss's inputs with the leaves that it wants."""
        if notes is None:
            return inputs
        return replace(inputs, outputs=self._leaves(notes, rows, inputs.targets.shape))

    def _note(self, micro: int, found: LogprobGrads, logprobs: Tensor) -> None:
        """Note the loss of a micro-batch and what else it reports; the last sends all to the host.

        A copy for each would make compute wait for the copies of other lanes as often. A second
        backward has nothing to add.
        """
        if micro in self._losses:
            return
        loss = found.loss
        if loss is None:
            loss = (logprobs * found.logprob_grads.reshape(-1)).sum()
        self._losses[micro], self._figures[micro] = loss, found.metrics
        if len(self._losses) < len(self._batch):
            return
        micros, names = sorted(self._losses), found.metrics
        losses = self._together([self._losses[m] for m in micros])
        figures = {n: self._together([self._figures[m][n] for m in micros]) for n in names}
        self._losses = dict(zip(micros, losses, strict=True))
        self._figures = {m: {n: figures[n][at] for n in names} for at, m in enumerate(micros)}

    def _together(self, numbers: Sequence[Tensor]) -> Tensor:
        """Send numbers to the host in one copy."""
        return self._machine.device.to_host(torch.stack([number.view(()) for number in numbers]))

    def _rows(self, op: Op, hidden: Tensor) -> Tensor:
        """Return the rows that the output projection gets, to go forward only."""
        machine = self._machine
        tail = Tail(machine.edges, machine.weights.of(op), hidden, machine.tail_tile)
        return tail.rows(goes_back=False)

    def _projection(self, op: Op) -> Projection:
        machine = self._machine
        weight, bias = machine.weights.projection(op)
        scores = machine.edges.scores if machine.template.changes_logits else None
        temperature = self._loss.output_spec.temperature
        return Projection(
            weight=weight,
            bias=bias,
            scores=scores if temperature == 1 else _softened(scores, temperature),
            part_elements=machine.device.part_elements,
        )

    def _add(self, first_token: int, d_weight: Tensor | None, d_bias: Tensor | None) -> None:
        """Add the projection's gradients of some tokens, from one chunk."""
        machine = self._machine
        grads = {machine.weights.head_weight: d_weight, machine.weights.head_bias: d_bias}
        machine.gradients.add(grads, first_token)


def _of_sources(
    value: LossValue, places: Tensor | None, sources: Tensor | None
) -> dict[str, Tensor]:
    """Return the loss and the units of each source in a micro-batch, as figures."""
    if sources is None or places is None or value.per_item is None:
        return {}
    numbers = sources.reshape(-1)[places]
    found = {}
    for number in sorted(set(numbers.tolist())):
        chosen = numbers == number
        found[f"{SOURCE_LOSS}{number}"] = value.per_item[chosen].sum()
        found[f"{SOURCE_UNITS}{number}"] = chosen.sum()
    return found


def _flat(others: TokenOutputs | None) -> tuple[TokenOutputs | None, Tensor | None]:
    """Return the gradients of leaves of the logits (tokens, ...), and of the rows before them."""
    if others is None:
        return None, None
    flat = others.mapped(lambda one: one.flatten(0, 1))
    of_logits = replace(flat, hidden=None)
    return None if of_logits.is_plain else of_logits, flat.hidden


def _softened(scores: Scores | None, temperature: float) -> Scores:
    """Return scores that are divided by a temperature."""
    return lambda logits: (logits if scores is None else scores(logits)).float() / temperature


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _micro(op: Op) -> int:
    assert op.micro is not None
    return op.micro
