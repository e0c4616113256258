"""Pages: the weights of a mixture's experts, a range of experts at a time. Of the compute lane.

A block of experts need not fit on the device. Its slot has all but the matrices of experts; those
come through a ring of two page slots while the block computes, in the order in which products want
them (models/experts.py):

    forward    pages of the first product, then of the second
    backward   the same for the recompute, then pages of the second and of the first once more

    compute    |  page 0  |  page 1  |  page 2  | ...        its slot is read
    copies       0 |   1   |   2     |    3   | ...          the next page fills the other

Who waits: two streams. A stream of its own fills a page slot when the last product that read it is
done; the stream of compute waits for the copy of a page before it multiplies. The lane of compute
queues both, so the host waits for neither. It waits once in a forward, for the sizes of groups:
pages without rows are not fetched. Ops of a layer declare that they read weights[b], for they do.

Narrow experts (megatrain/narrow.py) cross the link as they are, into a part of the page slot of
their own, and the stream of copies widens them before compute reads the page.

An op begins with the copies of its first pages, beside its attention. What an op has fetched ahead
and not used is done before the op is.

Laws (tests/engine/test_pages.py)
    1. Bits are those of the whole block, whatever the size of pages.
    2. Device memory for experts is two pages, whatever their number.
    3. The host waits once per forward of a mixture.
    4. A page without rows is not fetched behind the first two of an op, and its gradient is zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatrain.devices.device import Device
from megatrain.errors import ConfigError
from megatrain.lanes.progress import Event
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder, Param, has_experts, is_mixture
from megatrain.models.experts import in_pages, product_params
from megatrain.models.template import Template
from megatrain.models.widening import Widener
from megatrain.narrow import GRAIN, Form, Matrices, Spot, form_bytes
from megatrain.ranks.ranks import Ranks
from megatrain.step.ops import Op, OpKind
from megatrain.step.settings import StepSettings

PAGE_SLOTS = 2
"""One is read while the other is filled."""


class PageGradients(Protocol):
    """Takes the gradients of pages, in the order of experts (gradients/door.py)."""

    def add_page(self, name: str, experts: range, gradient: Tensor | None) -> None:
        """Add the gradient of a page, (experts, ...); None: it has no rows, and so is zero."""


def check_pages(
    settings: StepSettings, decoder: Decoder, store: Store, device: Device, ranks: Ranks
) -> None:
    """Raise ConfigError for pages of experts that cannot be."""
    if settings.expert_pages < 1:
        raise ConfigError(f"expert_pages is {settings.expert_pages}, must be at least 1")
    family = decoder.config.model_type
    why, way_out = "", "Set memory.expert_pages to 1, or to auto."
    if not device.copying:
        why = "compute reads experts where they are, in host memory, and nothing is fetched"
    elif not ranks.owner.is_alone:
        why = "blocks are divided among ranks, each of which has a part of every expert"
    elif settings.compile:
        why = "a compiled layer reads its experts at once"
        way_out = "Set train.compile to false, or memory.expert_pages to 1."
    elif not has_experts(decoder.model):
        why = f"the code of {family} does not multiply by groups of rows, or has no experts"
    elif any(segment.matrices for segment in store.layout.segments):
        why = "Muon orthogonalizes the matrices of a layer at once, on the device"
        way_out = "Set memory.expert_pages to 1, or optim.name to adamw."
    elif mixed := _mixed(decoder):
        why = f"{mixed} has matrices of several forms in its folder"
        way_out = "Set memory.expert_pages to 1, or model.base to nf4."
    if why:
        raise ConfigError(f"expert_pages is {settings.expert_pages}: {why}. {way_out}")


def paged_params(decoder: Decoder) -> frozenset[str]:
    """Return the names of the params that come in pages: matrices of experts."""
    return frozenset(
        f"{path}.{param}" for path, module in _mixtures(decoder) for param in product_params(module)
    )


def _mixtures(decoder: Decoder) -> list[tuple[str, nn.Module]]:
    """Return the mixtures of all layers, by their paths in the model."""
    return [
        (path, module)
        for path, module in decoder.model.named_modules()
        if is_mixture(module) and path.startswith(f"{decoder.layers_path}.")
    ]


def _mixed(decoder: Decoder) -> str:
    """Return the first param of experts whose matrices are not all of one form, if any."""
    names = paged_params(decoder)
    mixed = (p.name for p in decoder.params if p.name in names and len(p.form) > 1)
    return next(mixed, "")


class ExpertPages:
    """The experts of all layers, as ops of the compute lane read them."""

    def __init__(
        self,
        decoder: Decoder,
        template: Template,
        store: Store,
        device: Device,
        num_pages: int,
    ) -> None:
        """`template` computes on the device."""
        self._device = device
        self.groups = device.groups(decoder.model.dtype)
        paths = {path for path, _ in _mixtures(decoder)}
        self._paths = {
            module: path for path, module in template.model.named_modules() if path in paths
        }
        self.names = paged_params(decoder)
        """The params that come in pages."""
        self._params = {
            param.name: _Experts(param, store.home(param.name), _pages(param.shape[0], num_pages))
            for param in decoder.params
            if param.name in self.names
        }
        self._widener = Widener(device.place)
        for experts in self._params.values():
            self._widener.prepare(experts.param.form)
        blocks = store.layout.places
        self._read_by: dict[int, tuple[str, str]] = {}
        """The params that the two products of each block's first mixture read."""
        for path, module in _mixtures(decoder):
            first, second = (f"{path}.{param}" for param in product_params(module))
            self._read_by.setdefault(blocks[first].segment.block, (first, second))
        self._zeros = {
            dtype: device.place(torch.zeros((), dtype=dtype))
            for dtype in {experts.param.dtype for experts in self._params.values()}
        }
        sizes = [one.slot_bytes(span) for one in self._params.values() for span in one.ranges]
        self._ring = PageRing(device, max(sizes), self._load)
        self._op: Op | None = None
        self._gradients: PageGradients | None = None

    def read(self, store: Store) -> None:
        """Take experts of this store from now on. Nothing may be under way."""
        self._params = {
            name: experts._replace(home=store.home(name)) for name, experts in self._params.items()
        }

    def stand_in(self, name: str) -> Tensor:
        """Return what a layer is given in place of a param: its shape, and no memory."""
        param = self._params[name].param
        return self._zeros[param.dtype].expand(param.shape)

    @contextmanager
    def visiting(self, op: Op, gradients: PageGradients) -> Iterator[None]:
        """Let a layer's op find its experts in pages, and begin to fetch them.

        `gradients` gets those of each page.
        """
        assert op.block is not None
        self._ring.begin()
        params = self._read_by.get(op.block)
        if params is None:  # a layer without experts, among others that have some
            yield
            return
        self._op, self._gradients = op, gradients
        goes_back_at_once = op.kind is OpKind.BACKWARD and op.touches("kept", op.block, op.micro)
        first = params[goes_back_at_once]
        self._ring.plan(self._keys(first, range(len(self._params[first].ranges))))
        try:
            with in_pages(self):
                yield
        finally:
            self._op = self._gradients = None
            self._ring.end()

    @property
    def num_bytes(self) -> int:
        """The bytes that the op has fetched."""
        return self._ring.num_bytes

    def ask(self, offsets: Tensor) -> list[int]:
        ends: list[int] = self._device.read(offsets).tolist()
        return ends

    def walk(
        self, module: nn.Module, param: str, ends: Sequence[int], *, back: bool = False
    ) -> Iterator[tuple[range, Tensor]]:
        name = f"{self._paths[module]}.{param}"
        experts = self._params[name]
        numbers = [n for n, span in enumerate(experts.ranges) if _has_rows(span, ends)]
        following = self._following(module, param, back=back)
        self._ring.plan(
            [
                *self._keys(name, numbers),
                *([] if following is None else self._keys(following, numbers)),
            ]
        )
        gradients = self._gradients if back and experts.param.trained else None
        for number, span in enumerate(experts.ranges):
            if number not in numbers:
                if gradients is not None:
                    gradients.add_page(name, span, None)
                continue
            slot = self._ring.take(Key(name, number))
            yield span, experts.weights(span, slot)
            self._ring.release()

    def add(self, module: nn.Module, param: str, experts: range, gradient: Tensor) -> None:
        assert self._gradients is not None, "a gradient outside of an op"
        self._gradients.add_page(f"{self._paths[module]}.{param}", experts, gradient)

    def _following(self, module: nn.Module, param: str, *, back: bool) -> str | None:
        """Return the param whose pages are wanted next, if that is known."""
        assert self._op is not None
        path, (first, second) = self._paths[module], product_params(module)
        if (param == first) is not back:
            return f"{path}.{second}" if not back else f"{path}.{first}"
        if param == second and not back and self._op.kind is OpKind.BACKWARD:
            return f"{path}.{second}"
        return None

    def _keys(self, name: str, numbers: Sequence[int]) -> list[Key]:
        return [Key(name, number) for number in numbers]

    def _load(self, key: Key, slot: Tensor) -> int:
        """Queue what brings a page into a slot; return the bytes that cross the link."""
        experts = self._params[key.name]
        span, num_bytes = experts.ranges[key.number], 0
        for start, source in experts.pieces(span):
            self._device.copy(slot[start : start + source.nbytes], source)
            num_bytes += source.nbytes
        if form := experts.form(span):
            narrow = slot[experts.wide_bytes(span) :]
            with torch.no_grad():
                self._widener.widen(form, narrow, experts.weights(span, slot).view(-1))
        return num_bytes


class _Experts(NamedTuple):
    """One param of a mixture. In a page slot its weights come first, then its narrow bytes."""

    param: Param
    home: Tensor
    """Its bytes in the store, flat."""
    ranges: list[range]
    """The experts of each page."""

    def num_elements(self, span: range) -> int:
        return len(span) * (self.param.num_elements // self.param.shape[0])

    def wide_bytes(self, span: range) -> int:
        """Return the room of a page's weights, in full grains."""
        size = self.num_elements(span) * self.param.dtype.itemsize
        return -(-size // GRAIN) * GRAIN

    def slot_bytes(self, span: range) -> int:
        return self.wide_bytes(span) + form_bytes(self.form(span))

    def weights(self, span: range, slot: Tensor) -> Tensor:
        """Return the weights of a page in its slot. (experts, ...)"""
        flat = slot[: self.num_elements(span) * self.param.dtype.itemsize]
        return flat.view(self.param.dtype).view(len(span), *self.param.shape[1:])

    def form(self, span: range) -> Form:
        """Return the form of a page; empty: its weights are copied as they are."""
        return tuple(replace(m, count=self._matrices(m, len(span))) for m in self.param.form)

    def pieces(self, span: range) -> list[tuple[int, Tensor]]:
        """Return the bytes of a page, and where in its slot each part of them begins."""
        if not self.param.form:
            size = self.home.nbytes // self.param.shape[0]
            return [(0, self.home[span.start * size : span.stop * size])]
        (page,), (whole,) = self.form(span), self.param.form
        spot = Spot(matrices=whole, start=0, first=self._matrices(whole, span.start))
        first, found = self.wide_bytes(span), []
        for name, array in page.arrays.items():
            there = spot.array_bytes(name, page.count)
            found.append((first + array.start, self.home[there.start : there.stop]))
        return found

    def _matrices(self, whole: Matrices, num_experts: int) -> int:
        return num_experts * (whole.count // self.param.shape[0])


def _pages(num_experts: int, num_pages: int) -> list[range]:
    """Cut experts into pages, in order, whose sizes differ by at most one."""
    count = min(num_pages, num_experts)
    starts = [num_experts * page // count for page in range(count + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def _has_rows(experts: range, ends: Sequence[int]) -> bool:
    return ends[experts[-1]] > (ends[experts.start - 1] if experts.start else 0)


class Key(NamedTuple):
    """A page: of one param, the experts of that number."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class _Coming:
    key: Key
    slot: int
    copied: Event | None


class PageRing:
    """Page slots that are filled in the order of a plan, ahead of compute. Of one thread."""

    def __init__(self, device: Device, num_bytes: int, load: Callable[[Key, Tensor], int]) -> None:
        """`load` queues what brings a page into a slot of `num_bytes`, and returns its bytes."""
        count = PAGE_SLOTS
        self._device = device
        self._load = load
        self._slots = [device.allocate(num_bytes, "expert pages") for _ in range(count)]
        self._copies = device.role_stream("pages in")
        self._read: list[Event | None] = [None] * count
        """Behind the last product that read each slot."""
        self._free = deque(range(count))
        self._planned: deque[Key] = deque()
        self._coming: deque[_Coming] = deque()
        self._taken: int | None = None
        self._last: Event | None = None
        self.num_bytes = 0
        """Bytes that were fetched since `begin`."""

    def begin(self) -> None:
        """Begin an op: nothing of another block is here."""
        self.num_bytes = 0

    def plan(self, keys: Sequence[Key]) -> None:
        """Fetch these pages next, in this order; those that are on their way are not fetched again.

        What else was planned is forgotten.
        """
        planned, coming = list(keys), list(self._coming)
        self._coming.clear()
        for page in coming:
            if page.key in planned:
                planned.remove(page.key)
                self._coming.append(page)
            else:
                self._free.append(page.slot)
        self._planned = deque(planned)
        self._fill()

    def take(self, key: Key) -> Tensor:
        """Return the slot of a page, valid until `release`. The stream of compute waits."""
        while self._coming and self._coming[0].key != key:
            self._free.append(self._coming.popleft().slot)
        if not self._coming:
            self.plan([key, *(other for other in self._planned if other != key)])
        page = self._coming.popleft()
        if page.copied is not None:
            self._device.current_stream().wait_event(page.copied)
        self._taken = page.slot
        return self._slots[page.slot]

    def release(self) -> None:
        """Give back the page that was taken: all that reads it is queued."""
        assert self._taken is not None
        if self._copies is not None:
            self._read[self._taken] = self._device.current_stream().record_event()
        self._free.append(self._taken)
        self._taken = None
        self._fill()

    def end(self) -> None:
        """Forget all pages; what was fetched in vain is done before the op is."""
        if self._taken is not None:  # an op that failed
            self._free.append(self._taken)
            self._taken = None
        self._free.extend(page.slot for page in self._coming)
        self._coming.clear()
        self._planned.clear()
        if self._last is not None:
            self._device.current_stream().wait_event(self._last)
            self._last = None

    def _fill(self) -> None:
        while self._free and self._planned:
            key, slot = self._planned.popleft(), self._free.popleft()
            if self._copies is None:
                self.num_bytes += self._load(key, self._slots[slot])
                self._coming.append(_Coming(key, slot, None))
                continue
            with self._copies:
                if (read := self._read[slot]) is not None:
                    self._copies.wait_event(read)
                self.num_bytes += self._load(key, self._slots[slot])
                self._last = self._copies.record_event()
            self._coming.append(_Coming(key, slot, self._last))
