"""FSDP2 with CPU offload on one rank: `fully_shard` for each layer, and gradient checkpointing.

Settings
    optimizer   "fused" or "foreach"

The model is built on the meta device and sharded before it has any bytes; then each tensor is read
from its file into its shard. Nothing is ever held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.rivals.workers.serving import Job, Prepared, decayed_groups, serve


def sharded(job: Job) -> Any:
    """Return the model with fp32 shards, which compute in the job's dtype."""
    config = AutoConfig.from_pretrained(job.model, attn_implementation="sdpa")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(job.device, (1,))
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, job.dtype), reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy(pin_memory=job.device != "cpu")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return model.train()


def fill(model: Any, folder: Path) -> None:
    """Give the shards the weights of a folder, and the rotary tables their values."""
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    left = dict(model.named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                left.pop(name).to_local().detach().copy_(file.get_tensor(name))
    assert not left, f"{folder} has no {', '.join(left)}"


def prepare(job: Job) -> Prepared:
    backend = "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl"
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    model = sharded(job)
    fill(model, Path(job.model))
    model.model.rotary_emb.to(job.device)
    optimizer = torch.optim.AdamW(
        decayed_groups(model, job.weight_decay),
        lr=job.lr,
        betas=job.betas,
        eps=job.eps,
        **{job.settings.get("optimizer", "fused"): True},
    )

    def step(batch: Sequence[Tensor]) -> tuple[float, float | None]:
        total, norm = 0.0, None
        for ids in batch:
            ids = ids.to(job.device)
            loss = model(input_ids=ids, labels=ids).loss / len(batch)
            loss.backward()
            total += float(loss.detach())
        if job.max_grad_norm is not None:
            found: Any = nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
            norm = float(found.full_tensor())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm

    params = sum(p.numel() for p in model.parameters())
    return Prepared(
        params=params,
        step=step,
        close=torch.distributed.destroy_process_group,
        param_groups=optimizer.param_groups,
    )


if __name__ == "__main__":
    serve(prepare)
