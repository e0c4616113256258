"""A rehearsal: a step on tensors without bytes, to know the device memory it will take.

The schedule of the step, the actions of the engine and the model's own code are played one op at a
time on torch's meta device, and every byte they would have allocated is counted for as long as
something holds it. No cost model to keep true: what is counted is what runs. All allocations of a
step happen on one lane, so their order, and the peak, do not depend on timing.

Laws (tests/testkit/test_rehearsal.py)
    1. The peak is that of the real step on the simulated accelerator, within 2 %.
    2. Costs no memory for weights, and no time that grows with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.batch import MicroBatch, step_part
from megatrain.engine.actions import StepActions
from megatrain.engine.machine import build_machine
from megatrain.features.registry import build_ops
from megatrain.lanes.lane import Lane, Stream
from megatrain.lanes.reference import Reference
from megatrain.losses.loss import NEXT_TOKEN, Loss
from megatrain.memory.layout import Layout
from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.placement import UNPLACED
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.models.documents import attends_by_document
from megatrain.models.probing.feature_cost import fused_on_meta
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.settings import DEVICE_PART_ELEMENTS, StepSettings
from megatrain.step.shape import StepShape

DEFAULTS = StepSettings()
_GROUPED = torch.ops.aten._grouped_mm.default


def device_ledger(
    decoder: Decoder,
    layout: Layout,
    shape: StepShape,
    micro_shapes: Sequence[tuple[int, int]],
    settings: StepSettings = DEFAULTS,
    loss: Loss = NEXT_TOKEN,
    complete: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]] = lambda batch: batch,
    ranks: Ranks = ALONE,
) -> Ledger:
    """Return the device memory of a step on micro-batches of (rows, length), by purpose.

    Its total is the peak. Updates run on the host and need none of it. `settings` say what `shape`
    does not: chunks and tiles. `complete` adds the tensors that `loss` reads, or
    returns another batch. With `ranks` it is that of one of them, which has its part of the batch.
    """
    device = _MetaDevice()
    vocabulary = decoder.model.get_input_embeddings().weight.shape[0]
    with device.meter:
        store = _MetaStore(layout, device)
        machine = build_machine(decoder, store, device, shape, None, settings, ranks)
        flat = attends_by_document(decoder.config, compiles=settings.compile)
        made = [_micro_batch(*size, vocabulary, flat=flat) for size in micro_shapes]
        part = step_part(complete(made), loss, ranks.owner)
        machine.reserve(part.batch)
        actions = StepActions(machine, part, 1, loss)
        fixed = sum(device.purposes.values())
        with device.meter.counting(), _FusedAttention():
            Reference().play(build_ops("step", shape), actions.table())
    lines = device.purposes | {"working memory": device.meter.peak_bytes - fixed}
    return Ledger(
        Line(place="device", purpose=purpose, num_bytes=num_bytes)
        for purpose, num_bytes in lines.items()
    )


def _micro_batch(rows: int, length: int, vocabulary: int, *, flat: bool) -> MicroBatch:
    """Packed rows with many tokens: one of documents of `length`, or such with two documents each,
    so that masks are as large as they get."""
    ids = torch.arange(rows * length).view(rows, length) % vocabulary
    positions = torch.arange(length).repeat(rows, 1)
    if flat:
        ids, positions = ids.view(1, -1), positions.view(1, -1)
    else:
        positions[:, length // 2 :] -= length // 2
    return MicroBatch(input_ids=ids, labels=ids, position_ids=positions)


class _FusedAttention(TorchFunctionMode):
    """Lets attention be one kernel, as it is on a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or kwargs.get("dropout_p"):
            return func(*args, **kwargs)
        return fused_on_meta(*args[:3], **kwargs)


class _MetaMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages on the meta device that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()
        self._counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor) and value.device.type == "meta":
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        if self._counts:
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is made meanwhile; other memory stands for the host's."""
        before, self._counts = self._counts, True
        yield
        self._counts = before

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not _GROUPED or args[0].dtype is torch.bfloat16 or not args[0].is_meta:
            return func(*args, **kwargs)
        # Meta knows products of experts in bf16 alone; their form is the same in fp32.
        first, second = (matrix.to(torch.bfloat16) for matrix in args[:2])
        return torch.empty_like(func(first, second, *args[2:], **kwargs), dtype=args[0].dtype)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


class _MetaStore(Store):
    """A store without bytes."""

    def __init__(self, layout: Layout, device: _MetaDevice) -> None:
        self.layout, self.tier = layout, None
        self._arenas = {
            kind: device.map_host(layout.kind_bytes[kind], kind.name) for kind in self.kinds
        }


class _MetaDevice:
    """A device whose memory is counted and has no bytes."""

    name = "meta"
    copying = True
    own_memory = True
    answers = False
    integrated = False
    has_triton = False
    part_elements = DEVICE_PART_ELEMENTS
    placement = UNPLACED
    free_bytes = 0

    def __init__(self) -> None:
        self.meter = _MetaMeter()
        self.purposes: dict[str, int] = {}

    def groups(self, dtype: torch.dtype) -> bool:
        return True

    @property
    def peak_bytes(self) -> int:
        return self.meter.peak_bytes

    def cap(self, num_bytes: int) -> None:
        raise NotImplementedError("a rehearsal counts, and refuses nothing")

    def in_place(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError("a rehearsal copies")

    def lanes(self) -> list[Lane]:
        return []

    def role_stream(self, role: str) -> None:
        return None

    def current_stream(self) -> Stream:
        raise AssertionError("there are no streams")

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        self.purposes[purpose] = self.purposes.get(purpose, 0) + num_bytes
        with self.meter.counting():
            return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def unmap_host(self, arena: Tensor) -> None:
        pass

    def pin(self, name: str, arena: Tensor) -> None:
        pass

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    def place(self, tensor: Tensor) -> Tensor:
        with self.meter.counting():
            return tensor.to("meta")

    def counted(self, tensor: Tensor, purpose: str) -> Tensor:
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        pass

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        pass

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        """Return where groups of rows may end: each expert has one."""
        return torch.arange(1, len(tensor) + 1)

    def seed(self, seed: int) -> None:
        pass

    def random_state(self) -> list[Tensor]:
        return []

    def set_random_state(self, state: list[Tensor]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass

    def memory_snapshot(self) -> None:
        return None
