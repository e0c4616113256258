"""Device memory of real shapes: the peak of torch's allocator against the plan.

    python -m testkit.null_cuda --mib 143360 -m proofs.null_cuda.shapes [--json] [--layers 2]
        [--model Qwen3-8B] [--gib 24]

For each model and each size of card the planner chooses the settings, as `megatrain estimate` does
with 2 TiB of host memory. A step with these settings runs on the null device, without an optimizer,
which works on the host. Host memory is mapped and never touched: weights are zeros that no page
holds, so a model of 120B needs none. `--layers` plays the settings on a model of so many layers,
against the plan of these settings for as many; without it all layers are played.

Prints peak, plan and peak_over_plan, with libraries' workspaces left out of both (reserve.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import GptOssConfig, PreTrainedConfig, Qwen3Config

from megatrain.batch import MicroBatch
from megatrain.devices import accelerator as accelerators
from megatrain.devices.accelerator import accelerator
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.planning.estimate import estimate
from megatrain.planning.memory.device import device_lines
from megatrain.planning.memory.kernels import CARD_KERNELS
from megatrain.planning.model.skeleton import shape_of
from testkit.engines import make_engine

_MAP_NORESERVE = 0x4000
"""Number of the flag in linux/mman.h. Python has no name for it."""
HOST = "2TB"
GIB = (24, 96, 141)


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, tie_word_embeddings=False,
    )  # fmt: skip


MODELS = {
    "Qwen/Qwen3-8B": lambda: _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": lambda: _qwen3(5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": lambda: _qwen3(5120, 25600, 64, 64),
    "openai/gpt-oss-120b": lambda: GptOssConfig(num_hidden_layers=36, num_local_experts=128),
}


def measure(name: str, gib: int, layers: int | None) -> dict[str, Any]:
    """Return peak and plan of a model on a card of so much memory."""
    plan = estimate(name, ["train.kernels=none"], gpu=f"{gib}GB", ram=HOST).plan
    result: dict[str, Any] = {"model": name, "gib": gib, "fits": plan.fits}
    config = MODELS[name]()
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
    decoder = build_decoder(config, "bf16")
    workload = dataclasses.replace(plan.workload, model=shape_of(decoder))
    tokens = plan.settings.micro_batch_tokens
    num_micro = workload.step_tokens // tokens
    most = config.num_hidden_layers
    settings = plan.settings.changed(
        slots=max(2, min(plan.settings.slots, most)),
        kept_layers=min(plan.settings.kept_layers, most),
    )
    ledger = Ledger(device_lines(workload, settings, CARD_KERNELS, unified=False))
    device = accelerator("cuda:0")
    device.answers = False
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    store = Store(build_layout(decoder.blocks, (Kind.HI, Kind.GRAD)))
    with make_engine(decoder, store, device=device, **settings.facts()) as engine:
        seconds = _played(engine, [_micro(tokens, workload.sequence) for _ in range(num_micro)])
    device.close()
    peak = torch.accelerator.max_memory_allocated(0) - before
    return result | {
        "layers": config.num_hidden_layers,
        "micro_batch": tokens,
        "peak_gib": round(peak / 2**30, 2),
        "plan_gib": round(ledger.total("device") / 2**30, 2),
        "peak_over_plan": round(peak / ledger.total("device"), 4),
        "host_ms_per_layer": round(1e3 * seconds / (3 * num_micro * config.num_hidden_layers), 2),
    }


def _micro(tokens: int, length: int) -> MicroBatch:
    ids = torch.arange(tokens)[None] % 1000
    positions = (torch.arange(tokens) % length)[None]
    return MicroBatch(input_ids=ids, labels=ids.clone(), position_ids=positions)


def _played(engine: Engine, batch: list[MicroBatch]) -> float:
    """Play a step to warm up and another; return the processor time of the second."""
    engine.step(batch)
    engine.settle()
    begin = time.process_time()
    engine.step(batch)
    engine.settle()
    return time.process_time() - begin


@contextmanager
def untouched_host_memory() -> Iterator[None]:
    """Let mappings of the host reserve nothing, and nobody make their pages."""
    with (
        mock.patch.object(mmap, "MAP_PRIVATE", mmap.MAP_PRIVATE | _MAP_NORESERVE),
        mock.patch.object(accelerators, "prefault"),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--layers", type=int, help="layers of each model; all, if not given")
    parser.add_argument("--model", action="append", help="only this; may be repeated")
    parser.add_argument("--gib", action="append", type=int, help="only this; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with untouched_host_memory():
        for name in options.model or MODELS:
            for gib in options.gib or GIB:
                results.append(measure(name, gib, options.layers))
                print(results[-1], file=sys.stderr if options.json else sys.stdout, flush=True)
                gc.collect()
                torch.accelerator.empty_cache()
    if options.json:
        ratios = [result["peak_over_plan"] for result in results]
        print(json.dumps({"peak_over_plan": max(ratios), "results": results}))


if __name__ == "__main__":
    main()
