"""Quantized model folders: which of them can be trained, by the `quantization_config` they carry.

    fp8      weights in E4M3 with a scale per block, per row or per matrix: DeepSeek, Qwen3-FP8
    mxfp4    experts in 4 bits with an exponent per 32 values: gpt-oss
    int4     weights in 4 bits with a scale per group of a row, symmetric, as compressed-tensors
             packs them: Kimi-K2-Thinking

They are dequantized while they are loaded (disk/hf/dequantize.py), to the weights that transformers
would give, or stay as they are under adapters (disk/hf/narrowed.py). Every other method is refused
by its name, with what to do.

Laws (tests/test_quantization.py)
    Whatever the value, the result is a method that can be read or a ModelConfigError that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatrain.errors import ModelConfigError

QUANTIZATION_KEY = "quantization_config"
READABLE = ("fp8", "mxfp4", "int4")
"""Methods."""
MAX_BLOCK = 1 << 20
_ORIGINAL = "Start from the unquantized folder that it was made from"
_WAYS_OUT = {
    "bitsandbytes": "Load it with transformers, call model.dequantize() and save_pretrained it",
    "compressed-tensors": "Load it with transformers and CompressedTensorsConfig("
    "run_compressed=False), and save_pretrained it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the weights of a folder are quantized."""

    method: Literal["fp8", "mxfp4", "int4"]
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, where the folder says so: fp8 and int4."""


def read_quantization(value: Any) -> Quantization | None:
    """Return what a `quantization_config` says; None if it is empty. Raises ModelConfigError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ModelConfigError(f"config.json: {QUANTIZATION_KEY} is not an object")
    method = value.get("quant_method")
    if method == "mxfp4":
        return Quantization(method="mxfp4")
    if method == "fp8":
        return Quantization(method="fp8", block=_block(value.get("weight_block_size")))
    if method == "compressed-tensors" and (group := _int4_group(value)) is not None:
        return Quantization(method="int4", block=(1, group))
    shown = str(method)[:40] if method else "a method that is not named"
    raise ModelConfigError(
        f"config.json: key {QUANTIZATION_KEY} is refused: the weights are quantized by {shown!r}; "
        f"fp8, mxfp4 and packed int4 can be read. {_WAYS_OUT.get(shown, _ORIGINAL)}."
    )


def _int4_group(value: dict[str, Any]) -> int | None:
    """Return the values of a row that share a scale, in the one form of the method that is read.

    That is symmetric int4, packed, one scheme for all of its targets.
    """
    groups = value.get("config_groups")
    if value.get("format") != "pack-quantized" or not isinstance(groups, dict) or len(groups) != 1:
        return None
    (scheme,) = groups.values()
    weights = scheme.get("weights") if isinstance(scheme, dict) else None
    if not isinstance(weights, dict) or scheme.get("format") not in (None, "pack-quantized"):
        return None
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = weights.get("group_size")
    fits = all(weights.get(key) == one for key, one in wanted.items()) and not weights.get(
        "actorder"
    )
    return group if fits and type(group) is int and 0 < group <= MAX_BLOCK else None


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and [type(size) for size in value] == [int, int]:
        rows, columns = value
        if 0 < rows <= MAX_BLOCK and 0 < columns <= MAX_BLOCK:
            return rows, columns
    raise ModelConfigError(
        f"config.json: {QUANTIZATION_KEY}.weight_block_size is {str(value)[:80]}; it must be two "
        f"numbers from 1 to {MAX_BLOCK}"
    )
