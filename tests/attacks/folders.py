"""Model folders made byte by byte: a benign tiny Llama, and the means to spoil it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attacks.sandbox import LOADED, MARKER

Make = Callable[[Path], Any]
"""Makes a folder hostile. The folder exists; its parent is scratch outside of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A hostile folder and how it must end."""

    name: str
    make: Make
    end: str
    """The class of the error, or LOADED where the attack must come to nothing."""
    says: str = ""
    """A pattern that its message has."""


_LAYER = {
    "input_layernorm.weight": [16],
    "post_attention_layernorm.weight": [16],
    "self_attn.q_proj.weight": [16, 16],
    "self_attn.k_proj.weight": [8, 16],
    "self_attn.v_proj.weight": [8, 16],
    "self_attn.o_proj.weight": [16, 16],
    "mlp.gate_proj.weight": [24, 16],
    "mlp.up_proj.weight": [24, 16],
    "mlp.down_proj.weight": [16, 24],
}
SHAPES: dict[str, list[int]] = {
    "model.embed_tokens.weight": [32, 16],
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in _LAYER.items()},
    "model.norm.weight": [16],
    "lm_head.weight": [32, 16],
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}


def config(**changes: Any) -> dict[str, Any]:
    """Return the config of a tiny Llama, changed."""
    return {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "bfloat16",
    } | changes  # fmt: skip


def entries(shapes: dict[str, list[int]] = SHAPES, dtype: str = "BF16") -> dict[str, Any]:
    """Return the header of a file that holds tensors of these shapes, one after the other."""
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return header


def data_of(header: dict[str, Any]) -> bytes:
    """Return as many bytes as a header needs, each tensor filled with a number of its own."""
    parts = []
    for number, entry in enumerate(v for k, v in header.items() if k != "__metadata__"):
        begin, end = entry["data_offsets"]
        parts.append(bytes([number % 60]) * (end - begin))
    return b"".join(parts)


def pack(header: Any, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file; `header` may be bytes, and `length` a lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_config(folder: Path, data: Any) -> None:
    (folder / "config.json").write_bytes(
        data if isinstance(data, bytes) else json.dumps(data).encode()
    )


def write_weights(folder: Path, data: bytes | None = None, name: str = "model.safetensors") -> None:
    if data is None:
        data = pack(entries(), data_of(entries()))
    (folder / name).write_bytes(data)


def write_benign(folder: Path) -> None:
    write_config(folder, config())
    write_weights(folder)


def write_shards(folder: Path, **changes: Any) -> None:
    """Write a benign model of two shards, its `weight_map` changed."""
    names = list(SHAPES)
    halves = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, part in halves.items():
        header = entries({name: SHAPES[name] for name in part})
        write_weights(folder, pack(header, data_of(header)), shard)
    write_config(folder, config())
    weight_map = {name: shard for shard, part in halves.items() for name in part}
    write_index(folder, {"metadata": {}, "weight_map": weight_map | changes})


def write_index(folder: Path, data: Any) -> None:
    (folder / "model.safetensors.index.json").write_bytes(
        data if isinstance(data, bytes) else json.dumps(data).encode()
    )


def payload(folder: Path) -> str:
    """Return Python that would leave a file beside the folder, were it ever run."""
    return f"{MARKER} = open({str(folder.parent / MARKER)!r}, 'w').close()\n"


def config_cases(end: str, table: dict[str, Any]) -> list[Case]:
    """Return cases that differ from the benign folder in `config.json` alone.

    A value is the bytes of the file or a dictionary of changes, and maybe what the error says.
    """

    def case(name: str, value: Any) -> Case:
        value, says = value if isinstance(value, tuple) else (value, "")

        def make(folder: Path) -> None:
            write_weights(folder)
            write_config(folder, value if isinstance(value, bytes) else config(**value))

        return Case(name=f"config: {name}", make=make, end=end, says=says)

    return [case(name, value) for name, value in table.items()]


def cases(group: str, end: str, table: dict[str, Any]) -> list[Case]:
    """Return cases that are made by functions, and maybe what the error says."""
    pairs = {n: value if isinstance(value, tuple) else (value, "") for n, value in table.items()}
    return [
        Case(name=f"{group}: {name}", make=make, end=end, says=says)
        for name, (make, says) in pairs.items()
    ]


BENIGN = [
    *cases("control", LOADED, {"one file": write_benign, "two shards": write_shards}),
    *config_cases(LOADED, {"control": {}}),
]
