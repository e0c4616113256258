"""DeepSpeed ZeRO-3 with params and optimizer in host memory, or in files of its own.

Settings
    offload     "cpu", its way to keep params and optimizer in host memory; "none", the same home
                if the device is the CPU, without the second gradient in fp32 that offload holds;
                or a folder: both are in files there (needs libaio)
    params      more keys of `offload_param`
    zero        more keys of `zero_optimization`

The model is built under `zero.Init`, so that no process ever holds it whole beside its partitions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.rivals.workers.serving import Job, Prepared, decayed_groups, serve

SHORT = {"float32": "fp32", "bfloat16": "bf16"}
BUCKET = 1_000_000
"""Elements of each buffer: the smallest that is not slower here."""


def zero_config(job: Job) -> dict[str, Any]:
    """Return DeepSpeed's config: stage 3, everything at home on the host, buffers small."""
    place = job.settings.get("offload", "cpu")
    home: dict[str, Any] = {"device": place, "pin_memory": job.device != "cpu"}
    if place not in ("cpu", "none"):
        home |= {"device": "nvme", "nvme_path": place}
    rows = len(job.batch(0)[0])
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": job.max_grad_norm or 0.0,
        # the check for overflow makes a second copy of all gradients
        "bf16": {"enabled": job.dtype == "bfloat16", "check_grad_overflow": False},
        # gradients of one micro-batch are bf16 anyway
        "data_types": {"grad_accum_dtype": "fp32" if job.micro_batches > 1 else SHORT[job.dtype]},
        "zero_optimization": {
            "stage": 3,
            "offload_param": home | job.settings.get("params", {}),
            "offload_optimizer": home,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET,
            "sub_group_size": 10 * BUCKET,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            **job.settings.get("zero", {}),
        },
    }


def prepare(job: Job) -> Prepared:
    bin_folder = str(Path(sys.executable).parent)  # of ninja, which builds its kernels
    os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ["PATH"]])
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}.items():
        os.environ[name] = str(value)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    backend = "gloo" if job.device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(backend)
    config = zero_config(job)
    partitioned = HfDeepSpeedConfig(config)  # while it exists, from_pretrained partitions at once
    dtype = torch.bfloat16 if job.dtype == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    params = sum(p.ds_numel for p in model.parameters())
    optimizer = DeepSpeedCPUAdam(
        decayed_groups(model, job.weight_decay),
        lr=job.lr,
        betas=job.betas,
        eps=job.eps,
        adamw_mode=True,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    del partitioned

    def step(batch: Sequence[Tensor]) -> tuple[float, float | None]:
        total = 0.0
        for ids in batch:
            loss = engine(input_ids=ids.to(engine.device), labels=ids.to(engine.device)).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batch)
        return total, float(engine.get_global_grad_norm())

    return Prepared(
        params=params, step=step, close=engine.destroy, param_groups=optimizer.param_groups
    )


if __name__ == "__main__":
    serve(prepare)
