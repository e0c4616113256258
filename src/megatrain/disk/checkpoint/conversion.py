"""Optimizer states that change their code while a checkpoint is read: fp32, bf16 or 8 bits.

A worker takes one state file, a window of elements at a time: moments are decoded to fp32 and
encoded as the store keeps them, remainders are copied. Rounding is that of an update
(optim/rounding.py), with the seed of the run and the number of updates so far. A rank converts
what it has, and reads the chunks of that.

Laws (tests/disk/checkpoint/test_conversion.py, tests/disk/checkpoint/test_restore_ranks.py)
    1. Moments in fp32 have the decoded values exactly; in other codes they are encoded from these.
    2. The bits depend on the checkpoint and the seed, not on windows, workers, ranks or the tier.
    3. Memory grows by a few chunks per worker: no kind is held twice.
    4. A state file with a changed byte is named, and no byte that failed its hash is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.checkpoint.checked_read import NUM_HASH_WORKERS, CheckedFile
from megatrain.disk.checkpoint.manifest import FileRecord
from megatrain.disk.checkpoint.parts import described_state
from megatrain.disk.hf.weights_file import WeightsFile
from megatrain.errors import CheckpointMismatch
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Layout, Place, kind_dtype
from megatrain.memory.tier.filling import TierFilling
from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode, decode_momentum, encode, encode_momentum
from megatrain.progress import byte_progress

WINDOW = 1 << 15
"""Elements, a multiple of SHARED. Torch works on so few in the thread that asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """From the states of a checkpoint to those of the store."""

    layout: Layout
    saved: tuple[TensorKind, ...]
    wanted: tuple[TensorKind, ...]
    seed: int
    num_updates: Mapping[int, int]
    """Updates of each block, as of the checkpoint."""

    def files(self) -> dict[str, WeightsFile]:
        """Return the state files as the checkpoint has them, by name; tensors have no memory."""
        blocks = range(self.layout.num_blocks)
        files = (described_state(self.layout, block, self.saved) for block in blocks)
        return {file.name: file for file in files if file.tensors}

    def convert(
        self,
        folder: Path,
        records: Mapping[str, FileRecord],
        targets: Mapping[str, WeightsFile],
        filling: TierFilling | None,
    ) -> None:
        """Fill the state files among `targets` from those of a checkpoint.

        Raises CheckpointCorrupted, CheckpointMismatch or DiskError.
        """
        files, owner = self.files(), self.layout.owner
        total = sum(records[name].num_bytes for name in files) // owner.size
        title = f"converting the states of {folder.name}"
        with byte_progress(title, total, shown=owner.leads) as advance:

            def work(name: str) -> None:
                with CheckedFile(folder, name, records[name], advance) as source:
                    _StateFile(
                        conversion=self,
                        source=source,
                        saved=files[name],
                        wanted=targets[name],
                        filling=filling,
                    ).convert()

            with ThreadPoolExecutor(NUM_HASH_WORKERS, thread_name_prefix="convert") as pool:
                try:
                    for _ in pool.map(work, files):
                        pass
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise


class _StateFile:
    """One file, from its bytes on disk to its tensors in the store."""

    def __init__(
        self,
        *,
        conversion: Conversion,
        source: CheckedFile,
        saved: WeightsFile,
        wanted: WeightsFile,
        filling: TierFilling | None,
    ) -> None:
        self._conversion, self._source, self._filling = conversion, source, filling
        self._header = saved.header
        self._starts = {tensor.name: start for start, tensor in saved.placed()}
        self._targets = {tensor.name: tensor for tensor in wanted.tensors}
        self._name = saved.name

    def convert(self) -> None:
        if bytes(self._source.read(0, len(self._header)).numpy()) != self._header:
            raise CheckpointMismatch(f"{self._name}: its tensors do not match this model")
        layout = self._conversion.layout
        for place in layout.places.values():
            if f"{self._conversion.wanted[0]}.{place.param.name}" in self._targets:
                first = layout.first_trained(place.segment) + place.start
                for begin in range(place.owned.start, place.owned.stop, WINDOW):
                    self._convert_window(place, begin, first + begin)

    def _convert_window(self, place: Place, begin: int, number: int) -> None:
        """Copy the remainders of WINDOW elements, or those that are left, and convert moments.

        `number` is that of the first element in the store.
        """
        count = min(WINDOW, place.owned.stop - begin)
        if place.has(TensorKind.LO):
            self._put(
                place, TensorKind.LO, begin, self._numbers(place, TensorKind.LO, begin, count)
            )
        conversion, matrices = self._conversion, place.segment.matrices
        had, wanted = (
            [kind for kind in kinds if kind.is_for_matrices or not matrices]
            for kinds in (conversion.saved, conversion.wanted)
        )
        saved = [self._numbers(place, kind, begin, count) for kind in had]
        made = [_zeros(place, kind, count) for kind in wanted]
        rounding = Rounding(
            seed=conversion.seed,
            update=conversion.num_updates.get(place.segment.block, 0),
            first=number,
        )
        if matrices:
            encode_momentum(decode_momentum(saved), made, rounding)
        else:
            encode(*decode(saved), made, rounding)
        for kind, numbers in zip(wanted, made, strict=True):
            self._put(place, kind, begin, numbers)

    def _numbers(self, place: Place, kind: TensorKind, begin: int, count: int) -> Tensor:
        """Return the saved numbers of `count` elements."""
        numbers = _zeros(place, kind, count)
        start = self._starts[f"{kind}.{place.param.name}"]
        start += begin // kind.elements_per_number * numbers.dtype.itemsize
        numbers.view(torch.uint8)[:] = self._source.read(start, start + numbers.nbytes)
        return numbers

    def _put(self, place: Place, kind: TensorKind, begin: int, numbers: Tensor) -> None:
        target = self._targets[f"{kind}.{place.param.name}"]
        start = begin // kind.elements_per_number * numbers.dtype.itemsize
        target.put(start, numbers.view(torch.uint8), self._filling)


def _zeros(place: Place, kind: TensorKind, num_elements: int) -> Tensor:
    size = -(-num_elements // kind.elements_per_number)
    return torch.zeros(size, dtype=kind_dtype(kind, place.param.dtype))
