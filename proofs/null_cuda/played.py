"""Play cases on the null device, in a process of its own: one JSON object for each.

    python -m testkit.null_cuda -m proofs.null_cuda.played --cases packed,plain

Of two devices the second is used. Weights are zeros that nobody made: no value is looked at. What
is counted is one step behind two that warm up, between its begin and the moment all its updates are
in the store.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice, accelerator
from megatrain.devices.runtime import TorchRuntime
from megatrain.disk.hf.narrowed import presumed
from megatrain.engine.compute.drawing import SamplingParams
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import kinds_on_disk, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.ledger import Ledger
from megatrain.memory.store import Store
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.muon import Muon
from megatrain.optim.states import STATES
from megatrain.planning.memory.device import device_lines
from megatrain.planning.memory.kernels import CARD_KERNELS
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.workload import Workload
from megatrain.quantization import Quantization
from megatrain.step.settings import StepSettings
from proofs.null_cuda.cases import CASES, LAYERS, NullCase
from testkit.engines import make_engine
from testkit.null_cuda import library
from testkit.null_cuda.library import Counts

DEVICE = 1
WARM_STEPS = 2
NUM_MICRO, TOKENS, DOCUMENTS = 2, 2048, 4
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4608,
    "num_attention_heads": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
}


def play(case: NullCase) -> dict[str, Any]:
    """Return what a case gave: counts of a steady step, and memory against the plan."""
    device = accelerator(f"cuda:{DEVICE}")
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    decoder = build(case)
    settings = StepSettings(
        micro_batch_tokens=TOKENS, seed=7, **{"update": "late", **case.settings}
    )
    with made_engine(case, decoder, settings, device) as engine:
        act = _ACTS[case.does](engine, case)
        live = []
        for _ in range(WARM_STEPS):
            act()
            engine.synchronize()
        live.append(torch.accelerator.memory_allocated(DEVICE))
        library.forget()
        act()
        engine.synchronize()
        found = library.counts()
        live.append(torch.accelerator.memory_allocated(DEVICE))
    device.close()
    result = counts_of(case, found) | {"grows": live[1] > live[0]}
    if case.is_planned:
        peak = torch.accelerator.max_memory_allocated(DEVICE) - before
        ledger = Ledger(
            device_lines(workload_of(case, decoder), settings, CARD_KERNELS, unified=False)
        )
        result["peak_over_plan"] = round(peak / ledger.total("device"), 4)
        if not case.has_room:
            result["plan_over_peak"] = round(ledger.total("device") / peak, 4)
        result["driver_mib"] = library.driver_peak_bytes(DEVICE) >> 20
    return result


def counts_of(case: NullCase, found: Counts) -> dict[str, Any]:
    return {
        "case": case.name,
        "launches": found.launches,
        "host_waits": max(0, found.host_waits - case.waits),
        "pageable_copies": found.pageable_copies,
        "foreign_calls": found.foreign_calls(DEVICE),
        "shared_streams": found.shared_streams,
        "cudnn_plans": found.of("cuDNN plan"),
    }


def build(case: NullCase) -> Decoder:
    """Return the model of a case."""
    config: PreTrainedConfig
    if case.family == "qwen3":
        config = Qwen3Config(**SIZES | (LARGE if case.is_large else {}))
    else:
        config = Qwen3MoeConfig(**SIZES, **EXPERTS)
    if not case.base:
        return build_decoder(config, "bf16")
    decoder = build_decoder(config, "bf16", lora=LoraConfig(rank=16, alpha=32.0))
    if case.base == "nf4":
        return presumed(decoder, "nf4", None)
    if case.base == "fp8":
        return presumed(decoder, "as_published", Quantization(method="fp8", block=(128, 128)))
    return decoder


@contextmanager
def made_engine(
    case: NullCase, decoder: Decoder, settings: StepSettings, device: AcceleratorDevice
) -> Iterator[Engine]:
    """Yield an engine whose weights are zeros."""
    optimizer = (Muon if case.optimizer == "muon" else AdamW)(
        learning_rate=1e-3, max_grad_norm=None if settings.update == "in_backward" else 1.0
    )
    kinds = store_kinds(optimizer.states, waits=settings.gradients_stay)
    layout = build_layout(decoder.blocks, kinds)
    on_disk = kinds_on_disk(kinds, settings.tier)
    with tempfile.TemporaryDirectory() as scratch:
        tier = Tier(Path(scratch), TierRegions(layout, on_disk)) if on_disk else None
        with make_engine(
            decoder, Store(layout, tier), optimizer=optimizer, device=device, **settings.facts()
        ) as engine:
            yield engine


def workload_of(case: NullCase, decoder: Decoder) -> Workload:
    """Return the step as the planner knows it."""
    return Workload(
        model=shape_of(decoder),
        step_tokens=NUM_MICRO * TOKENS,
        sequence=TOKENS,
        packed=case.rows == "packed",
        compiled=bool(case.settings.get("compile")),
        kernels=str(case.settings.get("kernels", "none")),
        products=str(case.settings.get("products", "plain")),
        states=STATES[case.optimizer],
    )


def batch_of(case: NullCase, number: int) -> list[MicroBatch]:
    """Return the micro-batches of a step; plain rows change their length from one to the next."""
    batch = []
    for micro in range(NUM_MICRO):
        tokens = TOKENS
        if case.rows == "plain":
            tokens -= 128 * ((number + micro) % 2)
        ids = torch.arange(tokens)[None] % SIZES["vocab_size"]
        positions = None
        if case.rows == "packed":
            positions = torch.arange(tokens // DOCUMENTS).repeat(DOCUMENTS)[None]
        batch.append(MicroBatch(input_ids=ids, labels=ids.clone(), position_ids=positions))
    return batch


def _steps(engine: Engine, case: NullCase) -> Callable[[], object]:
    batches = [batch_of(case, number) for number in range(WARM_STEPS + 1)]
    return lambda: engine.step(batches.pop())


def _evaluates(engine: Engine, case: NullCase) -> Callable[[], object]:
    batch = batch_of(case, 0)

    def step_and_evaluate() -> None:
        engine.step(batch)
        engine.evaluate(batch)

    return step_and_evaluate


def _samples(engine: Engine, case: NullCase) -> Callable[[], object]:
    ids = torch.arange(64)[None]
    micro = MicroBatch(input_ids=ids, labels=ids, loss_tensors={"number": torch.tensor([0.5])})
    return lambda: engine.sample_next([micro], SamplingParams(temperature=1.0))


_ACTS = {"steps": _steps, "evaluates": _evaluates, "samples": _samples}


# Mutants: each breaks one law (cases.MUTANTS).


@contextmanager
def _a_copy_waits() -> Iterator[None]:
    copy = AcceleratorDevice.copy

    def waiting(device: AcceleratorDevice, target: torch.Tensor, source: torch.Tensor) -> None:
        copy(device, target, source)
        torch.accelerator.current_stream(DEVICE).synchronize()

    with mock.patch.object(AcceleratorDevice, "copy", waiting):
        yield


def _memory_is_not_registered() -> Any:
    return mock.patch.multiple(
        TorchRuntime,
        register=lambda runtime, address, num_bytes: None,
        unregister=lambda runtime, address: None,
    )


def _roles_share_a_stream() -> Any:
    def role_stream(device: AcceleratorDevice, role: str) -> Any:
        return device._runtime.stream("further", first=True)

    return mock.patch.object(AcceleratorDevice, "role_stream", role_stream)


@contextmanager
def _lanes_set_no_device() -> Iterator[None]:
    set_device = TorchRuntime.set_device

    def only_here(runtime: TorchRuntime) -> None:
        if threading.current_thread() is threading.main_thread():
            set_device(runtime)

    with mock.patch.object(TorchRuntime, "set_device", only_here):
        yield


_MUTATED: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "a copy waits": _a_copy_waits,
    "memory is not registered": _memory_is_not_registered,
    "roles share a stream": _roles_share_a_stream,
    "lanes set no device": _lanes_set_no_device,
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", required=True, help="names, with commas between")
    parser.add_argument("--mutant", default="", help="what is broken meanwhile")
    options = parser.parse_args(words)
    by_name = {case.name: case for case in CASES}
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    torch.set_num_threads(1)
    # There are no values to ask for, and no answer of the device agrees with the host's.
    AcceleratorDevice.answers = False
    for name in options.cases.split(","):
        result: dict[str, Any] = {}
        with redirect_stdout(sys.stderr):
            try:
                with _MUTATED[options.mutant]():
                    result = play(by_name[name])
            except Exception as error:
                traceback.print_exc()
                result = {"case": name, "error": f"{type(error).__name__}: {error}"[:300]}
        line = {"capability": capability, "mutant": options.mutant, **result}
        print(json.dumps(line), flush=True)
        gc.collect()
        torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()
