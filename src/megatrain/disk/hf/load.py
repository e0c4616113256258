"""Loading a Hugging Face folder: every tensor is read directly into its place in the store.

    folder --> which tensors, checked against the model --> chunks --> workers: read, convert, place

Nothing is held twice: a worker owns one buffer of CHUNK_BYTES, reads a run of a tensor into it past
the page cache, and writes it where it belongs. bf16 goes to `hi` as it is and leaves `lo` zero,
which costs no memory; fp32 and fp16 are split exactly into `hi` and `lo`. Where `lo` is on disk,
bf16 leaves the disk alone, and other pieces go there chunk by chunk.

Laws (tests/disk/hf/test_load.py)
    1. Loaded masters have exactly the values of the folder.
    2. Missing, surplus, misshapen and mistyped tensors are named, before a byte is read.
    3. Peak memory stays within the arenas and the workers' buffers.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.hf.folder import StoredTensor, read_folder
from megatrain.disk.hf.growth import Growth, tables
from megatrain.disk.hf.names import FolderTensor, NameMap
from megatrain.disk.hf.safetensors_format import DTYPES
from megatrain.errors import WeightsMismatch, listing
from megatrain.memory.direct import DISK_PAGE, DirectReader, aligned_buffer, copy_bytes
from megatrain.memory.kinds import Kind
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.memory.tier_filling import TierFilling
from megatrain.models.decoder import Decoder
from megatrain.progress import Advance, byte_progress

READ_BYTES = 16 << 20
NUM_LOAD_WORKERS = 4
# Matching a name takes 50 us: no model has more tables and masks in its folder than this.
_MOST_PER_TENSOR, _MOST_SURPLUS = 4, 4096
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A tensor of the folder and its place in the model."""

    stored: StoredTensor
    tensor: FolderTensor


def load_weights(
    folder: Path, decoder: Decoder, store: Store, growth: Growth | None = None
) -> None:
    """Fill `hi` and `lo` of `store`, and the decoder's persistent buffers, from `folder`.

    With `growth` the folder's tables may lack the rows of new tokens, which are then made.
    Raises ModelFolderError, WeightsFormatError, WeightsMismatch or DiskError.
    """
    matches, aliases = match_tensors(folder, decoder, growth)
    total_bytes = sum(m.stored.entry.stop - m.stored.entry.start for m in (*matches, *aliases))
    with ExitStack() as stack:
        advance = stack.enter_context(byte_progress(f"loading {folder.name}", total_bytes))
        paths = {match.stored.path for match in (*matches, *aliases)}
        readers = {path: stack.enter_context(DirectReader(path)) for path in sorted(paths)}
        filling = None
        if store.tier is not None:
            filling = stack.enter_context(TierFilling(store.layout, store.tier))
        places = _Places(decoder, store, filling)
        _run(matches, readers, places.put, advance)
        _run(aliases, readers, places.compare, advance)
    if growth is not None:
        table = tables(decoder)[0]
        rows = next(m.tensor.shape[0] for m in matches if m.tensor.param == table)
        growth.fill(decoder, store, rows)


def match_tensors(
    folder: Path, decoder: Decoder, growth: Growth | None = None
) -> tuple[list[Match], list[Match]]:
    """Return the folder's tensors with their places, and the second copies of tied params."""
    names = NameMap(decoder)
    matches: list[Match] = []
    aliases: list[Match] = []
    surplus: list[str] = []
    tensors = read_folder(folder)
    if len(tensors) > _MOST_PER_TENSOR * len(names.tensors) + _MOST_SURPLUS:
        raise WeightsMismatch(
            f"the weights are {len(tensors)} tensors; the {decoder.config.model_type} in "
            f"config.json has {len(names.tensors)}"
        )
    for name, stored in tensors.items():
        if tensor := names.find(name):
            matches.append(Match(stored=stored, tensor=tensor))
        elif tensor := names.find_alias(name):
            aliases.append(Match(stored=stored, tensor=tensor))
        elif not _ignorable(decoder, name):
            surplus.append(name)
    _refuse_mismatch(decoder, names, matches, aliases, surplus, growth)
    if growth is not None:
        matches = [_narrowed(match, decoder, growth) for match in matches]
        aliases = [_narrowed(match, decoder, growth) for match in aliases]
    return matches, aliases


def _narrowed(match: Match, decoder: Decoder, growth: Growth) -> Match:
    rows = match.stored.entry.shape[0] if match.stored.entry.shape else 0
    return replace(match, tensor=growth.narrowed(decoder, match.tensor, rows))


def _refuse_mismatch(
    decoder: Decoder,
    names: NameMap,
    matches: list[Match],
    aliases: list[Match],
    surplus: list[str],
    growth: Growth | None,
) -> None:
    """Raise WeightsMismatch unless the matches are exactly the model, each element once."""
    faults: list[str] = []
    if surplus:
        faults.append(f"{len(surplus)} tensors are not in the model: {listing(surplus)}")
    missing, twice = names.faults(match.tensor for match in matches)
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {listing(missing)}")
    if twice:
        faults.append(f"{len(twice)} params are given twice: {listing(twice)}")
    buffers = decoder.persistent_buffers()
    for match in (*matches, *aliases):
        entry = match.stored.entry
        tensor = match.tensor if growth is None else _narrowed(match, decoder, growth).tensor
        if entry.shape != tensor.shape:
            faults.append(f"{entry.name} has shape {entry.shape}; the model has {tensor.shape}")
        elif tensor.param not in buffers and DTYPES.get(entry.dtype) not in _WEIGHT_DTYPES:
            faults.append(f"{entry.name} is {entry.dtype}; weights must be BF16, F16 or F32")
        elif tensor.param in buffers and entry.dtype not in DTYPES:
            faults.append(f"{entry.name} is {entry.dtype}, which is not supported")
    if faults:
        more = f"\n  and {len(faults) - 12} more" if len(faults) > 12 else ""
        raise WeightsMismatch(
            f"the weights do not match the {decoder.config.model_type} in config.json:\n  "
            + "\n  ".join(faults[:12])
            + more
        )


def _ignorable(decoder: Decoder, name: str) -> bool:
    """Return whether a surplus tensor is known to be harmless: old tables and masks."""
    patterns = set(decoder.model._keys_to_ignore_on_load_unexpected or ())
    patterns |= {r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in patterns)


class _Places:
    """Takes runs of a folder's tensors and puts them where they belong."""

    def __init__(self, decoder: Decoder, store: Store, filling: TierFilling | None) -> None:
        self._store, self._filling = store, filling
        self._buffers = decoder.persistent_buffers()

    def put(self, tensor: FolderTensor, start: int, values: Tensor) -> None:
        """Place `values`, the elements of `tensor` from `start` on."""
        begin = tensor.start + start
        span = slice(begin, begin + len(values))
        if tensor.param in self._buffers:
            self._buffers[tensor.param].view(-1)[span] = values
            return
        hi = self._store.param(tensor.param, Kind.HI).view(-1)[span]
        if values.dtype is hi.dtype:
            copy_bytes(hi.view(torch.uint8), values.view(torch.uint8))
        elif not self._store.layout.places[tensor.param].has(Kind.LO):
            hi.copy_(values)
        elif self._filling is not None and Kind.LO in self._store.on_disk:
            lo = torch.empty(len(values), dtype=torch.int16)
            split_into(values.float(), hi, lo)
            self._filling.put(tensor.param, Kind.LO, 2 * begin, lo.view(torch.uint8))
        else:
            lo = self._store.param(tensor.param, Kind.LO).view(-1)[span]
            split_into(values.float(), hi, lo)

    def compare(self, tensor: FolderTensor, start: int, values: Tensor) -> None:
        """Check that a second copy of a tied param holds the values of the first."""
        begin = tensor.start + start
        span = slice(begin, begin + len(values))
        weight = self._store.param(tensor.param, Kind.HI).view(-1)[span]
        if not torch.equal(values.to(weight.dtype), weight):
            raise WeightsMismatch(
                f"{tensor.name} differs from {tensor.param}, but config.json ties them. "
                "Set tie_word_embeddings to false in config.json to keep both."
            )


def _run(
    matches: list[Match],
    readers: dict[Path, DirectReader],
    place: Callable[[FolderTensor, int, Tensor], None],
    advance: Advance,
) -> None:
    """Read the tensors of `matches` in chunks, in file order, on all workers."""
    buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(NUM_LOAD_WORKERS):
        buffers.put(aligned_buffer(READ_BYTES + 2 * DISK_PAGE))

    def work(chunk: tuple[Match, int, int]) -> None:
        match, first, last = chunk
        entry = match.stored.entry
        dtype = DTYPES[entry.dtype]
        base, size = entry.start, dtype.itemsize
        buffer = buffers.get()
        try:
            data = readers[match.stored.path].read(base + first * size, base + last * size, buffer)
            place(match.tensor, first, _typed(data, dtype))
        finally:
            buffers.put(buffer)
        advance((last - first) * size)

    with ThreadPoolExecutor(NUM_LOAD_WORKERS, thread_name_prefix="load") as pool:
        futures = [pool.submit(work, chunk) for chunk in _chunks(matches)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _chunks(matches: list[Match]) -> Iterator[tuple[Match, int, int]]:
    """Yield runs of elements of at most CHUNK_BYTES, in the order of the files' bytes."""
    for match in sorted(matches, key=lambda m: (m.stored.path, m.stored.entry.start)):
        step = READ_BYTES // DTYPES[match.stored.entry.dtype].itemsize
        for first in range(0, match.tensor.num_elements, step):
            yield match, first, min(first + step, match.tensor.num_elements)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements; a tensor may start at any byte of a file."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
