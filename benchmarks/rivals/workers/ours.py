"""MegaTrain by its public API: an engine over a store, on the CPU or on torch's accelerator.

Settings
    state       of the optimizer: fp32, bf16 or 8bit; masters are fp32 in all of them
    step        more fields of mt.StepSettings
    disk        with a tier in `step`: the folder of its scratch file
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

import megatrain as mt
from benchmarks.rivals.workers.serving import Job, Prepared, serve
from megatrain.disk.hf.model import Precision, read_model_folder
from megatrain.memory.kinds import kinds_on_disk, store_kinds
from megatrain.memory.tier.scratch_file import Scratch

DTYPES: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}


def prepare(job: Job) -> Prepared:
    clips = job.max_grad_norm is not None
    state = job.settings.get("state", "fp32")
    optimizer = mt.AdamW(
        learning_rate=job.rate,
        weight_decay=job.weight_decay,
        betas=job.betas,
        eps=job.eps,
        max_grad_norm=job.max_grad_norm,
        num_threads=job.threads,
        state=state,
    )
    step_settings = {"update": "late" if clips else "in_backward", **job.settings.get("step", {})}
    settings = mt.StepSettings(state=state, **step_settings)
    kinds = store_kinds(optimizer.states, waits=settings.update == "late")
    on_disk, scratch = kinds_on_disk(kinds, settings.tier), None
    if on_disk:
        scratch = Scratch(folder=Path(job.settings["disk"]), kinds=on_disk)
    model = read_model_folder(job.model, dtype=DTYPES[job.dtype], attn="sdpa")
    home = model.load(kinds, scratch)
    device = mt.CpuDevice() if job.device == "cpu" else mt.accelerator()
    engine = mt.Engine(
        home.decoder, home.store, optimizer=optimizer, settings=settings, device=device
    )

    def step(batch: Sequence[Tensor]) -> tuple[float, float | None]:
        result = engine.step([mt.MicroBatch(input_ids=ids, labels=ids) for ids in batch])
        engine.synchronize()  # updates too: nothing is left to a next step
        return result.loss, result.grad_norm

    return Prepared(params=home.store.layout.num_params, step=step, close=engine.close)


if __name__ == "__main__":
    serve(prepare)
