"""Laws of a device: is what the engine computes on it right?

    copies      bytes survive the way there and back, from pinned memory and through buffers
    resident    losses and gradients of tiny models equal the resident model's on the same device,
                bit for bit, with deterministic kernels: a llama, one with tied embeddings, one
                with experts, one with 40,000 tokens, in fp32 and in bf16; where device and host
                are one memory, a llama that reads its weights in place as well
    packed      log-probabilities and gradients of one flat row of documents, in bf16, are those of
                each document alone in the resident model, within PACKED_TOLERANCE; on CUDA the row
                goes through torch's attention kernel for documents of different lengths
    lanes       steps on lanes equal those of one op at a time: losses, norms, every byte
    no waits    the host does not wait for the device in a steady step, where torch can tell
    cap         a cap of device memory is kept, what breaks it is a OutOfDeviceMemory, and it ends

tests/gpu has all laws of the engine on a device. Each law that fails tells what differs, and
whether the device's own kernels repeat themselves: if they do not, they are at fault.

Laws (tests/doctor/gpu_check/test_laws.py)
    1. A device that keeps them passes; one that changes a bit, loses a wait, mixes documents, waits
       or ignores its cap fails the law in question.
    2. After an error that may have lost the device no other law is tried.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import compat
from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice, Coherent
from megatrain.devices.deterministic import deterministic_kernels
from megatrain.devices.device import Device
from megatrain.devices.runtime import PinningFailed, Runtime
from megatrain.doctor.gpu_check.findings import Broken, Check, failed_check
from megatrain.doctor.gpu_check.tiny_models import (
    ATTENTION,
    MODELS,
    PACKED,
    Precisions,
    TinyModel,
    packed_row,
    tiny_batch,
)
from megatrain.doctor.resident import resident_gradients, resident_logprobs
from megatrain.doctor.subject import Subject
from megatrain.errors import OutOfDeviceMemory
from megatrain.lanes.reference import Reference
from megatrain.memory.kinds import TensorKind
from megatrain.memory.store import Store
from megatrain.progress import Say

COPIED_BYTES = (5 << 20) + 3
"""More than the ring holds, and no multiple of anything."""
SMALL = {"piece_bytes": 1 << 20, "ring_buffer_bytes": 1 << 18}
"""Sizes small enough that copies are cut and go around the ring many times."""
CAP_BYTES = 256 << 20
PACKED_TOLERANCE = 2e-2
"""Distance from each document alone in bf16, as a share of the norm: of a gradient, and of what the
log-probabilities differ by among themselves. Sums over tokens have another order. On a CPU the
largest distance is 3e-3, with masks in place of documents 7e-3; a bound that is off by one token
gives over 0.15."""


def laws(subject: Subject, say: Say) -> list[Check]:
    """Hold the subject to every law; return the results. `say` gets the name of each."""
    checks: list[Check] = []
    lost = False
    with deterministic():
        for name, law in _laws(subject).items():
            if lost:
                found = "left out: the check before it may have lost the device"
                checks.append(Check(name=name, state="left out", found=found))
                continue
            say(name)
            checks.append(tried(name, law))
            lost = checks[-1].may_have_lost_device
    return checks


def tried(name: str, law: Callable[[], str]) -> Check:
    """Return the result of a law, whatever it raises."""
    try:
        return Check(name=name, state="ok", found=law())
    except Exception as error:
        return failed_check(name, error)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, and fp32 that is fp32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with deterministic_kernels:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _laws(subject: Subject) -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {
        "copied bytes": lambda: copies_are_exact(subject.new_device(**_sizes(subject)), subject)
    }
    if subject.runtime is not None:
        staged = AcceleratorDevice(Refusing(subject.runtime), str(subject.place), **SMALL)
        found["copied bytes, staged"] = lambda: copies_are_exact(staged, subject)
    for name in MODELS:
        for dtype in ATTENTION:
            found[f"{name}, {dtype}"] = _equal(subject, name, dtype)
    if subject.runtime is not None and subject.runtime.integrated:
        one_memory = Coherent(subject.runtime, str(subject.place))
        llama = TinyModel.make("llama", "bf16")
        found["llama, bf16, in place"] = lambda: equals_resident(subject, llama, one_memory)
    for name in PACKED:
        found[f"{name}, bf16"] = _equal_alone(subject, name)
    found["lanes"] = lambda: lanes_equal_reference(subject)
    found["no waits"] = lambda: nobody_waits(subject)
    found["cap"] = lambda: a_cap_is_kept(subject)
    return found


def _sizes(subject: Subject) -> dict[str, int]:
    return {} if subject.runtime is None else SMALL


def _equal(subject: Subject, name: str, dtype: Precisions) -> Callable[[], str]:
    return lambda: equals_resident(subject, TinyModel.make(name, dtype))


def _equal_alone(subject: Subject, name: str) -> Callable[[], str]:
    return lambda: packed_equals_alone(subject, TinyModel.make(name, "bf16"))


def copies_are_exact(device: Device, subject: Subject) -> str:
    """Copy random bytes to the device and back, each way on its stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the speed of copies tells whether memory is pinned
        source, target = (device.map_host(COPIED_BYTES, "copies") for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    source.random_(0, 256, generator=generator)
    there = device.allocate(COPIED_BYTES, "copies")
    try:
        with subject.new_stream():
            device.copy(there, source)
        device.synchronize()
        with subject.new_stream():
            device.copy(target, there)
        device.synchronize()
        wrong = int((source != target).sum())
    finally:
        device.close()
    if wrong:
        raise Broken(f"{wrong:,} of {COPIED_BYTES:,} bytes came back changed")
    return f"{COPIED_BYTES:,} bytes there and back, all equal"


def equals_resident(subject: Subject, tiny: TinyModel, device: Device | None = None) -> str:
    """Compare losses and gradients of a step with the resident model's on the same device.

    Without a `device` the subject makes one, which copies weights into slots.
    """
    batch = tiny_batch(seed=1)
    model = tiny.resident.to(subject.place)
    losses, gradients = resident_gradients(model, batch)
    with tiny.engine(device or subject.new_device(), trains=False) as engine:
        result = engine.step(batch)
    found = {p.name: tiny.store.param(p.name, TensorKind.GRAD) for p in tiny.decoder.params}
    differing = [name for name, value in gradients.items() if not torch.equal(found[name], value)]
    if list(result.micro_losses) == losses and not differing:
        return f"{len(losses)} losses and {len(gradients)} gradients equal, bit for bit"
    again, repeated = resident_gradients(model, batch)
    repeats = again == losses and all(map(torch.equal, gradients.values(), repeated.values()))
    names = ", ".join(differing[:3]) or "no gradient"
    text = (
        f"losses {list(result.micro_losses)}, resident {losses}; {len(differing)} of "
        f"{len(gradients)} gradients differ: {names}"
    )
    if not repeats:
        text += "; the resident model does not repeat its own bits"
    raise Broken(text)


def packed_equals_alone(subject: Subject, tiny: TinyModel) -> str:
    """Compare a flat row of documents with the resident model on each document alone."""
    row = packed_row(seed=1)
    documents = [replace(document, position_ids=None) for document in row.documents()]
    model = tiny.resident.to(subject.place)
    _, gradients = resident_gradients(model, documents)
    expected = {"log-probabilities": _centered(_logprobs_alone(model, documents)), **gradients}
    with tiny.engine(subject.new_device(), trains=False) as engine, kernel_counted() as calls:
        (logprobs,) = engine.logprobs([row])
        engine.step([row])
    trained = row.labels[:, 1:] != -100
    found = {"log-probabilities": _centered(logprobs.cpu()[:, :-1][trained])}
    found |= {name: tiny.store.param(name, TensorKind.GRAD) for name in gradients}
    apart = {name: _distance(found[name], value) for name, value in expected.items()}
    worst = max(apart, key=lambda name: apart[name])
    how = f"one kernel, {len(calls)} calls" if calls else "one document after another"
    text = f"{len(documents)} documents by {how}: at most {apart[worst]:.1e} of the norm ({worst})"
    # Not `>`: a value that is not a number is wrong too.
    wrong = sum(not value <= PACKED_TOLERANCE for value in apart.values())
    if wrong:
        raise Broken(f"{text}, {wrong} of {len(apart)} over {PACKED_TOLERANCE:g}")
    return text


def _logprobs_alone(model: PreTrainedModel, documents: Sequence[MicroBatch]) -> Tensor:
    """Return the log-probabilities of all targets, each document in its own forward, on the host.

    (targets,)
    """
    with torch.no_grad():
        placed = [one.mapped(lambda tensor: tensor.to(model.device)) for one in documents]
        parts = [resident_logprobs(model, one)[:, :-1].flatten() for one in placed]
    return torch.cat(parts).cpu()


def _centered(values: Tensor) -> Tensor:
    """Return what values differ by: tokens of a random model are all about as likely."""
    return values - values.mean()


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@contextmanager
def kernel_counted() -> Iterator[list[None]]:
    """Yield a list with an item for each call of torch's kernel for documents."""
    own = compat.document_kernel
    kernel: Any = own()
    calls: list[None] = []

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(None)
        return kernel(*given, **options)

    compat.document_kernel = lambda: kernel and counted
    try:
        yield calls
    finally:
        compat.document_kernel = own


def lanes_equal_reference(subject: Subject) -> str:
    """Compare three steps on lanes with the same steps, one op at a time."""
    outcomes = []
    for one_at_a_time in (True, False):
        tiny, device = TinyModel.make("llama", "bf16"), subject.new_device()
        # Its lanes give the reference their streams, one for each kind of op.
        player = Reference(device.lanes(), synchronize=device.synchronize)
        with tiny.engine(device, trains=True, player=player if one_at_a_time else None) as engine:
            results = [engine.step(tiny_batch(seed)) for seed in (1, 2, 3)]
        numbers = [[*result.micro_losses, result.grad_norm] for result in results]
        outcomes.append((numbers, _bytes_of(tiny.store)))
    (expected, bytes_expected), (found, bytes_found) = outcomes
    wrong = [name for name, data in bytes_expected.items() if not data.equal(bytes_found[name])]
    if expected != found or wrong:
        raise Broken(
            f"losses and norms {found}, one op at a time {expected}; "
            f"{len(wrong)} of {len(bytes_expected)} parts of the store differ"
        )
    return f"3 steps: losses, norms and {len(bytes_expected)} parts of the store equal"


def _bytes_of(store: Store) -> dict[str, Tensor]:
    return {
        f"{kind} of block {block}": store.block_bytes(block, kind).clone()
        for kind in store.kinds
        if kind is not TensorKind.GRAD
        for block in range(store.layout.num_blocks)
    }


def nobody_waits(subject: Subject) -> str:
    """Fail if the host waits for the device in a step like the one before it."""
    module: Any = None if subject.place.type == "cpu" else torch.get_device_module(subject.place)
    can_tell = hasattr(module, "set_sync_debug_mode")
    tiny = TinyModel.make("llama", "bf16")
    with tiny.engine(subject.new_device(), trains=True) as engine:
        engine.step(tiny_batch(1))
        with _errors_for_waits(module) if can_tell else nullcontext():
            for seed in (2, 3):
                engine.step(tiny_batch(seed))
    return "none in 2 steps" if can_tell else "2 steps; torch cannot tell for this device"


@contextmanager
def _errors_for_waits(module: Any) -> Iterator[None]:
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode("default")


def a_cap_is_kept(subject: Subject) -> str:
    """Take a step under a cap, break the cap, and see that it ends with its device."""
    tiny = TinyModel.make("llama", "bf16")
    device = subject.new_device(CAP_BYTES)
    with tiny.engine(device, trains=True) as engine:
        engine.step(tiny_batch(1))
    if device.peak_bytes > CAP_BYTES:
        raise Broken(f"{device.peak_bytes:,} bytes were in use, of {CAP_BYTES:,}")
    device = subject.new_device(CAP_BYTES)
    try:
        device.allocate(CAP_BYTES + (64 << 20), "more than the cap")
    except OutOfDeviceMemory:
        pass
    else:
        raise Broken(f"a cap of {CAP_BYTES:,} bytes did not refuse more")
    finally:
        device.close()
    device = subject.new_device()
    try:
        device.allocate(CAP_BYTES + (64 << 20), "without a cap")
    except OutOfDeviceMemory as error:
        raise Broken(f"the cap outlived its device: {error}") from error
    finally:
        device.close()
    return f"{CAP_BYTES >> 20} MiB: kept by a step, refused beyond, and lifted"


class Refusing:
    """A runtime that pins no host memory."""

    allocates = False

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def register(self, address: int, num_bytes: int) -> None:
        raise PinningFailed("the check asked for buffers")
