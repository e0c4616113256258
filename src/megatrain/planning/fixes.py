"""What would make it fit: changes to the settings, the data or the machine, the cheapest first.

A change that costs nothing but a habit comes before one that costs quality, and that before one
that costs money. What one change does not solve, two together may.

Laws (tests/planning/test_plan.py): each fix, applied, fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain.memory.ledger import gib
from megatrain.planning.ledger import predicted_ledger
from megatrain.planning.profile import MachineProfile
from megatrain.planning.search import (
    DEVICE_HEADROOM,
    HOST_HEADROOM,
    Fixed,
    Search,
    shortfalls,
)
from megatrain.planning.workload import BlockShape, ModelShape, Workload

MOST = 3
RAM_SIZES = [size << 30 for size in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)]
RAM_SIZES += [size << 40 for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
"""As they are sold."""
DEVICE_SIZES = [size << 30 for size in (8, 10, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)]
SHORTEST = 128
"""Tokens of a row: below this nobody trains."""
_SYSTEM_SHARE = 0.06
"""Of sold memory, what the system or the driver keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One change, or several that go together."""

    text: str
    cost: float
    """Orders fixes: 1 a habit, 2 quality, 4 and more money."""
    profile: MachineProfile
    workload: Workload
    """Both as they are after the change."""

    def __str__(self) -> str:
        return self.text.replace("; ", "\n    and ")


_Maker = Callable[[Fix], Iterator[Fix]]


def find_fixes(profile: MachineProfile, workload: Workload, fixed: Fixed) -> tuple[Fix, ...]:
    """Return up to MOST changes that make the workload fit, the cheapest first."""
    start = Fix(text="", cost=0.0, profile=profile, workload=workload)
    found = [fix for fix in _changes(start) if _fits(fix, fixed)]
    if len(found) < MOST:
        for first, second in itertools.permutations(_kinds(), 2):
            for one in first(start):
                found += [fix for fix in second(one) if _fits(fix, fixed)]
    chosen: dict[frozenset[str], Fix] = {}
    for fix in sorted(found, key=_order):
        parts = frozenset(fix.text.split("; "))
        if not any(known <= parts for known in chosen):  # more of what is enough already is no fix
            chosen[parts] = fix
    return tuple(chosen.values())[:MOST]


def _order(fix: Fix) -> tuple[float, str]:
    return fix.cost, fix.text


def _fits(fix: Fix, fixed: Fixed) -> bool:
    search = Search(fix.profile, fix.workload, fixed)
    return search.fits(search.smallest())


def _kinds() -> list[_Maker]:
    return [
        _shorter_steps,
        _without_clipping,
        _in_bf16,
        _with_frozen_tables,
        _shorter_rows,
        _more_ram,
        _more_device,
    ]


def _changes(start: Fix) -> Iterator[Fix]:
    for kind in _kinds():
        yield from kind(start)


def _then(before: Fix, text: str, cost: float, **changes: object) -> Fix:
    """Return the fix that does `before` and then this."""
    joined = f"{before.text}; {text}" if before.text else text
    return replace(before, text=joined, cost=before.cost + cost, **changes)  # type: ignore[arg-type]


def _shorter_steps(start: Fix) -> Iterator[Fix]:
    """Offer the longest step, of half the tokens or less, whose tape fits the host."""
    workload, tokens = start.workload, start.workload.step_tokens // 2
    while tokens >= workload.sequence:
        shorter = replace(workload, step_tokens=tokens)
        search = Search(start.profile, shorter)
        ledger = predicted_ledger(start.profile, shorter, search.smallest())
        if "host" not in shortfalls(start.profile, ledger):
            saved = _needed(start, "host") - ledger.total("host")
            text = f"train.batch_tokens: {tokens} (now {workload.step_tokens}, -{gib(saved)} host)"
            yield _then(start, text, 0.8, workload=shorter)
            return
        tokens //= 2


def _without_clipping(start: Fix) -> Iterator[Fix]:
    workload = start.workload
    if workload.max_grad_norm is not None:
        saved = sum(block.gradient_bytes(workload.dtype) for block in workload.model.blocks)
        yield _then(
            start,
            f"train.max_grad_norm: null (updates in backward, -{gib(saved)} host)",
            1.0,
            workload=replace(workload, max_grad_norm=None),
        )


def _in_bf16(start: Fix) -> Iterator[Fix]:
    if start.workload.dtype == "fp32":
        yield _then(
            start,
            "model.dtype: bf16 (masters stay fp32)",
            1.2,
            workload=replace(start.workload, dtype="bf16"),
        )


def _with_frozen_tables(start: Fix) -> Iterator[Fix]:
    """Freeze embedding and output projection: they keep their weights and nothing else."""
    model = start.workload.model
    frozen = replace(model, embedding=_frozen(model.embedding), head=_frozen(model.head))
    if frozen != model:
        yield _then(
            start,
            f"model.frozen: embedding and head (-{gib(_saved_by_freezing(model))} host)",
            2.0,
            workload=replace(start.workload, model=frozen),
        )


def _frozen(block: BlockShape) -> BlockShape:
    tensors = (replace(t, trained=t.trained and len(t.shape) < 2) for t in block.tensors)
    return replace(block, tensors=tuple(tensors))


def _saved_by_freezing(model: ModelShape) -> int:
    tables = [*model.embedding.tensors, *model.head.tensors]
    return 10 * sum(t.num_elements for t in tables if t.trained and len(t.shape) > 1)


def _shorter_rows(start: Fix) -> Iterator[Fix]:
    """Offer the longest rows, of half the length or less, that fit the device."""
    workload, length = start.workload, start.workload.sequence // 2
    while length >= SHORTEST:
        shorter = replace(workload, sequence=length)
        search = Search(start.profile, shorter)
        ledger = predicted_ledger(start.profile, shorter, search.smallest())
        if "device" not in shortfalls(start.profile, ledger):
            text = f"data.max_length: {length} (now {workload.sequence})"
            yield _then(start, text, 1.5, workload=shorter)
            return
        length //= 2


def _more_ram(start: Fix) -> Iterator[Fix]:
    needed = _needed(start, "host") * HOST_HEADROOM
    size = _sold(RAM_SIZES, needed)
    if size is not None and size * (1 - _SYSTEM_SHARE) > start.profile.ram_bytes:
        usable = int(size * (1 - _SYSTEM_SHARE))
        yield _then(
            start,
            f"host memory: {gib(size)} (now {gib(start.profile.ram_bytes)})",
            4.0,
            profile=start.profile.changed(ram_bytes=usable),
        )


def _more_device(start: Fix) -> Iterator[Fix]:
    profile = start.profile
    if profile.unified or not profile.device_bytes:
        return
    size = _sold(DEVICE_SIZES, _needed(start, "device") * DEVICE_HEADROOM)
    if size is not None and size * (1 - _SYSTEM_SHARE) > profile.device_bytes:
        yield _then(
            start,
            f"device memory: {gib(size)} (now {gib(profile.device_bytes)})",
            8.0,
            profile=profile.changed(device_bytes=int(size * (1 - _SYSTEM_SHARE))),
        )


def _needed(start: Fix, place: str) -> int:
    search = Search(start.profile, start.workload)
    return predicted_ledger(start.profile, start.workload, search.smallest()).total(place)


def _sold(sizes: list[int], needed: float) -> int | None:
    return next((size for size in sizes if size * (1 - _SYSTEM_SHARE) >= needed), None)
