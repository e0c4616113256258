"""Which quantized folders can be read: every other method is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.errors import ModelConfigError
from megatrain.models.config_json import parse_config, without_quantization
from megatrain.quantization import READABLE, Quantization, read_quantization
from testkit.families import tiny_config


def test_what_folders_on_the_hub_say() -> None:
    deepseek = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    assert read_quantization(deepseek) == Quantization(method="fp8", block=(128, 128))
    gpt_oss = {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}
    assert read_quantization(gpt_oss) == Quantization(method="mxfp4")
    assert read_quantization(None) is None
    assert READABLE == ("fp8", "mxfp4")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"quant_method": "awq"}, "quantized by 'awq'; fp8 and mxfp4 can be read. Start from the"),
        ({"quant_method": "bitsandbytes"}, r"call model\.dequantize\(\)"),
        ({"quant_method": "compressed-tensors"}, "run_compressed=False"),
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
