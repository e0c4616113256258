"""Plain PyTorch: the Hugging Face model, gradient checkpointing, torch's AdamW, a loop.

Settings
    head        "own": the model's own loss; "chunked": torch's linear_cross_entropy, which never
                has all logits at once
    optimizer   "fused" or "foreach"
    compile     true: torch.compile on each layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.rivals.workers.serving import Job, Prepared, decayed_groups, serve

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "pure_bfloat16": torch.bfloat16}
"""Of weights, by the job's dtype."""


def load(job: Job) -> Any:
    """Return the model on its device, with gradient checkpointing."""
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=DTYPES[job.dtype], attn_implementation="sdpa"
    ).to(job.device)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if job.settings.get("compile", False):
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def own_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the model's own loss, the mean over the tokens that it predicts."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def chunked_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the same mean without all logits at once."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    weight, targets = model.lm_head.weight, ids[:, 1:].flatten()
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight.to(hidden.dtype), targets, options=options)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {"own": own_loss, "chunked": chunked_loss}


def compute_dtype(job: Job) -> AbstractContextManager[object]:
    """Return the context in which forward runs."""
    if job.dtype == "bfloat16":
        return torch.autocast(job.device, torch.bfloat16)
    return nullcontext()


def prepare(job: Job) -> Prepared:
    model = load(job)
    optimizer = torch.optim.AdamW(
        decayed_groups(model, job.weight_decay),
        lr=job.lr,
        betas=job.betas,
        eps=job.eps,
        **{job.settings.get("optimizer", "fused"): True},
    )
    loss_of = LOSSES[job.settings.get("head", "own")]

    def step(batch: Sequence[Tensor]) -> tuple[float, float | None]:
        total, norm = 0.0, None
        for ids in batch:
            with compute_dtype(job):
                loss = loss_of(model, ids.to(job.device)) / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if job.max_grad_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm

    return Prepared(
        params=sum(p.numel() for p in model.parameters()),
        step=step,
        param_groups=optimizer.param_groups,
    )


if __name__ == "__main__":
    serve(prepare)
