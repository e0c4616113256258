"""The measurements of `megatrain doctor`: well under a minute, under 2 GiB.

    facts  ->  copies, products, attention, element-wise (doctor/rates.py)
           ->  our optimizer's kernel, memory traffic, our disk calls  ->  Examination, kept

The only place where what planning, optim and disk each know is put together.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatrain.cache import writable_cache_folder
from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice, Device
from megatrain.devices.runtime import TorchRuntime
from megatrain.doctor.rates import (
    COPY_BYTES,
    Bench,
    attention_share,
    copy_rates,
    elementwise_rate,
    fp32_share,
    product_rates,
    shapes_for,
)
from megatrain.doctor.trial_steps import calibrated
from megatrain.errors import DoesNotFit, NoDevice
from megatrain.files import make_folder, remove, write_file
from megatrain.memory.arena import map_arena
from megatrain.memory.direct import (
    CHUNK_BYTES,
    DISK_PAGE,
    DirectReader,
    DirectWriter,
    WriteQueue,
    aligned_buffer,
)
from megatrain.memory.host import free_bytes
from megatrain.memory.ledger import gib
from megatrain.optim.kernel import AdamWScalars, Kernel
from megatrain.optim.native import NativeKernel, load_kernel
from megatrain.planning.machine.examination import Examination
from megatrain.planning.machine.facts import HostFacts, host_facts, profile_path
from megatrain.planning.machine.profile import MachineProfile
from megatrain.progress import Say

ENOUGH_S = 25.0
"""After so long, on a machine that is slow or busy, what refines figures is left out."""
NEEDED_BYTES = 2 << 30
"""Host memory that the measurements take at most, all of them together."""
PARAMS = 24 << 20
"""Of the optimizer's trial: 480 MiB, beyond most caches."""
DISK_BYTES = 256 << 20
_READERS = 4
"""As many as load a model."""
_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The device to be measured."""

    name: str
    """For people; empty for the processor."""
    device: Device
    place: torch.device
    device_bytes: int
    stream: Callable[[], AbstractContextManager[Any]]


def examine(folder: Path, say: Say) -> Examination:
    """Measure this machine and return the results. `say` gets the name of each measurement."""
    begin, load = time.monotonic(), os.getloadavg()[0]
    facts = host_facts()
    usable = min(free_bytes(), facts.usable_bytes)
    if usable < NEEDED_BYTES:
        raise DoesNotFit(
            f"host memory: the measurements need {gib(NEEDED_BYTES)}, {gib(usable)} are free"
        )
    profile, kernel = _measured(facts, usable, folder, say, begin + ENOUGH_S)
    return Examination(
        facts=facts,
        profile=profile,
        kernel=kernel,
        folder=str(folder),
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=time.monotonic() - begin,
        load=load,
    )


def keep(found: Examination) -> None:
    """Save the results for plans. Raises DiskError if the cache is not writable."""
    path = writable_cache_folder() / profile_path(found.facts).name
    write_file(path, found.to_json().encode())


def _measured(
    facts: HostFacts, usable: int, folder: Path, say: Say, until: float
) -> tuple[MachineProfile, str]:
    subject = _subject()
    own_memory = subject.device.own_memory
    bench = Bench(place=subject.place, synchronize=subject.device.synchronize)
    widths, tokens = shapes_for(own_memory)
    say("copies")
    copying = subject.device if own_memory else CpuDevice(copying=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # the device warns if it cannot pin
        copies = copy_rates(copying, num_bytes=COPY_BYTES, stream=subject.stream)
    say("products")
    forward, backward = product_rates(bench, widths, tokens, until=until)
    best = max(point.flops for point in forward)
    say("attention and element-wise work")
    attention = attention_share(bench, best, heads=widths[-1] // 64, length=1024)
    say("optimizer and memory traffic")
    kernel = load_kernel()
    # Half of the cores, as in training, where compute, copies and data need the rest.
    update_cores = max(1, facts.cores // 2)
    profile = MachineProfile(
        name=subject.name or facts.processor,
        source="measured",
        ram_bytes=usable,
        dram_bytes_per_s=_dram_rate(kernel, facts.cores),
        update_params_per_s=_update_rate(kernel, update_cores),
        cores=facts.cores,
        device=subject.name,
        device_bytes=subject.device_bytes,
        unified=not own_memory,
        forward_flops=forward,
        backward_flops=backward,
        fp32_efficiency=fp32_share(bench, widths[1], tokens[1]),
        attention_efficiency=min(attention, 1.0),
        device_bytes_per_s=elementwise_rate(bench),
        copy_in_bytes_per_s=copies.into,
        copy_out_bytes_per_s=copies.out,
        duplex_share=copies.duplex_share,
        # Drivers pin beyond the limit of memlock on most systems: what counts is whether they did.
        pinned_bytes=min(facts.memlock_bytes or COPY_BYTES, COPY_BYTES) if told else 0,
        compute_cores=0.0 if own_memory else float(torch.get_num_threads()),
        update_cores=float(update_cores),
    )
    if profile.unified and time.monotonic() < until:
        say("trial steps")
        profile = calibrated(profile)
    say(f"disk, in {folder}")
    return _with_disk(profile, folder), kernel.description


def _subject() -> Subject:
    """Return torch's accelerator, or the CPU if there is none."""
    try:
        runtime = TorchRuntime.find()
    except NoDevice:
        cpu = CpuDevice()
        return Subject(
            name="", device=cpu, place=torch.device("cpu"), device_bytes=0, stream=nullcontext
        )
    return Subject(
        name=str(torch.get_device_module(runtime.device).get_device_name(runtime.device)),
        device=Accelerator(runtime),
        place=runtime.device,
        device_bytes=runtime.free_bytes(),
        stream=runtime.stream,
    )


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
