"""A step on the CPU against the plain Hugging Face model: time, peak memory, bytes per parameter.

    python -m benchmarks.step [--json] [--optimizer | --memory]

A Llama of 270M random parameters in bf16 and one batch of 4 x 512 tokens. The other side is the
plain model with gradient checkpointing and its own loss, the mean over trained tokens. Ours is the
engine in views mode: nothing is copied but gradients, into the store. Both take turns in one
process, who begins alternates, and a figure is the median over rounds of the ratio within a round,
so that a busy machine slows both. A step of ours ends when gradients and updates are all in the
store: nothing hides behind a next one.

    step_over_plain       seconds of our step over the plain one's: forward, backward, no optimizer
    bits_equal            loss and every gradient of both sides are the same bits
    peak_rss_over_plain   peak resident memory of a process that does nothing but three of our
                          steps, over one that does three plain ones; imports included

With --optimizer both sides end with AdamW: ours with fp32 masters and moments, theirs
torch.optim.AdamW(fused=True) on the bf16 weights, with bf16 moments and no masters.

    step_over_plain       ours with updates in backward
    late_over_plain       ours with the global norm known before any update
    second_over_late      ours with the norm from a first backward, updates in a second, over late

With --memory, a Llama of 820M parameters takes two short steps in a process of its own with each
way to update, for each state of the optimizer (or `--state` alone). Needs 13 GiB; 10 with bf16,
8 with 8bit.

    bytes_per_param       by state: resident after the steps, above what it was before the store
                          was made, slots, tape and rings freed (`slots_per_param` says what they
                          held)
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.weights import fill_small
from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import STATES, WITH_CLIP
from megatrain.ranks.ownership import SOLE, Owner
from megatrain.step.shape import Update
from testkit.engines import make_engine

VOCABULARY = 32000
LEARNING_RATE = 1e-5
WITHOUT_UPDATES = (TensorKind.HI, TensorKind.GRAD)

TARGETS = {"step_over_plain": 1.0, "peak_rss_over_plain": 1.0}
OPTIMIZER_TARGETS = {"step_over_plain": 1.0}
MEMORY_TARGETS = {
    "fp32": {"in_backward": 12.2, "late": 14.2, "second_backward": 12.2},
    "bf16": {"in_backward": 8.1, "late": 10.1, "second_backward": 8.1},
    "8bit": {"in_backward": 6.2, "late": 8.2, "second_backward": 6.2},
}

Step = Callable[[], float]
"""One whole step; returns its loss."""


def llama(hidden_size: int, intermediate_size: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=16,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )


SMALL = llama(1024, 2816)
LARGE = llama(1856, 5376)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def build_store(
    config: LlamaConfig,
    kinds: tuple[TensorKind, ...],
    on_disk: tuple[TensorKind, ...] = (),
    scratch: Path = Path(),
    owner: Owner = SOLE,
    lora: LoraConfig | None = None,
) -> tuple[Decoder, Store]:
    """Return a model of small random weights, some of its kinds in a file in `scratch`."""
    decoder = build_decoder(config, "bf16", lora=lora)
    layout = build_layout(decoder.blocks, kinds, owner)
    tier = Tier(scratch, TierRegions(layout, on_disk)) if on_disk else None
    store = Store(layout, tier)
    fill_small(store, decoder, torch.Generator().manual_seed(0))
    return decoder, store


def build_plain(config: LlamaConfig) -> LlamaForCausalLM:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable()
    return model.train()


def plain_step(
    model: LlamaForCausalLM, ids: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return float(loss.detach())

    return step


def our_step(engine: Engine, ids: Tensor) -> Step:
    batch = [MicroBatch(input_ids=ids, labels=ids)]

    def step() -> float:
        result = engine.step(batch)
        engine.synchronize()
        return result.loss

    return step


def take_turns(steps: dict[str, Step], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant, round by round, after one step to warm up."""
    for step in steps.values():
        step()
    names, seconds = list(steps), {name: list[float]() for name in steps}
    for _ in range(num_rounds):
        for name in names:
            begin = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - begin)
        names.reverse()
    return seconds


def measure(num_threads: int, num_rounds: int) -> dict[str, object]:
    """Return the figures without --optimizer."""
    peaks = {who: _alone(f"peak {who}", num_threads) for who in ("ours", "plain")}
    ids = tokens(4, 512)
    decoder, store = build_store(SMALL, WITHOUT_UPDATES)
    model = build_plain(SMALL)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(store.param(name, TensorKind.HI))
    with Engine(decoder, store) as engine:
        steps = {"plain": plain_step(model, ids), "ours": our_step(engine, ids)}
        seconds = take_turns(steps, num_rounds)
        bits_equal = steps["plain"]() == steps["ours"]() and all(
            param.grad is not None and torch.equal(param.grad, store.param(name, TensorKind.GRAD))
            for name, param in model.named_parameters()
        )
    return {
        "params": store.layout.num_params,
        "tokens": ids.numel(),
        "threads": num_threads,
        "rounds": num_rounds,
        "plain_s": _median(seconds["plain"]),
        "ours_s": _median(seconds["ours"]),
        "step_over_plain": _median_ratio(seconds["ours"], seconds["plain"]),
        "bits_equal": bits_equal,
        "plain_peak_gib": round(peaks["plain"]["peak_bytes"] / 2**30, 3),
        "ours_peak_gib": round(peaks["ours"]["peak_bytes"] / 2**30, 3),
        "peak_rss_over_plain": round(peaks["ours"]["peak_bytes"] / peaks["plain"]["peak_bytes"], 3),
        "targets": TARGETS,
    }


def measure_optimizer(num_threads: int, num_rounds: int) -> dict[str, object]:
    """Return the figures with --optimizer."""
    ids = tokens(4, 512)
    decoder, store = build_store(SMALL, WITH_CLIP)
    model = build_plain(SMALL)
    fused = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    with (
        _engine(decoder, store, "in_backward", num_threads) as in_backward,
        _engine(decoder, store, "late", num_threads) as late,
        _engine(decoder, store, "second_backward", num_threads) as second_backward,
    ):
        steps = {
            "plain": plain_step(model, ids, fused),
            "in_backward": our_step(in_backward, ids),
            "late": our_step(late, ids),
            "second_backward": our_step(second_backward, ids),
        }
        seconds = take_turns(steps, num_rounds)
    return {
        "params": store.layout.num_params,
        "tokens": ids.numel(),
        "threads": num_threads,
        "rounds": num_rounds,
        "plain_s": _median(seconds["plain"]),
        "in_backward_s": _median(seconds["in_backward"]),
        "late_s": _median(seconds["late"]),
        "second_backward_s": _median(seconds["second_backward"]),
        "step_over_plain": _median_ratio(seconds["in_backward"], seconds["plain"]),
        "late_over_plain": _median_ratio(seconds["late"], seconds["plain"]),
        "second_over_late": _median_ratio(seconds["second_backward"], seconds["late"]),
        "targets": OPTIMIZER_TARGETS,
    }


def measure_memory(num_threads: int, states: Sequence[str]) -> dict[str, object]:
    """Return the figures with --memory."""
    targets = {state: MEMORY_TARGETS[state] for state in states}
    figures = {
        state: {name: _alone(f"memory {name} {state}", num_threads) for name in targets[state]}
        for state in states
    }

    def by_state(name: str) -> dict[str, dict[str, float]]:
        return {
            state: {update: figure[name] for update, figure in found.items()}
            for state, found in figures.items()
        }

    return {
        "params": figures[states[0]]["late"]["params"],
        "bytes_per_param": by_state("per_param"),
        "slots_per_param": by_state("slots_per_param"),
        "targets": targets,
    }


def _engine(
    decoder: Decoder, store: Store, update: Update, num_threads: int, state: str = "fp32"
) -> Engine:
    optimizer = AdamW(
        learning_rate=LEARNING_RATE,
        weight_decay=0.01,
        max_grad_norm=None if update == "in_backward" else 1.0,
        num_threads=num_threads,
        state=state,
    )
    return make_engine(decoder, store, optimizer=optimizer, update=update, state=state)


def _alone(work: str, num_threads: int) -> dict[str, float]:
    """Return what `work` measures in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step", "--alone", work]
    command += ["--threads", str(num_threads)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output)
    return figures


def _run_alone(work: str, num_threads: int) -> dict[str, float]:
    what, who, *states = work.split()
    if what == "memory":
        assert who in get_args(Update)
        return _resident_after_two_steps(who, num_threads, *states)  # type: ignore[arg-type]
    ids = tokens(4, 512)
    if who == "plain":
        step = plain_step(build_plain(SMALL), ids)
        for _ in range(3):
            step()
    else:
        with Engine(*build_store(SMALL, WITHOUT_UPDATES)) as engine:
            step = our_step(engine, ids)
            for _ in range(3):
                step()
    return {"peak_bytes": _peak_bytes()}


def _resident_after_two_steps(update: Update, num_threads: int, state: str) -> dict[str, float]:
    kinds = store_kinds(STATES["adamw"][state], waits=update == "late")
    small = build_store(llama(128, 256), kinds)
    _two_steps(*small, update, num_threads, state)  # loads what loads late
    before = _settled_bytes()
    decoder, store = build_store(LARGE, kinds)
    with_slots = _two_steps(decoder, store, update, num_threads, state)
    num_params = store.layout.num_params
    resident = _settled_bytes()
    return {
        "params": num_params,
        "per_param": round((resident - before) / num_params, 3),
        "slots_per_param": round((with_slots - resident) / num_params, 3),
    }


def _two_steps(decoder: Decoder, store: Store, update: Update, num_threads: int, state: str) -> int:
    """Take two steps and return what is resident while slots and rings are still there."""
    with _engine(decoder, store, update, num_threads, state) as engine:
        step = our_step(engine, tokens(1, 64))
        for _ in range(2):
            step()
        return _settled_bytes()


def _settled_bytes() -> int:
    """Return the resident memory once free memory was given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def _peak_bytes() -> int:
    """Return the most that was ever resident. Not ru_maxrss: that one counts the parent's too."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _median_ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", action="store_true", help="whole steps, with AdamW")
    parser.add_argument("--memory", action="store_true", help="bytes per parameter after two steps")
    parser.add_argument("--state", choices=list(MEMORY_TARGETS), help="of --memory: this one alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, object]
    if options.alone:
        figures = dict(_run_alone(options.alone, options.threads))
    elif options.memory:
        figures = measure_memory(
            options.threads, [options.state] if options.state else list(MEMORY_TARGETS)
        )
    else:
        run = measure_optimizer if options.optimizer else measure
        figures = run(options.threads, options.rounds)
    if options.json or options.alone:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
