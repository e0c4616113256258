"""The other side of every equality: the resident model under ordinary autograd.

Nothing here knows of blocks, slots or schedules. Where the engine sums in fp32 by design (over
micro-batches, and the two gradients of a tied table), so does this side, in the same order; in a
tied model the table is therefore read through two leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.devices.device import draw_seed
from megatrain.doctor.resident import added_up, rows_chosen, untied
from megatrain.models.documents import attending, attends_by_document, with_packed_masks


def make_batch(
    shapes: Sequence[tuple[int, int]], *, seed: int = 1, padded: bool = False, packed: bool = False
) -> list[MicroBatch]:
    """Return micro-batches of (rows, length); the first tokens of each row are not trained."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for rows, length in shapes:
        ids = torch.randint(3, 300, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        mask = positions = None
        if padded:
            mask = torch.ones_like(ids)
            mask[0, length - 4 :] = 0
            labels[0, length - 4 :] = -100
        if packed:
            half = length // 2
            positions = torch.cat([torch.arange(half), torch.arange(length - half)])
            positions = positions.repeat(rows, 1)
            labels[:, half] = -100
        batch.append(
            MicroBatch(input_ids=ids, labels=labels, attention_mask=mask, position_ids=positions)
        )
    return batch


def flat_row(lengths: Sequence[int], *, seed: int = 1) -> MicroBatch:
    """Return one flat row of documents; the first token of each is not a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return MicroBatch(input_ids=ids, labels=labels, position_ids=positions)


def load_plain(
    folder: Path,
    dtype: torch.dtype,
    attention: str | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )
    return model.to(device).train()


def plain_gradients(
    model: PreTrainedModel,
    batch: Sequence[MicroBatch],
    step: int = 1,
    loss_of: Callable[[Tensor, MicroBatch], Tensor] | None = None,
    numbers: Sequence[int] | None = None,
    inputs_of: Callable[[PreTrainedModel, MicroBatch], dict[str, Any]] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return each micro-batch's loss and every gradient, summed in fp32, in the param's dtype.

    The loss is `loss_of` the log-probabilities (rows, length), or that of the next token. It is
    computed where the model is; the results are on the host. `numbers` are those of the
    micro-batches in their step: 0, 1, ... unless given. `inputs_of` returns the arguments of the
    model for a row with media.
    """
    loss_of = loss_of or next_token_loss(batch)
    losses: list[float] = []
    parts: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    with untied(model) as (head_name, table_name):
        for number, micro in zip(numbers or range(len(batch)), batch, strict=True):
            model.zero_grad(set_to_none=True)
            model._drawn_for = (step, number)
            placed = micro.mapped(lambda tensor: tensor.to(model.device))
            loss = loss_of(plain_logprobs(model, placed, inputs_of), placed)
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            for name, param in model.named_parameters():
                if param.grad is not None:
                    parts.setdefault(name, []).append(param.grad.float())
        model.zero_grad(set_to_none=True)
    if head_name:
        parts[table_name] = parts.pop(head_name) + parts[table_name]
    return losses, {
        name: added_up(parts[name], param).to(param.dtype).cpu()
        for name, param in model.named_parameters()
    }


def seed_like_engine(
    model: PreTrainedModel, layers_path: str, embedding: str | None = None, seed: int = 0
) -> None:
    """Make embedding and layers of the plain model draw what the engine's blocks draw."""
    modules = list(model.get_submodule(layers_path))
    if embedding is not None:
        modules.insert(0, model.get_submodule(embedding))
    for block, module in enumerate(modules, start=0 if embedding is not None else 1):

        def seed_module(_module: nn.Module, *_: object, block: int = block) -> None:
            step, number = model._drawn_for
            torch.default_generator.manual_seed(draw_seed(seed, step, number, block))

        module.register_forward_pre_hook(seed_module)


def plain_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    inputs_of: Callable[[PreTrainedModel, MicroBatch], dict[str, Any]] | None = None,
) -> Tensor:
    """Return the log-probability of each position's target, zero where there is none."""
    # How packed documents are kept apart is shown in test_isolation.py and test_documents.py.
    by_document = attends_by_document(model.config, compiles=False)
    if inputs_of is not None and model.config.model_type == "gemma3":
        by_document = False  # masks that depend on the types of tokens are those of the row
    targets = F.pad(micro.labels[:, 1:], (0, 1), value=-100).flatten()
    trained = (targets != -100).nonzero().flatten()

    documents = micro.packed_documents() if by_document else None
    with rows_chosen(model, trained), attending(documents):
        own = micro.inputs if inputs_of is None else inputs_of(model, micro)
        inputs = with_packed_masks(model.config, model.dtype, own)
        (logits,) = model(**inputs, use_cache=False).logits
    found = -F.cross_entropy(logits.float(), targets[trained], reduction="none")
    return found.new_zeros(len(targets)).index_copy(0, trained, found).view(micro.labels.shape)


def next_token_loss(batch: Sequence[MicroBatch]) -> Callable[[Tensor, MicroBatch], Tensor]:
    """Return what a micro-batch adds to the mean over all trained tokens of `batch`."""
    num_valid_tokens = sum(int((m.labels[:, 1:] != -100).sum()) for m in batch)

    def loss(logprobs: Tensor, micro: MicroBatch) -> Tensor:
        targets = F.pad(micro.labels[:, 1:], (0, 1), value=-100)
        return (logprobs * torch.where(targets != -100, -1.0 / num_valid_tokens, 0.0)).sum()

    return loss
