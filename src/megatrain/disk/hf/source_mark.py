"""A model folder in a few characters: enough to recognize another folder with the same model.

Reading all weights would take minutes. The mark is of the config, of each weights file's header,
which names every tensor with its shape and place, and of some bytes at the start, the middle and
the end of its data: a base model and one that was trained from it differ there.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from megatrain.models.config_json import CONFIG_NAME

_SAMPLE_BYTES = 1 << 16
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys that may differ in a copy of the same model."""


def source_mark(folder: Path) -> str | None:
    """Return the mark of a model folder; None if it cannot be read."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_bytes())
        kept = {key: value for key, value in config.items() if key not in _VOLATILE}
        mark = xxhash.xxh3_128(json.dumps(kept, sort_keys=True).encode())
        for path in sorted(folder.glob("*.safetensors")):
            for piece in _pieces(path):
                mark.update(piece)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return mark.hexdigest()


def _pieces(path: Path) -> list[bytes]:
    """Return the header of a weights file, as far as it is sane, and samples of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(8)
        start = 8 + min(int.from_bytes(header, "little"), size)
        pieces = [header, file.read(min(start - 8, 1 << 24))]
        for place in (start, (start + size) // 2, size - _SAMPLE_BYTES):
            file.seek(max(0, min(place, size)))
            pieces.append(file.read(_SAMPLE_BYTES))
    return pieces
