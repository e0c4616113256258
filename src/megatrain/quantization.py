"""Quantized model folders: which of them can be trained, by the `quantization_config` they carry.

    fp8      weights in E4M3 with a scale per block, per row or per matrix: DeepSeek, Qwen3-FP8
    mxfp4    experts in 4 bits with an exponent per 32 values: gpt-oss

Both are dequantized while they are loaded (disk/hf/dequantize.py), to the weights that transformers
would give. Every other method is refused by its name, with what to do.

Laws (tests/test_quantization.py)
    Whatever the value, the result is a method that can be read or a ModelConfigError that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatrain.errors import ModelConfigError

QUANTIZATION_KEY = "quantization_config"
READABLE = ("fp8", "mxfp4")
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

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale of fp8, where the folder says so."""


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
    shown = str(method)[:40] if method else "a method that is not named"
    raise ModelConfigError(
        f"config.json: key {QUANTIZATION_KEY} is refused: the weights are quantized by {shown!r}; "
        f"fp8 and mxfp4 can be read. {_WAYS_OUT.get(shown, _ORIGINAL)}."
    )


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
