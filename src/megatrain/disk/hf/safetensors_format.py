"""The safetensors header: a strict reader and a writer.

    8 bytes: length of the header, little endian | header: JSON, padded with spaces | data

The header gives for each tensor its dtype, shape and [begin, end) in the data. Tensors cover the
data without holes or overlaps. Any other header is refused, and nothing in it is
believed before it was compared with the size of the file.

Laws (tests/disk/hf/test_safetensors_format.py)
    1. Whatever the bytes, the result is a header or a WeightsFormatError.
    2. What we write, the safetensors library reads.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.errors import DiskError, WeightsFormatError
from megatrain.model_files import is_lfs_pointer, lfs_pointer_text

MAX_HEADER_BYTES = 16 << 20
"""The header of 100,000 tensors. A hostile one takes 30 times its bytes, and 4 s, to parse."""
_LEAST_BYTES = 10
"""A length of 8 bytes, and a header without tensors."""
MAX_NAME = 512
"""Transformers searches names with patterns whose time grows with the square of their length."""
MAX_DIMENSIONS = 16
DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Valid in the format and not among what we hold: known here only to check sizes.
_OTHER_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "U32": 32, "U64": 64, "C64": 64,
}  # fmt: skip
_BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()} | _OTHER_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The dtype as the format spells it."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    stop: int


def read_entries(path: Path) -> list[TensorEntry]:
    """Return the tensors of a safetensors file, in the order of their bytes."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            limit = min(MAX_HEADER_BYTES, max(num_bytes - 8, 0))
            if is_lfs_pointer(path):
                raise WeightsFormatError(lfs_pointer_text(path))
            if num_bytes < _LEAST_BYTES:
                raise WeightsFormatError(
                    f"{path} has {num_bytes} bytes, too few for any tensor: it was not written or "
                    "not downloaded to its end. Fetch it again."
                )
            if not 2 <= length <= limit:
                raise WeightsFormatError(
                    f"{path.name}: header of {length} bytes; it must have 2 to {limit}"
                )
            header = file.read(length)
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}") from error
    return parse_header(header, num_bytes - 8 - length, path.name)


def parse_header(header: bytes, data_bytes: int, where: str) -> list[TensorEntry]:
    """Return the tensors that `header` describes in a file with `data_bytes` of data."""
    try:
        fields = json.loads(header.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise WeightsFormatError(
            f"{where}: header is not valid JSON: {str(error)[:200]}"
        ) from error
    if not isinstance(fields, dict):
        raise WeightsFormatError(f"{where}: header is a {type(fields).__name__}, not an object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WeightsFormatError(f"{where}: __metadata__ must contain only text")
    offset = 8 + len(header)
    entries = [_entry(name, value, offset, where) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = offset
    for entry in entries:
        if entry.start != position:
            raise WeightsFormatError(
                f"{where}: tensor {entry.name[:200]!r} starts at byte {entry.start}, but the data "
                f"before it ends at {position}: tensors overlap or leave a gap"
            )
        position = entry.stop
    if position != offset + data_bytes:
        raise WeightsFormatError(
            f"{where}: tensors end at byte {position}, the file at {offset + data_bytes}: "
            "the file was truncated or extended"
        )
    return entries


def _entry(name: str, value: Any, offset: int, where: str) -> TensorEntry:
    """Return one checked tensor of a header."""

    def refuse(reason: str) -> WeightsFormatError:
        return WeightsFormatError(f"{where}: tensor {name[:200]!r}: {reason}")

    if len(name) > MAX_NAME:
        raise refuse(f"its name has {len(name)} characters, more than {MAX_NAME}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refuse("it must have dtype, shape and data_offsets only")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refuse(f"unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise refuse(f"shape {str(shape)[:80]} is not a short list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise refuse(f"data_offsets {str(offsets)[:80]} are not two positions")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise refuse(f"{end - begin} bytes do not match {dtype} of shape {str(shape)[:80]}")
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), start=offset + begin, stop=offset + end
    )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 53 for item in value
    )


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dictionary; a ValueError if a name is given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is given twice")
    return result


def format_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, int]:
    """Return the bytes that precede the data of `tensors`, and the length of that data."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtype.itemsize
        fields[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, position
