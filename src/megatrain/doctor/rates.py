"""Rates for plans, measured: matrix products, attention, element-wise work, copies.

    products      those of one block, tokens x width: two square matrices (queries, output) and the
                  three of a gated feed-forward three times as wide; forward and backward apart
    attention     causal, as a share of the rate of products
    element-wise  silu(a) * b in bf16: 10 bytes an element
    copies        by the device's own `fill`, from memory that went through its `map_host`, each way
                  alone and both at once

A rate is that of the lower quartile of a few repetitions, after one that is not counted: near the
best, which others on the machine disturb least, without being one lucky time. Everything goes
through the device's protocol, so the same code measures a CPU and an accelerator.

Laws (tests/doctor/test_rates.py)
    1. A device that is slower by a known factor is measured slower by it.
    2. No measurement takes longer than a few times its budget: points that would are left out.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.devices.device import Device
from megatrain.engine.compute.products import E4M3, MULTIPLE, narrowed, product, why_not_fp8
from megatrain.memory.arena import map_arena
from megatrain.planning.machine.profile import FlopRate

BUDGET_S = 0.25
"""For each figure."""
PRODUCTS_S = 1.5
"""Most that the products of a shape may take."""
_EMULATED = 0.05
"""Below this share of bf16's rate a small product is emulated: element by element, one of a usual
shape would take minutes."""
COPY_BYTES = 256 << 20
"""Beyond most caches, and long enough that starting a copy does not count."""
_MIXED_WIDTH = 22
"""FLOPs of the products of a block per token and width squared: 2 x (2 + 3 x 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device to measure, and a way to wait for it."""

    place: torch.device
    synchronize: Callable[[], None]
    budget_s: float = BUDGET_S

    def rate(self, work: Callable[[], object], amount: float) -> float:
        """Return `amount` per second, that one call of `work` does."""
        return amount / self.seconds(work)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the time of one call in steady state: the lower quartile."""
        self._timed(work)
        first = self._timed(work)
        repeats = max(2, min(30, int(self.budget_s / max(first, 1e-6))))
        times = [first, *(self._timed(work) for _ in range(repeats))]
        return statistics.quantiles(times, n=4, method="inclusive")[0]

    def _timed(self, work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def values(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return random numbers: products of zeros can be faster."""
        return torch.randn(*shape, device=self.place).mul_(0.02).to(dtype)


def product_rates(
    bench: Bench,
    widths: tuple[int, ...],
    tokens: tuple[int, ...],
    *,
    most_s: float = PRODUCTS_S,
    until: float = math.inf,
) -> tuple[tuple[FlopRate, ...], tuple[FlopRate, ...]]:
    """Return the rates of forward's and of backward's products, at all shapes but the slowest.

    `most_s` is the most that a shape may take, `until` when (time.monotonic) no more is begun.
    """
    forward: list[FlopRate] = []
    backward: list[FlopRate] = []
    for width in widths:
        for rows in tokens:
            flops = float(_MIXED_WIDTH * rows * width * width)
            known = max((point.flops for point in forward), default=None)
            if known is not None and (4 * flops / known > most_s or time.monotonic() > until):
                continue
            ahead, back = _block_products(bench, width, rows, torch.bfloat16)
            forward.append(FlopRate(width, rows, bench.rate(ahead, flops)))
            backward.append(FlopRate(width, rows, bench.rate(back, 2 * flops)))
    return tuple(forward), tuple(backward)


def fp32_share(bench: Bench, width: int, rows: int) -> float:
    """Return the rate of forward products in fp32 over that in bf16."""
    halves, _ = _block_products(bench, width, rows, torch.bfloat16)
    wholes, _ = _block_products(bench, width, rows, torch.float32)
    return bench.seconds(halves) / bench.seconds(wholes)


def fp8_gain(bench: Bench, width: int, rows: int) -> float:
    """Return the rate of products in fp8 over that in bf16; 1: the device is no faster so."""
    if bench.place.type == "cpu" or why_not_fp8(bench.place):
        return 1.0
    if _gain(bench, MULTIPLE, MULTIPLE) < _EMULATED:
        return 1.0
    return max(1.0, _gain(bench, width, rows))


def _gain(bench: Bench, width: int, rows: int) -> float:
    given, weight = bench.values(rows, width), bench.values(4 * width, width)
    sides = [narrowed(side, E4M3) for side in (given, weight)]
    plain = bench.seconds(lambda: F.linear(given, weight))
    narrow = bench.seconds(lambda: product(sides[0], sides[1], torch.bfloat16))
    return plain / narrow


def _block_products(
    bench: Bench, width: int, rows: int, dtype: torch.dtype
) -> tuple[Callable[[], None], Callable[[], None]]:
    narrow = bench.values(rows, width, dtype=dtype)  # (tokens, width)
    wide = bench.values(rows, 3 * width, dtype=dtype)
    square = bench.values(width, width, dtype=dtype)
    up = bench.values(3 * width, width, dtype=dtype)
    down = bench.values(width, 3 * width, dtype=dtype)
    linears = ((narrow, square, narrow), (narrow, up, wide), (wide, down, narrow))
    times = (2, 2, 1)

    def forward() -> None:
        for (given, weight, _), count in zip(linears, times, strict=True):
            for _ in range(count):
                F.linear(given, weight)

    def backward() -> None:
        for (given, weight, gradient), count in zip(linears, times, strict=True):
            for _ in range(count):
                torch.mm(gradient, weight)
                torch.mm(gradient.t(), given)

    return forward, backward


def attention_share(bench: Bench, product_flops: float, *, heads: int, length: int) -> float:
    """Return the rate of causal attention over `product_flops`."""
    size = 64
    query, key, value = (bench.values(1, heads, length, size) for _ in range(3))
    flops = 2.0 * heads * length * (length + 1) / 2 * 2 * size

    def work() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return bench.rate(work, flops) / product_flops


def elementwise_rate(bench: Bench, elements: int = 8 << 20) -> float:
    """Return the bytes per second of element-wise work."""
    first, second = bench.values(elements), bench.values(elements)
    return bench.rate(lambda: F.silu(first) * second, 10.0 * elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Bytes per second between host and device."""

    into: float
    out: float
    duplex_share: float
    """Share of its rate that each direction keeps while both are busy."""

    @property
    def both(self) -> float:
        """The sum of both directions while both are busy."""
        return 2 * min(self.into, self.out) * self.duplex_share


def registration_rate(device: Device, *, num_bytes: int = COPY_BYTES) -> float:
    """Return the bytes per second at which host memory that was written before is pinned."""
    seconds = []
    for _ in range(2):
        arena = map_arena("the pinning of doctor", num_bytes)
        arena.fill_(1)
        begin = time.perf_counter()
        device.pin("the pinning of doctor", arena)
        seconds.append(time.perf_counter() - begin)
        device.unmap_host(arena)
    return num_bytes / max(min(seconds), 1e-9)


StreamMaker = Callable[[], AbstractContextManager[object]]


def copy_rates(
    device: Device,
    *,
    num_bytes: int = COPY_BYTES,
    budget_s: float = BUDGET_S,
    stream: StreamMaker = nullcontext,
) -> CopyRates:
    """Return the rates of copies each way, alone and together."""
    bench = Bench(place=torch.device("cpu"), synchronize=device.synchronize, budget_s=budget_s)
    hosts = [device.map_host(num_bytes, "the copies of doctor") for _ in range(2)]
    for host in hosts:
        host.fill_(1)  # pages that were never written are one zero page, and copy faster
    devices = [device.allocate(num_bytes, "the copies of doctor") for _ in range(2)]
    try:
        into = bench.seconds(lambda: device.copy(devices[0], hosts[0]))
        out = bench.seconds(lambda: device.copy(hosts[1], devices[1]))
        works = (
            lambda: device.copy(devices[0], hosts[0]),
            lambda: device.copy(hosts[1], devices[1]),
        )
        both = bench.seconds(lambda: _together(works, stream))
    finally:
        for host in hosts:
            device.unmap_host(host)
    return CopyRates(
        into=num_bytes / into,
        out=num_bytes / out,
        duplex_share=min(1.0, max(into, out) / both),
    )


def _together(works: tuple[Callable[[], None], ...], stream: StreamMaker) -> None:
    """Do both at once, each on its thread and stream, as the lanes do."""

    def run(work: Callable[[], None]) -> None:
        with stream():
            work()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shapes_for(own_memory: bool) -> Iterator[tuple[int, ...]]:
    """Yield widths, then token counts, that are typical for a device of this kind."""
    yield (1024, 4096, 8192) if own_memory else (256, 1024, 2048)
    yield (256, 1024, 4096, 16384) if own_memory else (128, 512, 2048)
