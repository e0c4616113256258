"""Hostile adapters: folders in PEFT's form, over a benign base that lies inside of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.code_corpus import pickled, torch_saved
from tests.attacks.folders import (
    SHAPES,
    Case,
    Make,
    cases,
    config,
    data_of,
    entries,
    pack,
    payload,
    write_benign,
    write_config,
    write_weights,
)
from tests.attacks.sandbox import LOADED

CONFIG, FILE, BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
INDEX = f"{FILE}.index.json"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
RANK = 2


def _shapes() -> dict[str, list[int]]:
    """The adapters of every linear module of the benign model's layers."""
    found = {}
    for name, shape in SHAPES.items():
        if "proj" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{module}.lora_A.weight"] = [RANK, shape[1]]
            found[f"{module}.lora_B.weight"] = [shape[0], RANK]
    return found


def write_adapters(
    folder: Path, shapes: dict[str, list[int]] | None = None, **changes: Any
) -> None:
    """Write benign adapters, and a base inside of their folder; `changes` are of the config."""
    (folder / "base").mkdir()
    write_benign(folder / "base")
    header = entries(_shapes() if shapes is None else shapes, "F32")
    (folder / FILE).write_bytes(pack(header, data_of(header)))
    fields = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"],
        "base_model_name_or_path": str(folder / "base"),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(fields | changes))


def _config(**changes: Any) -> Make:
    return lambda folder: write_adapters(folder, **changes)


def _config_bytes(data: bytes) -> Make:
    def make(folder: Path) -> None:
        write_adapters(folder)
        (folder / CONFIG).write_bytes(data)

    return make


def _tensors(changes: dict[str, list[int] | None]) -> Make:
    wanted = _shapes() | {k: v for k, v in changes.items() if v is not None}
    return lambda folder: write_adapters(
        folder, {k: v for k, v in wanted.items() if k not in changes or changes[k] is not None}
    )


def _file(data: bytes | Callable[[Path], bytes], name: str = FILE) -> Make:
    """Benign adapters but for the bytes of their weights, maybe under another name."""

    def make(folder: Path) -> None:
        write_adapters(folder)
        (folder / FILE).unlink()
        (folder / name).write_bytes(data if isinstance(data, bytes) else data(folder))

    return make


def _in_place_of(name: str, create: Callable[[Path], Any]) -> Make:
    def make(folder: Path) -> None:
        write_adapters(folder)
        (folder / name).replace(folder.parent / name)  # it exists outside, and would load
        create(folder / name)

    return make


def _indexed(shard: Any) -> Make:
    def make(folder: Path) -> None:
        write_adapters(folder)
        (folder / FILE).replace(folder.parent / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(_shapes(), shard)}))

    return make


def _huge(folder: Path) -> None:
    """A sparse file whose header and size agree on tensors that no memory has."""
    write_adapters(folder, r=65536)
    header, position = {}, 0
    for name, shape in _shapes().items():
        shape = [65536, 1 << 20] if "lora_A" in name else [1 << 20, 65536]
        end = position + (1 << 38)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    packed = pack(header, b"")
    (folder / FILE).write_bytes(packed)
    os.truncate(folder / FILE, len(packed) + position)


def _own_base(folder: Path) -> None:
    write_adapters(folder, base_model_name_or_path=str(folder))
    write_config(folder, config())


def _code_beside(folder: Path) -> None:
    write_adapters(
        folder,
        auto_mapping={"base_model_class": "Evil", "parent_library": "evil"},
        runtime_config={"ephemeral_gpu_offload": True},
    )
    for name in ("evil.py", "adapter_model.py", "__init__.py", "peft.py"):
        (folder / name).write_text(payload(folder))
    (folder / BIN).write_bytes(pickled(folder))


def _tokenizer_outside(folder: Path) -> None:
    write_adapters(folder)
    (folder.parent / "private.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../private.json")


def _other_base(folder: Path) -> None:
    write_adapters(folder)
    write_weights(folder / "base", pickled(folder))


_MANY = {f"base_model.model.m{i}.lora_{x}.weight": [2, 2] for i in range(3_000) for x in "AB"}

ADAPTER_CASES: list[Case] = [
    *cases(
        "adapters",
        LOADED,
        {
            "control": write_adapters,
            "code and a pickle beside them": _code_beside,
            "patterns of modules that would never end": _config(target_modules="(a+)+$"),
        },
    ),
    *cases(
        "adapters",
        "ModelConfigError",
        {
            "IA3": (_config(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
            "prefix tuning": (_config(peft_type="PREFIX_TUNING"), "PREFIX_TUNING"),
            "no type": (_config(peft_type=None), "peft_type"),
            "PiSSA": (_config(init_lora_weights="pissa_niter_16"), "pissa"),
            "trained modules by a pattern": (_config(modules_to_save=["*"]), "names alone"),
            "params that would never end": (
                _config(target_parameters=["(a+)+$"]), "does not have names alone",
            ),
            "ranks that would never end": (
                _config(rank_pattern={"(a+)+$": 2}), "of regular expressions only names are read",
            ),
            "a covariance file": (_config(corda_config={"cache_file": "/etc/x"}), "CorDA"),
            "an unknown method": (_config(use_evil=True), "unknown keys: use_evil"),
            "a rank of nothing": (_config(r=0), "r is 0"),
            "a rank beyond any": (_config(r=1 << 40), "r is 1099511627776"),
            "an alpha that is none": (_config(lora_alpha=float("inf")), "lora_alpha"),
            "a base with a NUL": (_config(base_model_name_or_path="a\0b"), "no name has"),
            "a base without end": (_config(base_model_name_or_path="a" * 10**6), "must be a name"),
            "a base that is a list": (_config(base_model_name_or_path=["a"]), "must be a name"),
            "a deep config": (_config_bytes(b"[" * 10**6), "not valid JSON"),
            "a large config": (_config_bytes(b" " * (5 << 20)), "larger than 4 MiB"),
            "a pickle as config": (_config_bytes(b"\x80\x04."), "not valid JSON"),
            "a key twice": (_config_bytes(b'{"r": 1, "r": 2}'), "given twice"),
        },
    ),
    *cases(
        "adapters",
        "ModelFolderError",
        {
            "a pickle": (_file(pickled, BIN), "is a pickle, which could run code"),
            "what torch saves": (_file(torch_saved, BIN), "is a pickle, which could run code"),
            "no weights": (_file(b"", "notes.txt"), "neither"),
            "no base": (_config(base_model_name_or_path=None), "names no base"),
            "a base in the system": (_config(base_model_name_or_path="/etc"), "no config.json"),
            "a device as base": (_config(base_model_name_or_path="/dev/zero"), "is a file"),
            "a base above": (_config(base_model_name_or_path="../../gone/.."), "cannot be found"),
            "an address as base": (_config(base_model_name_or_path="file:///etc"), "be found"),
            "themselves as base": (_own_base, "neither"),
            "config that leads out": (
                _in_place_of(CONFIG, lambda p: p.symlink_to(f"../{CONFIG}")), "points outside",
            ),
            "weights that lead out": (
                _in_place_of(FILE, lambda p: p.symlink_to(f"../{FILE}")), "points outside",
            ),
            "a pipe as config": (_in_place_of(CONFIG, os.mkfifo), "not a regular file"),
            "a pipe as weights": (_in_place_of(FILE, os.mkfifo), "not a regular file"),
            "a tokenizer that leads out": (_tokenizer_outside, "points outside"),
        },
    ),
    *cases(
        "adapters",
        "WeightsFormatError",
        {
            "a disguised pickle": _file(pickled),
            "a disguised archive": _file(torch_saved),
            "a base of pickles": _other_base,
            "a shard above": (_indexed("../a.safetensors"), "not the plain name"),
            "a shard in the system": (_indexed("/etc/a.safetensors"), "not the plain name"),
            "a shard that is a pickle": (_indexed(BIN), "not the plain name"),
            "a header beyond the file": _file(pack({}, b"", 1 << 60)),
            "a lie about a size": (
                _file(pack({f"{Q_PROJ}.lora_A.weight": {
                    "dtype": "F32", "shape": [1 << 40, 1 << 12], "data_offsets": [0, 4],
                }}, b"1234")), "do not match",
            ),
        },
    ),
    *cases(
        "adapters",
        "WeightsMismatch",
        {
            "DoRA without magnitudes": (_config(use_dora=True), "are missing"),
            "trained modules that are not there": (
                _config(modules_to_save=["lm_head"]), "are missing",
            ),
            "another rank": (_config(r=3), "and r is 3"),
            "tensors that no memory has": _huge,
            "one half": (_tensors({f"{Q_PROJ}.lora_B.weight": None}), "lora_B is missing"),
            "a rank that differs": (_tensors({f"{Q_PROJ}.lora_A.weight": [9, 16]}), "and r is 2"),
            "a shape of none": (_tensors({f"{Q_PROJ}.lora_A.weight": []}), "and r is 2"),
            "no tensors": (_file(b"\x02\0\0\0\0\0\0\0{}"), "there is none"),
            "weights of the base": (_tensors({"model.norm.weight": [16]}), "not adapters"),
            "a pattern as name": (
                _tensors({"base_model.model.*.lora_A.weight": [2, 16]}), "not adapters",
            ),
            "a path as name": (
                _tensors({"base_model.model.../../x.lora_A.weight": [2, 16]}), "not adapters",
            ),
            "magnitudes": (_tensors({f"{Q_PROJ}.lora_magnitude_vector": [16]}), "not in the model"),
        },
    ),
    *cases(
        "adapters",
        "ConfigError",
        {
            "internals as modules": (
                _tensors({f"base_model.model.__class__.lora_{x}.weight": [2, 2] for x in "AB"}),
                "__class__ matches no linear module",
            ),
            "the output projection": (
                _tensors({
                    "base_model.model.lm_head.lora_A.weight": [2, 16],
                    "base_model.model.lm_head.lora_B.weight": [32, 2],
                }), "lm_head matches no linear module",
            ),
            "modules by the thousand": (_tensors(dict(_MANY)), "matches no linear module"),
        },
    ),
]  # fmt: skip
