"""Seals: host memory that rests between updates is as it was left, or the step fails.

    NORM(b)        take_gradients     the gradient that waits for its update
    UPDATE(b)      changing           what it changes, and the gradient: compared, and sealed again
                   tour               a few chunks of frozen weights, all in TOUR_STEPS steps
    let_go(b)      check_block        all of a block, once a save has copied it (snapshot.py)

A seal is two sums over the bytes of a chunk (optim/kernel.py). The pass of an update takes them
while it has the bytes in the cache, just before it changes them and just after, so that they cross
from memory no more often than without. An update of damaged bytes is carried out and sealed,
because lanes do not stop for it; but `damage` stays, and nothing is acknowledged any more: neither
the step, nor a save, nor an export, until a checkpoint is back in memory and `take_all` has sealed
that.

Sealed are weights, trained and frozen, master remainders, states of the optimizer, gradients that
wait for the norm of the step, and through the seals of the block what an undo log puts back. States
that were never written are not in memory, and have no seal before the first update. Not sealed are
kinds on disk, which have hashes there (memory/tier/scratch_file.py), and all that lives for less
than a step: the tape, rings, and the buffers of the link.

Who waits: nobody. A check of a block is made by those who keep updates from it.

Laws (tests/engine/test_seals.py)
    1. A bit that flips in sealed memory is found before a save or an export is acknowledged.
    2. Seals change no bit of training, and raise no alarm over memory that only updates write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.engine.no_seals import Changed, Gradient, NoSeals
from megatrain.errors import MemoryDamaged, listing
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Segment, overlap
from megatrain.memory.store import Store
from megatrain.optim.kernel import CHUNK, Watch, chunks_of
from megatrain.optim.native import load_kernel
from megatrain.optim.views import Views, part_of

TOUR_STEPS = 64
"""Steps in which all frozen weights are checked once."""
_AT_ONCE = 16
"""Chunks of frozen weights that are checked at once."""


class _Run:
    """The seals of a run of elements of a segment."""

    def __init__(
        self, segment: Segment, span: range, numbers: Sequence[tuple[Kind, Tensor]]
    ) -> None:
        self.segment, self.span = segment, span
        self.kinds = [kind for kind, _ in numbers]
        self.arrays = [part_of(kind, flat, span) for kind, flat in numbers]
        self.num_chunks = -(-len(span) // CHUNK)
        self.seals = torch.zeros(self.num_chunks, len(numbers), 2, dtype=torch.int64)
        """(chunks, kinds, 2)"""
        self.known = torch.zeros(len(numbers), dtype=torch.bool)
        """Which kinds have seals. (kinds,)"""
        self.gradient: Tensor | None = None
        """Seals of a gradient that waits. (chunks, 2)"""


class Seals(NoSeals):
    """The seals of a store's memory."""

    def __init__(
        self,
        store: Store,
        runs: Callable[[Segment], list[range]],
        num_trained: int,
        num_threads: int,
        *,
        watches: bool,
    ) -> None:
        """`runs` are those of an update of a trained segment, and `num_trained` blocks have one.

        `watches`: the passes of an update take the seals.
        """
        self.is_taken = False
        self._layout, self._kernel, self._threads = store.layout, load_kernel(), num_threads
        self._watches = watches
        self._runs: dict[int, dict[int, _Run]] = {}
        """Runs by segment and first element."""
        for segment in self._layout.segments:
            numbers = [
                (kind, store.segment(segment, kind))
                for kind in segment.starts
                if kind is not Kind.GRAD and kind not in store.on_disk
            ]
            whole = [range(len(segment.owned))] if segment.owned else []
            spans = runs(segment) if segment.trained else whole
            self._runs[id(segment)] = {s.start: _Run(segment, s, numbers) for s in spans}
        self._kept: dict[int, list[tuple[_Run, Tensor, Tensor]]] = {}
        frozen = [
            (run, first)
            for segment in self._layout.segments
            if not segment.trained
            for run in self._of(segment)
            for first in range(0, run.num_chunks, _AT_ONCE)
        ]
        self._turn = -(-len(frozen) // (TOUR_STEPS * max(1, num_trained)))
        """Steps of the tour to take with each update."""
        self._tour = itertools.cycle(frozen)

    def _of(self, segment: Segment) -> list[_Run]:
        return list(self._runs[id(segment)].values())

    @contextmanager
    def changing(
        self,
        segment: Segment,
        views: Views,
        span: slice,
        gradient: Tensor,
        step: int,
        changed: Changed = "all",
    ) -> Iterator[Views]:
        run = self._runs[id(segment)][span.start]
        masters = (Kind.HI, Kind.LO)
        at = [
            number
            for number, kind in enumerate(run.kinds)
            if changed == "all" or (kind in masters) == (changed == "weights")
        ]
        read = [] if run.gradient is None else [gradient]
        watch = Watch([run.arrays[number] for number in at], read, len(run.span))
        if self._watches:
            yield replace(views, watch=watch)
        else:
            with self._kernel.watching(watch, self._threads):
                yield views
        if run.gradient is not None and not torch.equal(watch.before[:, -1], run.gradient):
            self._note(run, Kind.GRAD, gradient, (watch.before[:, -1] != run.gradient), step)
        self._compare(run, at, watch.before[:, : len(at)], step)
        run.seals[:, at] = watch.after
        run.known[at] = True

    def take_all(self, num_updates: Mapping[int, int]) -> None:
        self.damage = None
        self._kept.clear()
        for segment in self._layout.segments:
            for run in self._of(segment):
                run.gradient = None
                if self.is_taken and not segment.trained:
                    self._check(run, range(run.num_chunks), step=0)
                    continue
                is_new = not num_updates.get(segment.block, 0)
                for number, kind in enumerate(run.kinds):
                    run.known[number] = kind in (Kind.HI, Kind.LO) or not is_new
                at = run.known.nonzero().view(-1).tolist()
                run.seals[:, at] = self._seals(run, at, range(run.num_chunks))
        self.is_taken = True

    def take_gradients(self, gradient: Gradient) -> None:
        for segment, flat in gradient:
            for run in self._of(segment):
                parts = chunks_of([flat[run.span.start : run.span.stop]], len(run.span))
                run.gradient = self._kernel.seals(parts, num_threads=self._threads)

    def forget_gradient(self, segment: Segment) -> None:
        for run in self._of(segment):
            run.gradient = None

    def tour(self, step: int) -> None:
        for run, first in itertools.islice(self._tour, self._turn):
            self._check(run, range(first, min(first + _AT_ONCE, run.num_chunks)), step)

    def check_block(self, block: int, step: int) -> None:
        for segment in self._layout.segments:
            if segment.block == block:
                for run in self._of(segment):
                    self._check(run, range(run.num_chunks), step)
        if self.damage is not None:
            raise self.damage

    def keep(self, block: int) -> None:
        segments = self._layout.trained_segments(block)
        self._kept[block] = [
            (run, run.seals.clone(), run.known.clone())
            for segment in segments
            for run in self._of(segment)
        ]

    def restore(self, block: int) -> None:
        for run, seals, known in self._kept.pop(block, ()):
            run.seals, run.known = seals, known

    def _check(self, run: _Run, chunks: range, step: int) -> None:
        """Look for damage in some chunks of a run."""
        at = run.known.nonzero().view(-1).tolist()
        self._compare(run, at, self._seals(run, at, chunks), step, chunks.start)

    def _seals(self, run: _Run, at: Sequence[int], chunks: range) -> Tensor:
        """Return the seals of some kinds and chunks of a run, as they are now."""
        parts = chunks_of([run.arrays[number] for number in at], len(run.span))
        parts = parts[chunks.start * len(at) : chunks.stop * len(at)]
        found = self._kernel.seals(parts, num_threads=self._threads)
        return found.view(len(chunks), len(at), 2)

    def _compare(
        self, run: _Run, at: Sequence[int], found: Tensor, step: int, first: int = 0
    ) -> None:
        """Note damage where what was found of some kinds, from a first chunk on, is not known."""
        taken = run.seals[first : first + len(found), at]
        wrong = (found != taken) & run.known[at].view(-1, 1)
        for number, of_kind in zip(at, wrong.unbind(1), strict=True):
            if of_kind.any():
                self._note(run, run.kinds[number], run.arrays[number], of_kind, step, first)

    def _note(
        self, run: _Run, kind: Kind, array: Tensor, wrong: Tensor, step: int, first: int = 0
    ) -> None:
        """Keep the first damage: of the chunks of an array that are `wrong`. (chunks, 2)"""
        if self.damage is not None:
            return
        chunk = first + int(wrong.any(dim=1).nonzero()[0])
        segment, start = run.segment, run.segment.owned.start + run.span.start + chunk * CHUNK
        here = range(start, min(start + CHUNK, start + len(run.span) - chunk * CHUNK))
        names = listing(
            place.param.name
            for place in self._layout.segment_places(segment)
            if overlap(range(place.start, place.padded_stop), here)
        )
        part = chunks_of([array], len(run.span))[chunk]
        address = part.data_ptr()
        self.damage = MemoryDamaged(
            f"host memory changed while nothing wrote to it: {kind.purpose} of {names} (block "
            f"{segment.block}), at addresses {address:#x} to {address + part.nbytes:#x}, found in "
            f"step {step}. A bit has flipped, or another part of this program wrote there. No "
            "checkpoint has it: continue from the last one with --resume. If it comes again, look "
            "at the memory errors in `megatrain doctor`, and test the modules with memtest86+",
            is_frozen=not segment.trained,
        )
