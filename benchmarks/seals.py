"""What the check of host memory costs (engine/seals.py).

    python -m benchmarks.seals --json [--params 24]

    seal_gb_per_s       bytes that seals cover in a second, in the cache of one core
    memory_gb_per_s     the same out of memory
    update_gb_per_s     bytes that AdamW's pass moves: 26 a param, by custom
    exposed_ratio       norm and update of a block with seals over those without, fp32 moments
    exposed_ratio_8bit  the same with moments in 8 bits
    hidden_ratio        a step with the check over one without, on this processor, where the lane of
                        the optimizer has time to spare
    hidden_cpu_ratio    the same in seconds of all threads: what the step would take longer if
                        nothing were hidden
    exposed_step_ratio  as hidden_ratio, with few tokens, where a step waits for updates

Seals and passes are timed in seconds of their thread, so that other programs matter less; least of
several. Steps are timed with and without in turns; the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig

from benchmarks.step import build_store
from megatrain.engine.engine import Engine
from megatrain.engine.updates import Updates
from megatrain.memory.kinds import Kind, store_kinds, update_traffic
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import Block, Param
from megatrain.optim.adamw import AdamW
from megatrain.optim.native import load_kernel
from megatrain.optim.states import ADAMW, STATES, WITH_CLIP
from megatrain.step.ops import Role
from megatrain.step.resources import OpTable
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape
from testkit.plain import make_batch

TARGETS = {"hidden_ratio": (0.0, 1.03)}
ROUNDS = 7
MODEL = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, vocab_size=2048,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048,
    tie_word_embeddings=False, dtype="float32",
)  # fmt: skip
LONG, SHORT = [(2, 512)], [(1, 16)]
"""Rows and lengths of micro-batches."""


def least_seconds(work: Callable[[], object]) -> float:
    """Return the least time of this thread that `work` took."""
    found = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


def seal_rates() -> dict[str, float]:
    """Return the rates of seals alone, of one thread."""
    kernel, found = load_kernel(), {}
    for name, num_bytes, times in (("seal", 1 << 19, 64), ("memory", 1 << 28, 1)):
        data = torch.ones(num_bytes, dtype=torch.uint8)

        def work(data: torch.Tensor = data, times: int = times) -> None:
            for _ in range(times):
                kernel.seals([data], num_threads=1)

        found[f"{name}_gb_per_s"] = num_bytes * times / least_seconds(work) / 1e9
    return found


def exposed(params: int, state: str) -> tuple[float, float]:
    """Return the seconds of the norm and update of one block: without seals, and with."""
    weights = Param(name="w", shape=(params,), dtype=torch.bfloat16, trained=True)
    blocks = [
        Block(index=number, role=Role.LAYER, params=(weights,) if number == 0 else ())
        for number in range(3)
    ]
    store = Store(build_layout(blocks, store_kinds(STATES["adamw"][state], waits=True)))
    store.param("w", Kind.HI).normal_()
    store.param("w", Kind.GRAD).normal_()
    shape = StepShape(num_blocks=3, trained=(True, False, False))
    optimizer, table = AdamW(learning_rate=1e-6, max_grad_norm=1.0, state=state), OpTable(shape)
    (segment,) = store.layout.trained_segments(0)
    gradient = [(segment, store.segment(segment, Kind.GRAD))]
    seconds = []
    for threads in (0, 1):
        updates = Updates(optimizer, store, shape, check_threads=threads)

        def work(updates: Updates = updates) -> None:
            updates.measure(table.norm(0), gradient, 1)
            updates.judge(1)
            updates.apply(table.update(0), gradient)

        work()  # states are mapped
        updates.seals.take_all({0: 1})
        seconds.append(least_seconds(work))
        assert updates.seals.damage is None
    return seconds[0], seconds[1]


def step_ratios(rows: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the time of a step with the check over one without: by the clock, and of threads."""
    batch, engines = make_batch(rows, seed=1), []
    for check in (False, True):
        decoder, store = build_store(MODEL, WITH_CLIP)
        optimizer = AdamW(learning_rate=1e-6, max_grad_norm=1.0)
        engines.append(
            Engine(decoder, store, optimizer=optimizer, settings=StepSettings(check=check))
        )
    ratios = []
    for _ in range(3 * ROUNDS):
        seconds = []
        for engine in engines:
            begin = time.perf_counter(), time.process_time()
            engine.step(batch)
            seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        ratios.append([checked / plain for plain, checked in zip(*seconds, strict=True)])
    for engine in engines:
        engine.close()
    clock, threads = zip(*ratios[2:], strict=True)
    return statistics.median(clock), statistics.median(threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=24, help="millions, of the block")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    params = options.params << 20
    without, checked = exposed(params, "fp32")
    narrow = exposed(params, "8bit")
    (hidden, cpu), (waiting, _) = step_ratios(LONG), step_ratios(SHORT)
    figures = {
        **seal_rates(),
        "update_gb_per_s": params * update_traffic(ADAMW) / without / 1e9,
        "exposed_ratio": checked / without,
        "exposed_ratio_8bit": narrow[1] / narrow[0],
        "hidden_ratio": hidden,
        "hidden_cpu_ratio": cpu,
        "exposed_step_ratio": waiting,
    }
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps(rounded) if options.json else json.dumps(rounded, indent=2))


if __name__ == "__main__":
    main()
