"""The update at the speed of memory: parameters per second against torch, bytes against a triad.

    python -m benchmarks.optimizer [--json] [--params 210] [--threads 2] [--rounds 15]

The contestants take turns in every round, so that a busy machine slows all of them, and a figure
is the median over rounds of the ratio within a round. All buffers have huge pages, as in the store,
and all use the same threads. Needs 26 bytes per parameter and 1.2 GiB.

    ours               bf16 gradient, split master, moments in one pass: 26 bytes per parameter
    ours_bf16          the same with moments in bf16: 18 bytes
    ours_int8          the same with moments in 8 bits: 14 bytes
    torch_fused        torch.optim.AdamW(fused=True), fp32 parameters and gradients: 28 bytes
    master_plus_copy   the same from a bf16 gradient to a bf16 copy, one pass for each: 46 bytes
                       (with the lines that a store reads first)
    triad              a = b + 3 c in fp64, ordinary stores: 24 bytes an element by custom,
                       32 with the line of `a` that the store reads first
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatrain.optim.kernel import AdamWScalars
from megatrain.optim.native import NativeKernel
from megatrain.optim.rounding import Rounding
from megatrain.optim.states import STATES

OURS_BYTES = 26
TRIAD_BYTES = 24
TRIAD_BYTES_WITH_READ = 32
TRIAD_ELEMENTS = 50 * 2**20
PATTERN = 2**20

TARGETS = {
    "vs_torch_fused": 1.0,
    "vs_master_plus_copy": 1.3,
    "bandwidth_share": 0.9,
    "bf16_vs_fp32": 1.2,
    "int8_vs_fp32": 1.2,
}


def host_buffer(n: int, dtype: torch.dtype, pattern: Tensor) -> Tensor:
    """`n` elements on huge pages, every one written: an untouched page costs no memory traffic."""
    mapping = mmap.mmap(-1, n * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(mapping, dtype=dtype)
    buffer.view(-1, PATTERN).copy_(pattern)
    return buffer


def contestants(n: int, kernel: NativeKernel, num_threads: int) -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(PATTERN, generator=generator) * 0.02
    gradient = (torch.randn(PATTERN, generator=generator) * 1e-3).bfloat16()
    zero = torch.zeros(1)
    m = host_buffer(n, torch.float32, zero)  # shared: who updates them does not matter here
    v = host_buffer(n, torch.float32, zero)
    grad = host_buffer(n, torch.bfloat16, gradient)
    hi = host_buffer(n, torch.bfloat16, values)
    lo = host_buffer(n, torch.int16, zero)
    master = torch.nn.Parameter(host_buffer(n, torch.float32, values))
    master.grad = host_buffer(n, torch.float32, gradient)
    copy = host_buffer(n, torch.bfloat16, values)
    a, b, c = (host_buffer(TRIAD_ELEMENTS, torch.float64, values) for _ in range(3))

    scalars = AdamWScalars.at(10, lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    optimizer = torch.optim.AdamW([master], lr=1e-5, weight_decay=0.01, fused=True)
    optimizer.state[master] = {"step": torch.tensor(10.0), "exp_avg": m, "exp_avg_sq": v}

    def ours(states: Sequence[Tensor]) -> Callable[[], None]:
        rounding = Rounding(seed=0, update=10, first=0)
        return lambda: kernel.adamw(
            *(hi, lo, states, grad, scalars, rounding), num_threads=num_threads
        )

    def rounded(state: str) -> list[Tensor]:
        return [
            host_buffer(n, getattr(torch, str(kind.bf16)), zero)[: n // kind.elements_per_number]
            for kind in STATES["adamw"][state]
        ]

    def master_plus_copy() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        copy.copy_(master.detach())

    return {
        "ours": ours((m, v)),
        "ours_bf16": ours(rounded("bf16")),
        "ours_int8": ours(rounded("8bit")),
        "torch_fused": lambda: optimizer.step(),
        "master_plus_copy": master_plus_copy,
        "triad": lambda: kernel.triad(a, b, c, num_threads=num_threads),
    }


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(millions: int, num_threads: int, num_rounds: int) -> dict[str, object]:
    torch.set_num_threads(num_threads)
    n = -(-millions * 10**6 // PATTERN) * PATTERN
    kernel = NativeKernel()
    works = contestants(n, kernel, num_threads)
    for work in works.values():
        work()
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(num_rounds)]

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(map(value, rounds)), 3)

    def share(triad_bytes: int) -> float:
        return median(
            lambda t: OURS_BYTES * n / t["ours"] / (triad_bytes * TRIAD_ELEMENTS / t["triad"])
        )

    return {
        "params": n,
        "threads": num_threads,
        "rounds": num_rounds,
        "kernel": kernel.description,
        "ours_params_per_s": median(lambda t: n / t["ours"]),
        "ours_gb_per_s": median(lambda t: OURS_BYTES * n / t["ours"] / 1e9),
        "triad_gb_per_s": median(lambda t: TRIAD_BYTES * TRIAD_ELEMENTS / t["triad"] / 1e9),
        "bf16_vs_fp32": median(lambda t: t["ours"] / t["ours_bf16"]),
        "int8_vs_fp32": median(lambda t: t["ours"] / t["ours_int8"]),
        "vs_torch_fused": median(lambda t: t["torch_fused"] / t["ours"]),
        "vs_master_plus_copy": median(lambda t: t["master_plus_copy"] / t["ours"]),
        "bandwidth_share": share(TRIAD_BYTES),
        "bandwidth_share_counting_reads_before_writes": share(TRIAD_BYTES_WITH_READ),
        "targets": TARGETS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=210, help="millions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.params, arguments.threads, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:46} {value}")


if __name__ == "__main__":
    main()
