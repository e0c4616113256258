"""The measurements of `megatrain doctor`: well under a minute, under 2 GiB.

    facts  ->  copies, products, attention, element-wise (doctor/rates.py)
           ->  our optimizer's kernel, memory traffic, our disk calls  ->  Examination, kept

`--quick` takes some seconds: fewer and smaller products, one trial step in place of six, no disk.

The only place where what planning, optim and disk each know is put together.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatrain.cache import writable_cache_folder
from megatrain.devices.pinning import NotPinned
from megatrain.doctor.between_ranks import measured_network
from megatrain.doctor.rates import (
    BUDGET_S,
    COPY_BYTES,
    PRODUCTS_S,
    Bench,
    attention_share,
    copy_rates,
    elementwise_rate,
    fp8_gain,
    fp32_share,
    product_rates,
    shapes_for,
)
from megatrain.doctor.subject import Subject, find_subject
from megatrain.doctor.trial_steps import QUICK_SHAPES, SHAPES, calibrated, with_issue_times
from megatrain.errors import DoesNotFit
from megatrain.files import make_folder, remove, write_file
from megatrain.memory.arena import aligned_buffer, map_arena
from megatrain.memory.direct import CHUNK_BYTES, DISK_PAGE, DirectReader, DirectWriter, WriteQueue
from megatrain.memory.host import free_bytes
from megatrain.memory.ledger import gib
from megatrain.optim.kernel import AdamWScalars, Kernel
from megatrain.optim.native import NativeKernel, load_kernel
from megatrain.planning.machine.examination import Examination
from megatrain.planning.machine.facts import HostFacts, host_facts, profile_path
from megatrain.planning.machine.profile import EXPERT_WAIT_S, MEASURED, FlopRate, MachineProfile
from megatrain.progress import Say
from megatrain.ranks.launcher import init_distributed, local_rank, read_environment
from megatrain.text import duration

ENOUGH_S = 25.0
"""After so long, on a machine that is slow or busy, what refines figures is left out."""
QUICK_ENOUGH_S = 8.0
"""The same of a quick examination."""
_QUICK_BUDGET_S = 0.08
_QUICK_PRODUCTS_S = 0.4
"""Most that the products of a shape may take, for a quick examination."""
NEEDED_BYTES = 2 << 30
"""Host memory that the measurements take at most, all of them together."""
PARAMS = 24 << 20
"""Params of the optimizer's trial: 480 MiB, beyond most caches."""
DISK_BYTES = 256 << 20
RANKS_DEADLINE_S = 600.0
"""Others wait while rank 0 measures all else."""
_READERS = 4
"""Threads that read, as many as load a model."""
_CHUNK = 16 << 20


STAGES = {
    "copies": 2.0,
    "products": 8.0,
    "attention and element-wise work": 2.0,
    "optimizer and memory traffic": 3.0,
    "trial steps": 13.0,
    "disk": 2.0,
}
"""The measurements in their order, and about how many seconds each takes on an idle machine."""


QUICK_STAGES = {
    "copies": 1.0,
    "products": 3.0,
    "attention and element-wise work": 1.0,
    "optimizer and memory traffic": 2.0,
    "trial steps": 1.0,
}
"""The same of a quick examination."""


def stage_line(stage: str, elapsed_s: float, *, quick: bool = False) -> str:
    """Return a line for people: the measurement that begins, and how long all that is left takes.

    The guess is in proportion to the time that the measurements before it took.
    """
    stages = QUICK_STAGES if quick else STAGES
    name = stage.partition(", in ")[0]
    names = list(stages)
    if name not in names:
        return f"measuring {stage} ..."
    number = names.index(name)
    done = sum(stages[each] for each in names[:number])
    left = sum(stages[each] for each in names[number:])
    seconds = left if not done else left * max(elapsed_s, 0.1 * done) / done
    return f"measuring {stage} ({number + 1} of {len(names)}, {duration(seconds)} left) ..."


def examine(
    folder: Path,
    say: Say,
    keep_part: Callable[[Examination], None] = lambda part: None,
    *,
    subject: Subject | None = None,
    quick: bool = False,
) -> Examination:
    """Measure this machine and return the results. `say` gets the name of each measurement.

    `keep_part` gets what plans need most, as soon as it is measured: all but the refinement by
    trial steps, and the disk. A `quick` examination has figures of a few seconds, and no disk.
    """
    begin, load = time.monotonic(), os.getloadavg()[0]
    facts = host_facts()
    usable = min(free_bytes(), facts.usable_bytes)
    if usable < NEEDED_BYTES:
        raise DoesNotFit(
            f"host memory: the measurements need {gib(NEEDED_BYTES)}, {gib(usable)} are free"
        )
    subject = subject or find_subject()

    def found(profile: MachineProfile, kernel: str, measured_in: str = "") -> Examination:
        return Examination(
            facts=facts,
            profile=profile,
            kernel=kernel,
            folder=measured_in,
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            seconds=time.monotonic() - begin,
            placement=str(subject.new_device().placement),
            load=load,
        )

    profile, kernel = _measure_rates(
        subject,
        facts,
        usable,
        say,
        begin + (QUICK_ENOUGH_S if quick else ENOUGH_S),
        lambda rough, kernel: keep_part(found(rough, kernel)),
        quick=quick,
    )
    if quick:
        return found(profile, kernel)
    say(f"disk, in {folder}")
    return found(_with_disk(profile, folder), kernel, str(folder))


def examine_together(
    folder: Path,
    say: Say,
    keep_part: Callable[[Examination], None] = lambda part: None,
    *,
    quick: bool = False,
) -> Examination | None:
    """Measure this machine and, if a launcher started several ranks, what is between them.

    Rank 0 has the results: all others return None, and say nothing.
    """
    if read_environment(os.environ) is None:
        return examine(folder, say, keep_part, quick=quick)
    subject = find_subject(number=local_rank())
    ranks = init_distributed(subject.place.type, RANKS_DEADLINE_S)
    try:
        found = ranks.on_first(lambda: examine(folder, say, quick=quick))
        facts = ranks.decide(lambda: None if found is None else found.profile.to_json())
        if found is not None:
            say("collectives")
        profile = MachineProfile.from_json(facts)
        network = measured_network(ranks, subject.new_device(), profile)
    except BaseException as error:
        ranks.fail(error)
        raise
    ranks.close()
    return found and replace(found, profile=profile.changed(network=network))


def keep(found: Examination) -> None:
    """Save the results for plans. Raises DiskError if the cache is not writable."""
    path = writable_cache_folder() / profile_path(found.facts).name
    write_file(path, found.to_json().encode())


def _measure_rates(
    subject: Subject,
    facts: HostFacts,
    usable: int,
    say: Say,
    until: float,
    keep_rough: Callable[[MachineProfile, str], None],
    *,
    quick: bool,
) -> tuple[MachineProfile, str]:
    """Return the profile of a subject in this host, but for its disk, and the optimizer's kernel.

    `until` (time.monotonic) is when what refines figures is left out; `keep_rough` gets both
    before they are refined.
    """
    own_memory = subject.runtime is not None
    device = subject.new_device()
    budget_s = _QUICK_BUDGET_S if quick else BUDGET_S
    bench = Bench(place=subject.place, synchronize=device.synchronize, budget_s=budget_s)
    widths, tokens = shapes_for(own_memory)
    say("copies")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # the device warns if it cannot pin
        copies = copy_rates(
            device, num_bytes=COPY_BYTES, budget_s=budget_s, stream=subject.new_stream
        )
    say("products")
    most_s = _QUICK_PRODUCTS_S if quick else PRODUCTS_S
    forward, backward = product_rates(bench, widths, tokens, most_s=most_s, until=until)
    best = max(point.flops for point in forward)
    usual = _usual_shape(forward, widths[1], tokens[1])
    say("attention and element-wise work")
    widest = max(point.width for point in forward)
    attention = attention_share(bench, best, heads=max(1, widest // 64), length=1024)
    say("optimizer and memory traffic")
    kernel = load_kernel()
    update_cores = device.placement.update_threads  # as in training
    profile = MachineProfile(
        name=subject.name or facts.processor,
        source=MEASURED,
        ram_bytes=usable,
        dram_bytes_per_s=_dram_rate(kernel, facts.cores),
        update_params_per_s=_update_rate(kernel, update_cores),
        cores=facts.cores,
        device=subject.name,
        device_bytes=subject.device_bytes,
        unified=not own_memory or device.integrated,
        integrated=device.integrated,
        forward_flops=forward,
        backward_flops=backward,
        fp32_efficiency=fp32_share(bench, *usual),
        fp8_gain=fp8_gain(bench, *usual),
        attention_efficiency=min(attention, 1.0),
        device_bytes_per_s=elementwise_rate(bench),
        expert_wait_s=0.0 if device.groups(torch.bfloat16) else EXPERT_WAIT_S,
        copy_in_bytes_per_s=copies.into,
        copy_out_bytes_per_s=copies.out,
        duplex_share=copies.duplex_share,
        # Drivers pin beyond the limit of memlock: what counts is whether they did.
        pinned_bytes=COPY_BYTES if any(w.category is NotPinned for w in told) else 0,
        compute_cores=0.0 if own_memory else float(torch.get_num_threads()),
        update_cores=float(update_cores),
    )
    keep_rough(profile, kernel.description)
    if time.monotonic() < until:
        say("trial steps")
        if profile.on_host:
            profile = calibrated(profile, QUICK_SHAPES if quick else SHAPES)
        else:
            profile = with_issue_times(profile, device)
    return profile, kernel.description


def _usual_shape(points: Sequence[FlopRate], width: int, tokens: int) -> tuple[int, int]:
    """Return the largest measured shape up to this one; the first is the smallest."""
    usual = [point for point in points if point.width <= width and point.tokens <= tokens]
    return max(usual or points[:1], key=lambda point: point.width * point.tokens)[:2]


def _dram_rate(kernel: Kernel, num_threads: int) -> float:
    """Return the traffic of a triad by all cores, without the lines that its stores read first."""
    elements = 20 << 20  # three arrays of 160 MiB
    arrays = [map_arena("triad", 8 * elements).view(torch.float64) for _ in range(3)]
    for array in arrays:
        array.fill_(1.0)
    bench = Bench(place=torch.device("cpu"), synchronize=lambda: None)
    if isinstance(kernel, NativeKernel):
        return bench.rate(lambda: kernel.triad(*arrays, num_threads=num_threads), 24.0 * elements)
    return bench.rate(lambda: torch.add(arrays[1], arrays[2], out=arrays[0]), 24.0 * elements)


def _update_rate(kernel: Kernel, num_threads: int) -> float:
    """Return the params per second of AdamW on split masters."""
    hi, grad = (map_arena("weights", 2 * PARAMS).view(torch.bfloat16) for _ in range(2))
    lo = map_arena("remainders", 2 * PARAMS).view(torch.int16)
    m, v = (map_arena("moments", 4 * PARAMS).view(torch.float32) for _ in range(2))
    for tensor, value in ((hi, 0.02), (grad, 1e-3), (lo, 0), (m, 0.0), (v, 0.0)):
        tensor.fill_(value)  # a page that was never written costs no traffic
    scalars = AdamWScalars.at(10, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    bench = Bench(place=torch.device("cpu"), synchronize=lambda: None)
    return bench.rate(
        lambda: kernel.adamw(hi, lo, (m, v), grad, scalars, num_threads=num_threads), PARAMS
    )


def _with_disk(profile: MachineProfile, folder: Path) -> MachineProfile:
    """Return the profile with the rates of our direct writes and reads in `folder`."""
    make_folder(folder)
    path = folder / f".megatrain-doctor-{secrets.token_hex(4)}"
    try:
        begin = time.perf_counter()
        with WriteQueue() as carrier, DirectWriter(path, DISK_BYTES, carrier) as writer:
            # Not zeros: they may never reach a disk that compresses.
            piece = torch.arange(CHUNK_BYTES, dtype=torch.int32).view(torch.uint8)[:CHUNK_BYTES]
            for start in range(0, DISK_BYTES, CHUNK_BYTES):
                writer.write(piece[: min(CHUNK_BYTES, DISK_BYTES - start)])
            writer.finish()
        write_s = time.perf_counter() - begin
        read_s = _read_seconds(path)
    finally:
        remove(path)
    return profile.changed(
        disk_read_bytes_per_s=DISK_BYTES / read_s,
        disk_write_bytes_per_s=DISK_BYTES / write_s,
    )


def _read_seconds(path: Path) -> float:
    buffers = [aligned_buffer(_CHUNK + 2 * DISK_PAGE) for _ in range(_READERS)]
    with DirectReader(path) as reader, ThreadPoolExecutor(_READERS) as pool:

        def read(number: int) -> None:
            for start in range(number * _CHUNK, DISK_BYTES, _READERS * _CHUNK):
                reader.read(start, start + _CHUNK, buffers[number])

        begin = time.perf_counter()
        list(pool.map(read, range(_READERS)))
        return time.perf_counter() - begin
