"""A streamed step on an accelerator against its bound: copy rates, step time, tokens/s, memory.

    python -m benchmarks.gpu [--json] [--device cuda] [--layers 16 --hidden 2048 ...]
                             [--tokens 16384 --micro 4 --length 2048] [--trace FILE]

A Llama of random weights is made in host memory; nothing is downloaded. It takes a few steps to
warm up and some to measure, chained, so that each meets the updates that the one before left.

    step_s              median time from one step's result to the next one's
    bound_s             the longest of these four: no schedule of the same work can be faster
      compute_s         median step with copies turned off and without updates
      in_s, out_s       bytes that cross in a step, each way, over the copy rate measured alone
      host_s            one norm and update of every block, alone
    percent_of_bound    100 x bound_s / step_s
    tflop_per_s         8 per token and parameter (forward, recompute, backward), the embedding's
                        table and attention's own products not counted
    tokens_per_s        real tokens: padding would not count (there is none)
    copy_gb_per_s       registered host memory to the device (in), back (out), and the sum of both
                        when they run at once; 10^9 bytes
    peak_device_bytes   the most that was allocated at once in the whole run up to the last step

`--device cpu` copies on the CPU and `--device simulated` is the accelerator of the tests: both show
that this script works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import LlamaConfig

from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice, Device
from megatrain.devices.runtime import TorchRuntime
from megatrain.engine.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.errors import MegaTrainError
from megatrain.lanes.trace import Trace
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder, build_decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import HostOptimizer
from megatrain.optim.states import WITH_CLIP, WITHOUT_CLIP
from megatrain.optim.views import UpdateViews, Views
from megatrain.step.settings import StepSettings
from megatrain.version import __version__

WARM_UP_STEPS = 2
NUM_COPIES = 8
Context = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where steps are measured."""

    new_device: Callable[[], Device]
    new_stream: Callable[[], Context]
    """What a thread enters so that its copies go their own way."""
    watching: Callable[[Store], Context] = lambda _: nullcontext()


def place_of(name: str, cap_bytes: int | None) -> Place:
    if name == "cpu":
        return Place(
            new_device=lambda: CpuDevice(copying=True, cap_bytes=cap_bytes), new_stream=nullcontext
        )
    if name == "simulated":
        simulator = importlib.import_module("testkit.simulated.accelerator").Simulator(
            policy="early"
        )
        watched = importlib.import_module("testkit.simulated.watched").watched
        return Place(
            new_device=lambda: Accelerator(simulator, cap_bytes=cap_bytes),
            new_stream=simulator.stream,
            watching=lambda store: watched(simulator),
        )
    runtime = TorchRuntime.find(name)
    return Place(
        new_device=lambda: Accelerator(runtime, cap_bytes=cap_bytes), new_stream=runtime.stream
    )


def build_model(options: argparse.Namespace) -> tuple[Decoder, Store]:
    """Return a model of small random weights; all layers have those of the first."""
    heads = options.heads or max(1, options.hidden // 128)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate or 4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=options.kv_heads or heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=max(2048, options.length),
        tie_word_embeddings=False,
    )
    decoder = build_decoder(config, "bf16")
    kinds = WITH_CLIP if options.update == "late" else WITHOUT_CLIP
    store = Store(build_layout(decoder.blocks, kinds))
    generator = torch.Generator().manual_seed(0)
    last = len(decoder.blocks) - 1
    for block in (0, 1, last):
        for param in decoder.blocks[block].params:
            weight = store.param(param.name, Kind.HI)
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02, generator=generator)
            else:
                weight.fill_(1.0)
    for block in range(2, last):
        store.block_bytes(block, Kind.HI).copy_(store.block_bytes(1, Kind.HI))
    return decoder, store


def build_batch(options: argparse.Namespace) -> list[MicroBatch]:
    """Return micro-batches of whole rows, as many tokens in all as asked for, or a little less."""
    rows = options.tokens // (options.micro * options.length)
    if rows == 0:
        raise SystemExit(
            f"{options.tokens} tokens in {options.micro} micro-batches leave none of them a row of "
            f"{options.length} tokens: more --tokens, fewer --micro, or a shorter --length"
        )
    generator = torch.Generator().manual_seed(0)
    shape = (rows, options.length)
    ids = [
        torch.randint(0, options.vocabulary, shape, generator=generator)
        for _ in range(options.micro)
    ]
    return [MicroBatch(input_ids=part, labels=part) for part in ids]


def step_seconds(
    engine: Engine, batch: Sequence[MicroBatch], num_steps: int, warmed_up: Callable[[], None]
) -> float:
    """Return the median step; `warmed_up` is called before the first that counts."""
    for _ in range(WARM_UP_STEPS):
        engine.step(batch)
    warmed_up()
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        engine.step(batch)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def bytes_of_last_step(trace: Trace) -> dict[str, int]:
    """Return what crossed, by lane."""
    # The last list is a flush where updates are late: it has no copies.
    step = max(span.step for span in trace.spans if span.lane == "in")
    num_bytes = dict.fromkeys(("in", "out"), 0)
    for span in trace.spans:
        if span.step == step and span.lane in num_bytes:
            num_bytes[span.lane] += span.num_bytes
    return num_bytes


def copy_rates(place: Place, num_bytes: int) -> dict[str, float]:
    """Return 10^9 bytes/s into the device, out of it, and of both at once."""
    device = place.new_device()
    ways: dict[str, tuple[Tensor, Tensor]] = {}
    for way in ("in", "out"):
        host, there = device.map_host(num_bytes, "copies"), device.allocate(num_bytes, "copies")
        host.fill_(1)  # or there would be no pages behind it
        ways[way] = (there, host) if way == "in" else (host, there)

    def copy(way: str) -> None:
        with place.new_stream():
            for _ in range(NUM_COPIES):
                device.copy(*ways[way])

    def rate(*chosen: str) -> float:
        threads = [threading.Thread(target=copy, args=(way,)) for way in chosen]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        device.synchronize()
        seconds = time.perf_counter() - begin
        return NUM_COPIES * num_bytes * len(chosen) / seconds / 1e9

    rate("in", "out")
    rates = {"in": rate("in"), "out": rate("out"), "both": rate("in", "out")}
    device.close()
    return rates


def compute_seconds(
    place: Place, decoder: Decoder, store: Store, options: argparse.Namespace
) -> float:
    """Return the median step without copies, on the weights that are in the slots once warm."""
    device = place.new_device()

    def without_copies() -> None:
        device.copy = lambda target, source: None  # type: ignore[method-assign]

    with Engine(
        decoder,
        store,
        optimizer=_Idle(learning_rate=0.0),
        device=device,
        settings=settings_of(options),
    ) as engine:
        return step_seconds(engine, build_batch(options), options.steps, without_copies)


class _Idle(HostOptimizer):
    """An optimizer that does nothing."""

    states = ()

    def squared_norm(self, gradient: Tensor) -> float:
        return 0.0

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        pass


def host_seconds(decoder: Decoder, store: Store, optimizer: AdamW) -> float:
    """Return the time of one norm and update of every block, with gradients of zero."""
    segments = [
        segment
        for block in range(store.layout.num_blocks)
        for segment in store.layout.trained_segments(block)
    ]
    sizes = [segment.num_elements * segment.dtype.itemsize for segment in segments]
    zeros = torch.zeros(max(sizes), dtype=torch.uint8)
    update_views = UpdateViews(store, optimizer.states, optimizer.decayed(decoder.params))
    begin = time.perf_counter()
    for segment, size in zip(segments, sizes, strict=True):
        gradient = zeros[:size].view(segment.dtype)
        optimizer.squared_norm(gradient)
        for span, views in update_views.of(segment):
            optimizer.update(views, gradient[span], step=1, number=1, scale=1.0)
    return time.perf_counter() - begin


def settings_of(options: argparse.Namespace) -> StepSettings:
    return StepSettings(
        update=options.update,
        slots=options.slots,
        tape=options.tape,
        tape_slots=options.tape_slots,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    place = place_of(options.device, options.cap_gib and int(options.cap_gib * 2**30))
    decoder, store = build_model(options)
    batch = build_batch(options)
    optimizer = AdamW(
        learning_rate=1e-6,
        max_grad_norm=1.0 if options.update == "late" else None,
        num_threads=options.threads,
    )
    with place.watching(store):
        device = place.new_device()
        with Engine(
            decoder,
            store,
            optimizer=optimizer,
            device=device,
            trace=True,
            settings=settings_of(options),
        ) as engine:
            step_s = step_seconds(engine, batch, options.steps, lambda: None)
        assert engine.trace is not None
        if options.trace:
            engine.write_trace(options.trace)
        peak_bytes, crossed = device.peak_bytes, bytes_of_last_step(engine.trace)
        del engine
        compute_s = compute_seconds(place, decoder, store, options)
        rates = copy_rates(place, options.copy_mib << 20)
    lanes_s = {
        "compute_s": compute_s,
        "in_s": crossed["in"] / rates["in"] / 1e9,
        "out_s": crossed["out"] / rates["out"] / 1e9,
        "host_s": host_seconds(decoder, store, optimizer),
    }
    bound_by = max(lanes_s, key=lambda name: lanes_s[name])
    num_tokens = sum(micro.num_tokens for micro in batch)
    num_params = store.layout.num_params
    num_multiplied = num_params - options.vocabulary * options.hidden
    return {
        "machine": describe_machine(options.device),
        "options": {
            name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()
        },
        "params": num_params,
        "tokens_per_step": num_tokens,
        "step_s": _rounded(step_s),
        "bound_s": _rounded(lanes_s[bound_by]),
        "bound_by": bound_by.removesuffix("_s"),
        "percent_of_bound": round(100 * lanes_s[bound_by] / step_s, 1),
        **{name: _rounded(seconds) for name, seconds in lanes_s.items()},
        "tokens_per_s": _rounded(num_tokens / step_s),
        "tflop_per_s": _rounded(8 * num_multiplied * num_tokens / step_s / 1e12),
        "copy_gb_per_s": {name: _rounded(rate) for name, rate in rates.items()},
        "bytes_in_per_step": crossed["in"],
        "bytes_out_per_step": crossed["out"],
        "peak_device_bytes": peak_bytes,
    }


def describe_machine(device: str) -> dict[str, Any]:
    """Return what others need to know to make sense of the figures."""
    described: dict[str, Any] = {
        "megatrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "host_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": device,
    }
    if device not in ("cpu", "simulated"):
        properties = torch.get_device_module(device).get_device_properties(torch.device(device))
        described |= {
            "device_name": properties.name,
            "device_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    return described | _asked_of_driver()


def _asked_of_driver() -> dict[str, str]:
    """Return NVIDIA's driver and PCIe link, of the first device, if its tool is there."""
    fields = {
        "driver": "driver_version",
        "pcie_generation": "pcie.link.gen.max",
        "pcie_lanes": "pcie.link.width.max",
    }
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    found = [part.strip() for part in output.stdout.partition("\n")[0].split(",")]
    return dict(zip(fields, found, strict=False))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, xpu, cpu or simulated")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=0, help="default: 4 x hidden")
    parser.add_argument("--heads", type=int, default=0, help="default: hidden / 128")
    parser.add_argument("--kv-heads", type=int, default=0, help="default: as many as heads")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=16384, help="of a whole step")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--update", choices=["late", "in_backward"], default="late")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tape", choices=["device", "host"], default="host")
    parser.add_argument("--tape-slots", type=int, default=2)
    parser.add_argument("--cap-gib", type=float, default=None, help="of device memory")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--copy-mib", type=int, default=512, help="of one copy, for the rates")
    parser.add_argument("--trace", type=Path, default=None, help="write what the lanes did")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    try:
        figures = measure(options)
    except MegaTrainError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
