"""Known decoders: their tensors, and their published size.

The catalog is known_models.jsonl, so that `estimate` can plan a model that is not on this machine,
without a network and without torch. docs/known_models.py writes it. Names are those of the Hub. A
name is found in any case, without its organization, and with the ending of a variant that has the
same dimensions (`-Instruct`, `-Base`, `-it`, ...).

Laws (tests/planning/catalog/test_known_models.py)
    1. A shape is that of the model's skeleton.
    2. Its params are within 1 % of the published number.
    3. A name that is not known is refused with the names that come near.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError
from megatrain.planning.model.shapes import AttentionShape, BlockShape, ModelShape, TensorShape
from megatrain.quantization import READABLE, Quantization

_VARIANT = re.compile(r"-(instruct|base|chat|it|pt|hf|thinking|preview|\d{4})$")


_QUANTIZED = {
    "FP8": Quantization(method="fp8", block=(128, 128)),
    "MXFP4": Quantization(method="mxfp4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One line of the catalog."""

    name: str
    published_params: float
    """The number that its makers or the Hub give."""
    shape: ModelShape


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return every known model, in the order of the catalog."""
    lines = Path(__file__).with_name("known_models.jsonl").read_text().splitlines()
    return tuple(_model(json.loads(line)) for line in lines)


def _model(fields: dict[str, Any]) -> KnownModel:
    published, form = fields.pop("published_params"), fields.pop("form")
    shape = fields | {
        "weights": weights_note(form) if form else "",
        "published": _QUANTIZED.get(form),
        "layer_kinds": tuple(map(int, fields["layer_kinds"])),
        "embedding": _block(fields["embedding"]),
        "structures": tuple(map(_block, fields["structures"])),
        "head": _block(fields["head"]),
    }
    return KnownModel(name=fields["name"], published_params=published, shape=ModelShape(**shape))


def _block(fields: dict[str, Any]) -> BlockShape:
    tensors = tuple(
        TensorShape(name=name, role=role, shape=tuple(shape))
        for name, role, *shape in fields.pop("tensors")
    )
    attention = fields.pop("attention", None)
    return BlockShape(
        tensors=tensors, attention=attention and AttentionShape(**attention), **fields
    )


def find_known_model(name: str) -> KnownModel:
    """Return the model that is meant. Raises ConfigError with the names that come near."""
    for key in (_whole, _short, _stem):
        for model in known_models():
            if key(model.name) == key(name):
                return model
    rows = [model.name for model in known_models()]
    raise ConfigError(
        f"{name[:200]} is not a folder, a file or a known model.{_nearest(name, rows)}"
    )


def _nearest(name: str, rows: list[str]) -> str:
    short = {_short(row): row for row in rows}
    near = difflib.get_close_matches(_short(name)[:100], short, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(short[each] for each in near)}?"
    known = f"`megatrain estimate --list` lists the {len(rows)} known models"
    return f" {known}; or give the path of a config.json"


def _whole(name: str) -> str:
    return name.lower()


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]


def _stem(name: str) -> str:
    """Return the name without the endings of variants: meta-llama-3-8b for ...-8B-Instruct."""
    stem = _short(name).removeprefix("meta-")
    while (shorter := _VARIANT.sub("", stem)) != stem:
        stem = shorter
    return stem


def weights_note(form: str) -> str:
    """Return what to know of weights of this form."""
    if form == "vision":
        return "include a vision part, which is carried as it is and not counted here"
    if form.lower() in READABLE:
        return f"are stored in {form}; loading dequantizes them to bf16"
    return f"are stored in {form}, which cannot be loaded; start from unquantized ones"
