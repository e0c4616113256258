"""A step that keeps the activations of all layers against one that computes them again.

Both engines have one store and take turns; the ratio is the median over rounds. The prediction is
the planner's: rates are fitted to the trace of the steps that recompute, and both steps are then
played on the virtual clock with them. See benchmarks/step.py for the model and the figures.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Literal

import torch
from transformers import LlamaConfig

from benchmarks.weights import fill_small
from megatrain.batch import MicroBatch
from megatrain.doctor.fit import fitted
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.planning.machine.profile import unmeasured
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.simulate import simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

KEPT_TARGETS = {"kept_over_recomputed": 0.80, "prediction_error": 0.10}
_SLOW = 2.0
"""bf16 products that take so many times those of fp32: the processor has no units for them."""


def usual_dtype() -> Literal["bf16", "fp32"]:
    """Return bf16, or fp32 on a processor that has to emulate it."""

    def seconds(dtype: torch.dtype) -> float:
        one = torch.ones((768, 768), dtype=dtype)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            one @ one
            times.append(time.perf_counter() - begin)
        return min(times)

    return "bf16" if seconds(torch.bfloat16) < _SLOW * seconds(torch.float32) else "fp32"


def measure_kept(config: LlamaConfig, num_rounds: int, length: int = 512) -> dict[str, object]:
    """Return the figures of `python -m benchmarks.step --kept`."""
    found = compared(config, 4, length, num_rounds, usual_dtype())
    seconds, busy_s = found.pop("seconds"), found.pop("busy_s")
    ratio = _median_ratio(seconds)
    return found | {
        "recomputed_s": round(statistics.median(seconds["recomputed"]), 3),
        "kept_s": round(statistics.median(seconds["kept"]), 3),
        "kept_over_recomputed": round(ratio, 3),
        "processor_time_ratio": round(_median_ratio(busy_s), 3),
        "prediction_error": round(abs(found["predicted"] / ratio - 1), 3),
        "rounds": num_rounds,
        "targets": KEPT_TARGETS,
    }


def _median_ratio(taken: dict[str, list[float]]) -> float:
    pairs = zip(taken["kept"], taken["recomputed"], strict=True)
    return statistics.median(kept / again for kept, again in pairs)


def compared(
    config: LlamaConfig, rows: int, length: int, num_rounds: int, dtype: Literal["bf16", "fp32"]
) -> dict[str, Any]:
    """Return seconds of both, their ratio, its prediction, and whether all bits are equal."""
    decoder = build_decoder(config, dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    batch = [MicroBatch(input_ids=ids, labels=ids)]
    store = _random_store(decoder, generator)
    again = StepSettings(micro_batch_tokens=rows * length)
    kept = again.changed(kept_layers=config.num_hidden_layers)
    losses: dict[str, float] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    seconds: dict[str, list[float]] = {"recomputed": [], "kept": []}
    busy_s: dict[str, list[float]] = {"recomputed": [], "kept": []}
    with (
        Engine(decoder, store, settings=again, trace=True) as recomputing,
        Engine(decoder, store, settings=kept) as keeping,
    ):
        turns = [("recomputed", recomputing), ("kept", keeping)]
        for name, engine in turns:  # the first is not counted
            losses[name] = engine.step(batch).loss
            found = {p.name: store.param(p.name, Kind.GRAD).clone() for p in decoder.params}
            gradients[name] = found
        for _ in range(num_rounds):
            for name, engine in turns:
                begin, busy = time.perf_counter(), time.process_time()
                engine.step(batch)
                engine.settle()
                seconds[name].append(time.perf_counter() - begin)
                busy_s[name].append(time.process_time() - busy)
            turns.reverse()
        assert recomputing.trace is not None
        spans = [span for span in recomputing.trace.spans if span.step > 0]
    model = shape_of(decoder)
    workload = Workload(
        model=model, step_tokens=rows * length, sequence=length, dtype=dtype, max_grad_norm=None
    )
    base = unmeasured(ram_bytes=1 << 40, base_bytes=0).changed(cores=torch.get_num_threads())
    profile = fitted(base, workload, again, spans)
    predicted = simulate(profile, workload, kept).step_s / simulate(profile, workload, again).step_s
    return {
        "dtype": dtype,
        "seconds": seconds,
        "busy_s": busy_s,
        "predicted": predicted,
        "bits_equal": losses["kept"] == losses["recomputed"]
        and all(torch.equal(gradients["kept"][n], g) for n, g in gradients["recomputed"].items()),
    }


def _random_store(decoder: Decoder, generator: torch.Generator) -> Store:
    store = Store(build_layout(decoder.blocks, (Kind.HI, Kind.GRAD)))
    fill_small(store, decoder, generator)
    return store
