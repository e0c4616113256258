"""The other side of an equality: the resident model under ordinary autograd, on any device.

Nothing here knows of blocks, slots or schedules. Where the engine sums in fp32 by design (over
micro-batches, and the two gradients of a tied table), so does this side, in the same order; in a
tied model the table is therefore read through two leaves.

Law (tests/doctor/test_resident.py): losses and gradients are those of the model's own forward and
torch's own sums, where sums have one term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch


def resident_gradients(
    model: PreTrainedModel, batch: Sequence[MicroBatch]
) -> tuple[list[float], dict[str, Tensor]]:
    """Return each micro-batch's loss and every gradient, on the host, in the dtype of its param.

    The loss is the mean over all trained tokens of the batch; rows have no padding.
    """
    num_valid_tokens = sum(micro.num_valid_tokens for micro in batch)
    losses: list[float] = []
    with untied(model) as (head_name, table_name):
        parts: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
        for micro in batch:
            model.zero_grad(set_to_none=True)
            placed = micro.mapped(lambda tensor: tensor.to(model.device))
            loss = (resident_logprobs(model, placed) * (-1.0 / num_valid_tokens)).sum()
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            for name, param in model.named_parameters():
                if param.grad is not None:
                    parts[name].append(param.grad.float())
        model.zero_grad(set_to_none=True)
    if head_name:
        parts[table_name] = parts.pop(head_name) + parts[table_name]
    return losses, {
        name: added_up(parts[name], param).to(param.dtype).cpu()
        for name, param in model.named_parameters()
    }


def resident_logprobs(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Return the log-probability of each position's target, zero where there is none.

    The micro-batch is where the model is, and its rows have no padding. The head gets the rows
    that have a target. (rows, length)
    """
    targets = F.pad(micro.labels[:, 1:], (0, 1), value=-100).flatten()
    trained = (targets != -100).nonzero().flatten()
    with rows_chosen(model, trained):
        (logits,) = model(**micro.inputs, use_cache=False).logits
    found = -F.cross_entropy(logits.float(), targets[trained], reduction="none")
    return found.new_zeros(len(targets)).index_copy(0, trained, found).view(micro.labels.shape)


@contextmanager
def rows_chosen(model: PreTrainedModel, trained: Tensor) -> Iterator[None]:
    """Give the output projection these rows alone.

    Zeros in a sum over rows would change nothing but torch's order of adding up.
    """

    def choose(_module: nn.Module, given: tuple[Tensor]) -> Tensor:
        return given[0].flatten(0, 1)[trained][None]

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def added_up(parts: list[Tensor], param: Tensor) -> Tensor:
    """Return the sum of a param's gradients, from the first to the last; zeros if there is none."""
    if not parts:
        return torch.zeros_like(param)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@contextmanager
def untied(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Read a tied table through two leaves; yield the names of the head's and of the table."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings().weight
    if head.weight is not table:
        yield "", ""
        return
    table_name = next(name for name, param in model.named_parameters() if param is table)
    head.weight = nn.Parameter(table.detach().clone())
    head_name = next(name for name, param in model.named_parameters() if param is head.weight)
    try:
        yield head_name, table_name
    finally:
        head.weight = table
