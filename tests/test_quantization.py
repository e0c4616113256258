"""Which quantized folders can be read: every other method is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.errors import ModelConfigError
from megatrain.models.config_json import parse_config, without_quantization
from megatrain.quantization import READABLE, Quantization, read_quantization
from testkit.families import tiny_config


def _kimi(**changes: Any) -> dict[str, Any]:
    """Return what Kimi-K2-Thinking has, with changes to its scheme."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    scheme = {"targets": ["Linear"], "weights": weights | {"group_size": 32} | changes}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
    }  # fmt: skip


KIMI = _kimi()


def test_what_folders_on_the_hub_say() -> None:
    deepseek = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    assert read_quantization(deepseek) == Quantization(method="fp8", block=(128, 128))
    gpt_oss = {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}
    assert read_quantization(gpt_oss) == Quantization(method="mxfp4")
    assert read_quantization(KIMI) == Quantization(method="int4", block=(1, 32))
    assert read_quantization(None) is None
    assert READABLE == ("fp8", "mxfp4", "int4")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"quant_method": "awq"}, "quantized by 'awq'; fp8, mxfp4 and packed int4 can be read"),
        ({"quant_method": "bitsandbytes"}, r"call model\.dequantize\(\)"),
        ({"quant_method": "compressed-tensors"}, "run_compressed=False"),
        (KIMI | {"format": "int-quantized"}, "run_compressed=False"),
        (_kimi(num_bits=8), "run_compressed=False"),
        (_kimi(symmetric=False), "run_compressed=False"),
        (_kimi(actorder="group"), "run_compressed=False"),
        (_kimi(group_size=0), "run_compressed=False"),
        ({}, "a method that is not named"),
        ("fp8", "is not an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "it must be two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "it must be two numbers"),
    ],
)
def test_others_are_refused_with_what_to_do(value: Any, reason: str) -> None:
    with pytest.raises(ModelConfigError, match=reason):
        read_quantization(value)


def test_transformers_and_exports_see_nothing_of_it() -> None:
    fields = json.loads(tiny_config("llama").to_json_string())
    quantized = json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}).encode()
    assert not hasattr(parse_config(quantized), "quantization_config")
    plain, quantization = without_quantization(quantized)
    assert json.loads(plain) == fields
    assert quantization == Quantization(method="mxfp4")
    assert without_quantization(plain) == (plain, None)
