"""Loading a Hugging Face folder: every tensor is read directly into its place in the store.

    folder --> which tensors, checked against the model --> chunks --> workers: read, convert, place

Nothing is held twice: a worker owns one buffer of READ_BYTES, reads a run of a tensor into it past
the page cache, and writes it where it belongs. bf16 goes to `hi` as it is and leaves `lo` zero,
which costs no memory; fp32 and fp16 are split exactly into `hi` and `lo`. Where `lo` is on disk,
bf16 leaves the disk alone, and other pieces go there chunk by chunk.

Quantized tensors are dequantized by the workers (dequantize.py), and placed as what they are then.
Under adapters they may stay as they are, or others be rounded (narrowed.py).

Where ranks share the store, each reads what it owns, and buffers. Of quantized tensors it reads
whole rows, and of transposed ones whole matrices. A rank that owns rows of new
tokens reads the old rows of their table too, for the mean.

Laws (tests/disk/hf/test_load.py, tests/disk/hf/test_load_ranks.py)
    1. Loaded masters have exactly the values of the folder.
    2. Missing, surplus, misshapen and mistyped tensors are named, before a byte is read.
    3. Peak memory stays within the arenas and the workers' buffers.
    4. The stores of all ranks together have the bits of the store of one process.
"""

from __future__ import annotations

import math
import queue
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.disk.hf.dequantize import Piece, PlacedValues, Scaled, pair_scales, typed
from megatrain.disk.hf.folder import StoredTensor, read_folder
from megatrain.disk.hf.growth import Growth, tables
from megatrain.disk.hf.names import FolderTensor, NameMap
from megatrain.disk.hf.narrowed import (
    PlacedBytes,
    PublishedMatrix,
    RoundedMatrix,
    matrices_of,
    put_bytes,
)
from megatrain.disk.hf.safetensors_format import DTYPES
from megatrain.errors import WeightsMismatch, listing
from megatrain.memory import optional
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import DISK_PAGE, DirectReader, copy_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Layout, overlap
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder, Param
from megatrain.progress import Advance, byte_progress
from megatrain.quantization import Quantization

if TYPE_CHECKING:
    from megatrain.memory.tier.filling import TierFilling

READ_BYTES = 16 << 20
NUM_LOAD_WORKERS = 4
# Matching a name takes 50 us: no model has more tables and masks in its folder than this.
_MOST_PER_TENSOR, _MOST_SURPLUS = 4, 4096
_MTP = re.compile(r"(^|\.)mtp[._]")
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_OF_TOKENS = ("lm_head.", "embed_out.", "output.")
"""Begins of the names of heads that score tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A tensor of the folder and its place in the model."""

    stored: StoredTensor
    tensor: FolderTensor
    scaled: Scaled | None = None
    """Its values and scales, if it is quantized."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the param, and so of the weights that were quantized."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.entry.shape if self.scaled is None else self.scaled.shape

    @property
    def paths(self) -> set[Path]:
        """The files that have it."""
        return {self.stored.path} | ({self.scaled.scales.path} if self.scaled else set())


def load_weights(
    folder: Path,
    decoder: Decoder,
    store: Store,
    growth: Growth | None = None,
    quantization: Quantization | None = None,
    matched: tuple[list[Match], list[Match]] | None = None,
) -> None:
    """Fill `hi` and `lo` of `store`, and the decoder's persistent buffers, from `folder`.

    With `growth` the folder's tables may lack the rows of new tokens, which are then made.
    `matched` is what `match_tensors` returned, if it was asked before.
    Raises ModelFolderError, WeightsFormatError, WeightsMismatch or DiskError.
    """
    matches, aliases = matched or match_tensors(folder, decoder, growth, quantization)
    read_into(decoder, store, matches, aliases, title=f"loading {folder.name}")
    if growth is not None:
        stored = {m.tensor.param: m for m in matches if m.tensor.param in tables(decoder)}
        growth.fill(decoder, store, lambda name: TableRows(stored[name]))


def read_into(
    decoder: Decoder, store: Store, matches: list[Match], aliases: list[Match], *, title: str
) -> None:
    """Read tensors to their places, and compare second copies. Raises WeightsMismatch, DiskError.

    Shapes and dtypes have been checked.
    """
    forms = {param.name: param for param in decoder.params if param.form}
    first, second = (list(_chunks(each, store.layout, forms)) for each in (matches, aliases))
    total_bytes = sum(chunk.num_bytes for _, chunk in (*first, *second))
    with ExitStack() as stack:
        advance = stack.enter_context(
            byte_progress(title, total_bytes, shown=store.layout.owner.leads)
        )
        paths = {path for match in (*matches, *aliases) for path in match.paths}
        readers = {path: stack.enter_context(DirectReader(path)) for path in sorted(paths)}
        filling = None
        if store.tier is not None:
            filling = stack.enter_context(optional.filling.TierFilling(store.layout, store.tier))
        places = _Places(decoder, store, filling)
        _run(first, readers, places.put, advance)
        _run(second, readers, places.compare, advance)


def match_tensors(
    folder: Path,
    decoder: Decoder,
    growth: Growth | None = None,
    quantization: Quantization | None = None,
    *,
    new_head: bool = False,
) -> tuple[list[Match], list[Match]]:
    """Return the folder's tensors with their places, and the second copies of tied params."""
    names = NameMap(decoder)
    matches: list[Match] = []
    aliases: list[Match] = []
    surplus: list[str] = []
    carried: list[StoredTensor] = []
    tensors, scaled = read_folder(folder), dict[str, Scaled]()
    if quantization is not None:
        tensors, scaled = pair_scales(tensors, quantization)
    dtypes = {param.name: param.dtype for param in decoder.params}

    def match_of(name: str, tensor: FolderTensor) -> Match:
        dtype = dtypes.get(tensor.param, torch.bfloat16)
        return Match(stored=tensors[name], tensor=tensor, scaled=scaled.get(name), dtype=dtype)

    known = len(names.tensors) + len(decoder.carried)
    if len(tensors) > _MOST_PER_TENSOR * known + _MOST_SURPLUS:
        raise WeightsMismatch(
            f"the weights are {len(tensors)} tensors; the {decoder.config.model_type} in "
            f"config.json has {known}"
        )
    for name in tensors:
        if tensor := names.find(name):
            matches.append(match_of(name, tensor))
        elif tensor := names.find_alias(name):
            aliases.append(match_of(name, replace(tensor, name=name)))
        elif names.is_carried(name) and name in scaled:
            raise WeightsMismatch(
                f"{name} is quantized and beside the text, so it would be carried without its "
                "scales. Start from the unquantized folder."
            )
        elif names.is_carried(name):
            carried.append(tensors[name])
        elif not is_ignorable(decoder, name) and not (new_head and name.startswith(_OF_TOKENS)):
            surplus.append(name)
    _refuse_mismatch(decoder, names, matches, aliases, surplus, growth, new_head=new_head)
    _refuse_carried(decoder, names, carried)
    if growth is not None:
        matches = [_narrowed(match, decoder, growth) for match in matches]
        aliases = [_narrowed(match, decoder, growth) for match in aliases]
    return matches, aliases


def _narrowed(match: Match, decoder: Decoder, growth: Growth) -> Match:
    rows = match.shape[0] if match.shape else 0
    return replace(match, tensor=growth.narrowed(decoder, match.tensor, rows))


def _refuse_mismatch(
    decoder: Decoder,
    names: NameMap,
    matches: list[Match],
    aliases: list[Match],
    surplus: list[str],
    growth: Growth | None,
    *,
    new_head: bool,
) -> None:
    """Raise WeightsMismatch unless the matches are exactly the model, each element once."""
    faults: list[str] = []
    if surplus:
        faults.append(f"{len(surplus)} tensors are not in the model: {listing(surplus)}")
    missing, twice = names.faults(match.tensor for match in matches)
    if new_head:
        missing = [name for name in missing if not name.startswith(f"{decoder.head_path}.")]
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {listing(missing)}")
    if twice:
        faults.append(f"{len(twice)} params are given twice: {listing(twice)}")
    buffers = decoder.persistent_buffers()
    for match in (*matches, *aliases):
        entry = match.stored.entry
        tensor = match.tensor if growth is None else _narrowed(match, decoder, growth).tensor
        if match.shape != tensor.shape:
            faults.append(f"{entry.name} has shape {match.shape}; the model has {tensor.shape}")
        elif match.scaled is not None and tensor.param not in buffers:
            continue
        elif tensor.param not in buffers and DTYPES.get(entry.dtype) not in WEIGHT_DTYPES:
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


def _refuse_carried(decoder: Decoder, names: NameMap, carried: list[StoredTensor]) -> None:
    """Raise WeightsMismatch unless all that is carried is there, in a form that can be written."""
    unknown = [one.entry.name for one in carried if one.entry.dtype not in DTYPES]
    if unknown:
        raise WeightsMismatch(f"the dtypes of these tensors are not supported: {listing(unknown)}")
    if missing := names.missing_carried(decoder, (one.entry.name for one in carried)):
        raise WeightsMismatch(
            f"the weights do not match the {decoder.config.model_type} in config.json: "
            f"{len(missing)} tensors beside the text decoder are missing: {listing(missing)}"
        )


def is_ignorable(decoder: Decoder, name: str) -> bool:
    """Return whether a surplus tensor is known to be harmless: old tables, masks, spare heads."""
    patterns = {*_left_out(decoder), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in patterns) or is_spare_head(decoder, name)


def is_spare_head(decoder: Decoder, name: str) -> bool:
    """Return whether a tensor is of a head that predicts more than the next token (MTP).

    Transformers leaves these out. They are named so, or are layers behind the last one.
    """
    layer = re.match(rf"{re.escape(decoder.layers_path)}\.(\d+)\.", name)
    if layer is None:
        return any(re.search(one, name) for one in _left_out(decoder)) and bool(_MTP.search(name))
    number = int(layer[1]) - len(decoder.layers)
    named = any(re.match(pattern, name) for pattern in _left_out(decoder))
    return number >= 0 and (named or number < _num_spare_layers(decoder))


def has_spare_heads(decoder: Decoder) -> bool:
    """Return whether folders of the family may have such heads."""
    return bool(_left_out(decoder)) or _num_spare_layers(decoder) > 0


def _num_spare_layers(decoder: Decoder) -> int:
    """Return how many layers behind the last one config.json announces."""
    found = getattr(decoder.text_config, "num_nextn_predict_layers", 0)
    return found if isinstance(found, int) else 0


def _left_out(decoder: Decoder) -> list[str]:
    """Return transformers' patterns for tensors that folders of the family have too much."""
    return list(decoder.model._keys_to_ignore_on_load_unexpected or ())


class _Places:
    """Takes runs of a folder's tensors and puts them where they belong."""

    def __init__(self, decoder: Decoder, store: Store, filling: TierFilling | None) -> None:
        self._store, self._filling = store, filling
        self._buffers = decoder.persistent_buffers()

    def put(self, tensor: FolderTensor, run: PlacedValues | PlacedBytes) -> None:
        """Place a run of elements of `tensor`, or of bytes of its param."""
        if isinstance(run, PlacedBytes):
            put_bytes(self._store, tensor.param, run)
            return
        begin, values = tensor.start + run.first, run.values
        if tensor.param in self._buffers:
            self._buffers[tensor.param].view(-1)[begin : begin + len(values)] = values
            return
        begin -= self._store.layout.places[tensor.param].owned.start
        if run.stride:  # bf16, so `lo` has nothing
            hi = self._store.param(tensor.param, TensorKind.HI).view(-1)[begin:]
            hi.as_strided(values.shape, (run.stride, 1)).copy_(values)
            return
        span = slice(begin, begin + len(values))
        hi = self._store.param(tensor.param, TensorKind.HI).view(-1)[span]
        if values.dtype is hi.dtype:
            copy_bytes(hi.view(torch.uint8), values.view(torch.uint8))
        elif not self._store.layout.places[tensor.param].has(TensorKind.LO):
            hi.copy_(values)
        elif self._filling is not None and TensorKind.LO in self._store.on_disk:
            lo = torch.empty(len(values), dtype=torch.int16)
            split_into(values.float(), hi, lo)
            self._filling.put(tensor.param, TensorKind.LO, 2 * begin, lo.view(torch.uint8))
        else:
            lo = self._store.param(tensor.param, TensorKind.LO).view(-1)[span]
            split_into(values.float(), hi, lo)

    def compare(self, tensor: FolderTensor, run: PlacedValues | PlacedBytes) -> None:
        """Check that a second copy of a tied param holds the values of the first."""
        assert isinstance(run, PlacedValues), "nothing that is tied is narrow"
        begin, values = tensor.start + run.first, run.values
        begin -= self._store.layout.places[tensor.param].owned.start
        span = slice(begin, begin + len(values))
        weight = self._store.param(tensor.param, TensorKind.HI).view(-1)[span]
        if not torch.equal(values.to(weight.dtype), weight):
            raise WeightsMismatch(
                f"{tensor.name} differs from {tensor.param}, but config.json ties them. "
                "Set tie_word_embeddings to false in config.json to keep both."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A run of elements of a folder's tensor."""

    match: Match
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        return (self.last - self.first) * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.match.stored.entry.dtype]

    def runs(self, readers: Mapping[Path, DirectReader], buffer: Tensor) -> Iterator[PlacedValues]:
        """Yield its elements, which are valid until the next use of `buffer`."""
        start = self.match.stored.entry.start + self.first * self.dtype.itemsize
        data = readers[self.match.stored.path].read(start, start + self.num_bytes, buffer)
        yield PlacedValues(first=self.first, values=typed(data, self.dtype))


class TableRows:
    """The rows of a table in a folder, as far as it has them."""

    def __init__(self, match: Match) -> None:
        self._match = match
        self._shape = match.tensor.shape

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, rows: slice) -> Tensor:
        """Return rows in fp32. Raises DiskError."""
        width = math.prod(self._shape[1:])
        first, last = rows.start * width, rows.stop * width
        found = torch.empty(last - first)
        with ExitStack() as stack:
            paths = self._match.paths
            readers = {path: stack.enter_context(DirectReader(path)) for path in paths}
            buffer = aligned_buffer(READ_BYTES + 2 * DISK_PAGE)
            for chunk in _cut(self._match, range(first, last)):
                for run in chunk.runs(readers, buffer):
                    begin = run.first - first
                    found[begin : begin + len(run.values)] = run.values
        return found.view(rows.stop - rows.start, *self._shape[1:])


def _run(
    chunks: list[tuple[FolderTensor, _Work]],
    readers: dict[Path, DirectReader],
    place: Callable[[FolderTensor, PlacedValues | PlacedBytes], None],
    advance: Advance,
) -> None:
    """Read `chunks`, in file order, on all workers."""
    buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(NUM_LOAD_WORKERS):
        buffers.put(aligned_buffer(READ_BYTES + 2 * DISK_PAGE))

    def work(tensor: FolderTensor, chunk: _Work) -> None:
        buffer = buffers.get()
        try:
            for run in chunk.runs(readers, buffer):
                place(tensor, run)
        finally:
            buffers.put(buffer)
        advance(chunk.num_bytes)

    with ThreadPoolExecutor(NUM_LOAD_WORKERS, thread_name_prefix="load") as pool:
        futures = [pool.submit(work, tensor, chunk) for tensor, chunk in chunks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_Work = _Chunk | Piece | PublishedMatrix | RoundedMatrix
"""A part of a folder that a worker reads and places."""


def _chunks(
    matches: list[Match], layout: Layout, forms: Mapping[str, Param]
) -> Iterator[tuple[FolderTensor, _Work]]:
    """Yield what is here of the tensors, and buffers, in the order of the files' bytes."""
    for match in sorted(matches, key=lambda m: (m.stored.path, m.stored.entry.start)):
        tensor, place = match.tensor, layout.places.get(match.tensor.param)
        if tensor.param in forms:
            assert place is not None
            narrow = _narrow_chunks(match, forms[tensor.param], place.owned)
            yield from ((tensor, chunk) for chunk in narrow)
            continue
        here = range(tensor.start, tensor.start + tensor.num_elements)
        if place is not None:
            here = overlap(here, place.owned)
        elements = range(here.start - tensor.start, here.stop - tensor.start)
        yield from ((tensor, chunk) for chunk in _cut(match, elements))


def _narrow_chunks(
    match: Match, param: Param, owned: range
) -> Iterator[PublishedMatrix | RoundedMatrix]:
    """Yield the matrices of a tensor whose param is narrow, as far as their bytes are here."""
    for number, (first, spot) in enumerate(matrices_of(param, match.tensor)):
        arrays = [spot.array_bytes(name) for name in spot.matrices.arrays]
        if not any(overlap(owned, array) for array in arrays):
            continue
        if match.scaled is not None and match.scaled.method == spot.matrices.method:
            yield PublishedMatrix(tensor=match.scaled, matrix=number, spot=spot, owned=owned)
            continue
        elements = range(first, first + spot.matrices.matrix_elements)
        yield RoundedMatrix(
            values=partial(_elements, match, elements),
            dtype=match.dtype,
            spot=spot,
            num_bytes=sum(chunk.num_bytes for chunk in _cut(match, elements)),
        )


def _elements(
    match: Match, elements: range, readers: Mapping[Path, DirectReader], buffer: Tensor
) -> Iterator[PlacedValues]:
    """Yield elements of a tensor, in order."""
    for chunk in _cut(match, elements):
        yield from chunk.runs(readers, buffer)


def _cut(match: Match, elements: range) -> Iterator[_Chunk | Piece]:
    """Yield runs of at most READ_BYTES of a tensor's elements."""
    if match.scaled is not None:
        yield from match.scaled.pieces(elements, match.dtype)
        return
    step = READ_BYTES // DTYPES[match.stored.entry.dtype].itemsize
    for first in range(elements.start, elements.stop, step):
        yield _Chunk(match=match, first=first, last=min(first + step, elements.stop))
