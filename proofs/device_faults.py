"""Faults that a first run on a GPU finds, planted one at a time, and found on testkit/host_gpu.

    python -m proofs.device_faults            every fault: who finds it, and how
    python -m proofs.device_faults "name"     one of them

A scene runs the device code as it is used and returns what is wrong: of sound code, nothing. A
plant changes one thing in the runtime, the accelerator, pinning, lanes or gradients, and the scene
that is named for it must find something.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice
from megatrain.devices.pinning import Registry, Ring
from megatrain.devices.runtime import TorchRuntime
from megatrain.engine.gradients.slot_sums import SlotSums
from megatrain.step.ops import SlotId
from testkit.host_gpu import control, module
from testkit.worlds import Case, Outcome, make_batch, world_of

AT = "hostgpu:1"
"""A thread that was not told of a device has the other one."""
CASE = Case(
    sort="llama of 2 layers",
    steps=(((1, 4), (2, 5)), ((2, 5), (1, 4))),
    update="late",
    tape="host",
)
SMALL = {"piece_bytes": 4096 * 3, "ring_buffer_bytes": 1000}
"""So that copies are cut, and go around the ring many times."""
STUCK_S = 20.0
SLOW_LINK = 5e6
"""Bytes/s: a gradient of the case leaves for milliseconds, while compute goes on."""
Scene = Callable[[], list[str]]
Plant = Callable[[], AbstractContextManager[object]]


def device_of(**sizes: int) -> Accelerator:
    """Return an accelerator of a device that is not the caller's own."""
    accelerator = Accelerator(TorchRuntime.find(AT), **sizes)
    torch.accelerator.set_device_index(0)
    return accelerator


# Scenes.


@functools.cache
def _expected(case: Case) -> Outcome:
    if "dropout" not in case.sort:
        return world_of(case.sort).play(case, device=CpuDevice(copying=True), lanes=None)
    accelerator = device_of()
    with torch.accelerator.device_index(1):
        return world_of(case.sort).play(case, device=accelerator, reference=True)


def engine_runs(case: Case = CASE, *, link_bytes_per_s: float | None = None) -> list[str]:
    """Train on lanes: the bits of the CPU, no wait that nobody sees, nothing left registered."""
    expected, found = _expected(case), list[str]()
    waits, registered = control.counters()["silent_waits"], control.registered_bytes()
    timing: control.Timing = "lazy" if link_bytes_per_s is None else "early"
    with control.timed(timing, link_bytes_per_s=link_bytes_per_s):
        outcome = world_of(case.sort).play(
            case, device=device_of(**SMALL), lanes=None, deadline_s=STUCK_S
        )
    found += outcome.differences(expected)
    if control.counters()["silent_waits"] != waits:
        found.append("a copy of memory that is not pinned")
    if control.registered_bytes() != registered:
        found.append("host memory stays registered")
    return found


def engine_is_staged() -> list[str]:
    control.refuse_registration_at(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine_runs()


def engine_draws() -> list[str]:
    """Dropout in forward, recompute and backward is the same."""
    return engine_runs(replace(CASE, sort="gpt2, tied, with dropout"))


def engine_has_one_part() -> list[str]:
    """Steps of one micro-batch, where a gradient is not a sum, over a slow link."""
    case = replace(CASE, steps=(((2, 5),), ((1, 4),)), update="in_backward")
    return engine_runs(case, link_bytes_per_s=SLOW_LINK)


def memory_is_the_streams_own() -> list[str]:
    """Nothing is written to fresh memory but what its stream writes."""
    accelerator, stream = device_of(), torch.Stream(AT)
    arena = accelerator.map_host(4096, "a test")
    torch.use_deterministic_algorithms(True)
    try:
        with torch.accelerator.device_index(1):
            module._sleep(40_000_000)  # the allocating thread's stream is busy
        memory = accelerator.allocate(4096, "a test")
    finally:
        torch.use_deterministic_algorithms(False)
    with stream:
        accelerator.copy(memory, arena)
    accelerator.synchronize()
    accelerator.close()
    return [] if torch.equal(memory.cpu(), arena) else ["what was copied is overwritten"]


def engine_is_steady() -> list[str]:
    """After its first step the host never waits for the device."""
    world = world_of(CASE.sort)
    with world.engine(
        CASE, device=device_of(), optimizer=world.optimizer(), deadline_s=STUCK_S
    ) as engine:
        engine.step(make_batch(((1, 6),), seed=0))
        module.set_sync_debug_mode("error")
        engine.step(make_batch(((1, 6),), seed=1))
    return []


def device_closes() -> list[str]:
    """What was copied is there, and all memory is given back."""
    accelerator = device_of()
    placed = accelerator.place(torch.arange(1000.0))
    arena = accelerator.map_host(4096, "a test")
    with control.timed("lazy"):
        with torch.Stream(AT):
            accelerator.copy(arena[: placed.nbytes], placed)
        accelerator.close()
    torch.accelerator.synchronize(AT)
    right = torch.equal(arena[: placed.nbytes].view(torch.float32), torch.arange(1000.0))
    return [] if right else ["bytes that were copied are not there"]


def memory_is_given_back() -> list[str]:
    """A cap ends with its device, and what was dropped is free again."""
    capped = device_of(cap_bytes=64 << 20)
    capped.close()
    accelerator = device_of()
    free = accelerator.free_bytes
    accelerator.allocate(128 << 20, "a test")  # and drop it
    return [] if accelerator.free_bytes == free else ["memory that was dropped is not free"]


def state_is_kept() -> list[str]:
    """What was drawn after a state was taken is drawn again after it was set."""
    accelerator = device_of()
    accelerator.seed(3)
    state = accelerator.random_state()
    first = torch.rand(8, device=AT).cpu()
    accelerator.set_random_state(state)
    return [] if torch.equal(first, torch.rand(8, device=AT).cpu()) else ["other numbers"]


# Plants.


def _instead(owner: Any, name: str, new: Any) -> Plant:
    """Return a plant: `new` in the place of an attribute."""
    return lambda: mock.patch.object(owner, name, new)


def _register(self: TorchRuntime, address: int, num_bytes: int) -> None:
    self._module.cudart().cudaHostRegister(address, num_bytes, 0)


def _empty(self: TorchRuntime, num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=self.device.type)


def _filled(self: TorchRuntime, num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class _Changed:
    """A stream in all but what a subclass changes."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Any:
        return self._stream.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._stream.__exit__(*exc)


class _Deaf(_Changed):
    def wait_event(self, event: object) -> None:
        pass


class _Hasty(_Changed):
    """Its events are those of the op before."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__(stream)
        self._before = stream.record_event()

    def record_event(self, *event: torch.Event) -> torch.Event:
        found, self._before = self._before, self._stream.record_event()
        return found


class _Unentered(_Changed):
    def __enter__(self) -> Any:
        torch.accelerator.set_device_index(self._stream.device)

    def __exit__(self, *exc: Any) -> None:
        pass


def _streams(kind: type[_Changed]) -> Plant:
    return _instead(TorchRuntime, "stream", lambda self: kind(torch.Stream(self.device)))


def _keeps_parts() -> AbstractContextManager[object]:
    """Gradients go out as compute made them, and its stream has their memory back meanwhile."""

    def add(self: SlotSums, slot: SlotId, name: str, place: Tensor, grad: Tensor) -> None:
        sums = self._sums[slot]
        if name not in sums:
            sums[name] = grad
            return
        if sums[name].data_ptr() != place.data_ptr():
            sums[name] = place.copy_(sums[name])
        sums[name].add_(grad)

    return mock.patch.object(SlotSums, "_add", add)


@contextmanager
def _stays_registered() -> Iterator[None]:
    left: list[int] = []
    with mock.patch.object(TorchRuntime, "unregister", lambda self, address: left.append(address)):
        yield
    for address in left:
        module.cudart().cudaHostUnregister(address)


def _cap_stays() -> AbstractContextManager[object]:
    limit = TorchRuntime.limit

    def limited(self: TorchRuntime, num_bytes: int | None) -> None:
        if num_bytes is not None:
            limit(self, num_bytes)

    return mock.patch.object(TorchRuntime, "limit", limited)


def _free(self: TorchRuntime) -> int:
    return torch.accelerator.get_memory_info(self.device)[0]


def _seed(self: TorchRuntime, seed: int) -> None:
    with torch.accelerator.device_index(0):
        self._module.manual_seed(seed)


def _state_of_the_thread() -> AbstractContextManager[object]:
    state = TorchRuntime.random_state

    def taken(self: TorchRuntime) -> list[Tensor]:
        return [*state(self)[:-1], self._module.get_rng_state()]

    return mock.patch.object(TorchRuntime, "random_state", taken)


def _looks(self: Accelerator, tensor: Tensor, purpose: str) -> Tensor:
    if tensor.sum().item() == 0:
        raise AssertionError("a zero")
    return tensor


def _moves(self: Accelerator, target: Tensor, source: Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing planted, and the scene that finds it."""

    what: str
    scene: Scene
    plant: Plant
    dies: bool = False
    """Its process dies of it: it has one of its own."""

    def __str__(self) -> str:
        return self.what


FAULTS = [
    Fault(
        what="a thread that registers has no device",
        scene=engine_runs,
        plant=_instead(TorchRuntime, "register", _register),
    ),
    Fault(
        what="memory is of the thread's device",
        scene=engine_runs,
        plant=_instead(TorchRuntime, "empty", _empty),
    ),
    Fault(
        what="streams are of the thread's device",
        scene=engine_runs,
        plant=_instead(TorchRuntime, "stream", lambda self: torch.Stream(self.device.type)),
    ),
    Fault(what="streams do not wait for events", scene=engine_runs, plant=_streams(_Deaf)),
    Fault(what="events are recorded before the work", scene=engine_runs, plant=_streams(_Hasty)),
    Fault(what="lanes do not enter streams", scene=engine_runs, plant=_streams(_Unentered)),
    Fault(
        what="gradients are freed under their copy",
        scene=engine_has_one_part,
        plant=_keeps_parts,
    ),
    Fault(
        what="a copy crosses the border of a piece",
        scene=engine_runs,
        plant=_instead(Registry, "pieces", lambda self, tensor: [slice(0, tensor.nbytes)]),
    ),
    Fault(what="host memory stays registered", scene=engine_runs, plant=_stays_registered),
    Fault(
        what="inputs are not pinned",
        scene=engine_runs,
        plant=_instead(
            TorchRuntime, "pinned", lambda self, size: torch.empty(size, dtype=torch.uint8)
        ),
    ),
    Fault(
        what="a buffer of the ring is used again early",
        scene=engine_is_staged,
        plant=_instead(Ring, "_await", lambda self, number: None),
    ),
    Fault(
        what="the first device is seeded",
        scene=engine_draws,
        plant=_instead(TorchRuntime, "seed", _seed),
    ),
    Fault(
        what="fresh memory is filled by the allocating thread",
        scene=memory_is_the_streams_own,
        plant=_instead(TorchRuntime, "empty", _filled),
    ),
    Fault(
        what="the host asks the device in a step",
        scene=engine_is_steady,
        plant=_instead(Accelerator, "counted", _looks),
    ),
    Fault(
        what="the thread's device is waited for",
        scene=device_closes,
        plant=_instead(TorchRuntime, "synchronize", lambda self: torch.accelerator.synchronize()),
    ),
    Fault(
        what="the random state is that of the thread's device",
        scene=state_is_kept,
        plant=_state_of_the_thread,
    ),
    Fault(what="a cap outlives its device", scene=memory_is_given_back, plant=_cap_stays),
    Fault(
        what="memory that the allocator keeps is not free",
        scene=memory_is_given_back,
        plant=_instead(TorchRuntime, "free_bytes", _free),
    ),
    Fault(
        what="the host reads device memory",
        scene=device_closes,
        plant=_instead(Accelerator, "copy", _moves),
        dies=True,
    ),
]
SCENES: list[Scene] = [
    engine_runs,
    engine_is_staged,
    engine_draws,
    engine_has_one_part,
    memory_is_the_streams_own,
    engine_is_steady,
    device_closes,
    memory_is_given_back,
    state_is_kept,
]


def found_in(scene: Scene) -> list[str]:
    """Return what a scene finds wrong; an error is a finding too."""
    control.start_anew()
    try:
        return scene()
    except Exception as error:
        return [f"{type(error).__name__}: {error}".partition("\n")[0]]
    finally:
        control.start_anew()


def found_of(fault: Fault) -> list[str]:
    """Return what is found once the fault is planted."""
    if fault.dies:
        command = [sys.executable, "-m", "proofs.device_faults", "--here", fault.what]
        code = subprocess.run(command, capture_output=True).returncode
        return [f"the process died of signal {-code}"] if code < 0 else []
    return _found_here(fault)


def _found_here(fault: Fault) -> list[str]:
    found = found_in(fault.scene)  # of sound code, whose bits are remembered
    if found:
        return []
    with fault.plant():
        return found_in(fault.scene)


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    here, names = "--here" in words, {word for word in words if not word.startswith("--")}
    missed = 0
    for fault in FAULTS:
        if names and fault.what not in names:
            continue
        found = _found_here(fault) if here else found_of(fault)
        missed += not found
        print(f"{fault.what}: {found[0] if found else 'NOT FOUND'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
