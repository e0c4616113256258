"""Hostile quantized folders: scales that lie, weights that hide, settings that reach for code."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from tests.attacks.folders import (
    Q_PROJ,
    SHAPES,
    Case,
    Make,
    cases,
    config,
    pack,
    write_config,
    write_index,
    write_weights,
)
from tests.attacks.sandbox import LOADED

_BYTES = {"BF16": 2, "F32": 4, "F64": 8, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1}
SCALES = f"{Q_PROJ}_scale_inv"
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
ONE = struct.pack("<f", 1.0)
Tensor = tuple[str, list[int], bytes]
"""Its dtype, its shape, and the bytes of each element."""

WEIGHT: Tensor = ("F8_E4M3", [16, 16], b"\x38")
GRID: Tensor = ("F32", [2, 2], ONE)
PLAIN: dict[str, Tensor] = {name: ("BF16", shape, b"\x80\x3f") for name, shape in SHAPES.items()}
FP8_TENSORS = PLAIN | {Q_PROJ: WEIGHT, SCALES: GRID}

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 32, "vocab_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "bfloat16", "layer_types": ["full_attention"],
    "rope_scaling": None, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
_ROOT = "model.layers.0"
DOWN = f"{_ROOT}.mlp.experts.down_proj"
_OSS_SHAPES = {
    "model.embed_tokens.weight": [32, 32], "model.norm.weight": [32], "lm_head.weight": [32, 32],
    f"{_ROOT}.input_layernorm.weight": [32], f"{_ROOT}.post_attention_layernorm.weight": [32],
    **{f"{_ROOT}.self_attn.{n}_proj.weight": s for n, s in (
        ("q", [32, 32]), ("k", [16, 32]), ("v", [16, 32]), ("o", [32, 32]))},
    **{f"{_ROOT}.self_attn.{n}_proj.bias": [s] for n, s in (
        ("q", 32), ("k", 16), ("v", 16), ("o", 32))},
    f"{_ROOT}.self_attn.sinks": [2], f"{_ROOT}.mlp.router.weight": [2, 32],
    f"{_ROOT}.mlp.router.bias": [2], f"{_ROOT}.mlp.experts.gate_up_proj_bias": [2, 64],
    f"{_ROOT}.mlp.experts.down_proj_bias": [2, 32],
}  # fmt: skip
OSS_TENSORS: dict[str, Tensor] = {
    name: ("BF16", shape, b"\x80\x3f") for name, shape in _OSS_SHAPES.items()
} | {
    f"{_ROOT}.mlp.experts.gate_up_proj_blocks": ("U8", [2, 64, 1, 16], b"\x21"),
    f"{_ROOT}.mlp.experts.gate_up_proj_scales": ("U8", [2, 64, 1], b"\x7f"),
    f"{DOWN}_blocks": ("U8", [2, 32, 1, 16], b"\x21"),
    f"{DOWN}_scales": ("U8", [2, 32, 1], b"\x7f"),
}


def _packed(tensors: dict[str, Tensor]) -> bytes:
    header: dict[str, Any] = {}
    data = bytearray()
    for name, (dtype, shape, element) in tensors.items():
        start = len(data)
        num_bytes = math.prod(shape) * _BYTES[dtype]
        data += (element * (num_bytes // len(element) + 1))[:num_bytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(data)]}
    return pack(header, bytes(data))


def _fp8(how: Any = FP8, without: Any = "", **tensors: Any) -> Make:
    """A benign fp8 folder with other tensors, `weight` and `scales` by these names."""
    names = {"weight": Q_PROJ, "scales": SCALES}
    changed = FP8_TENSORS | {names.get(key, key): value for key, value in tensors.items()}
    changed.pop(without, None)

    def make(folder: Path) -> None:
        write_config(folder, config(quantization_config=how))
        write_weights(folder, _packed(changed))

    return make


def _mxfp4(without: str = "", **tensors: Tensor) -> Make:
    names = {"blocks": f"{DOWN}_blocks", "scales": f"{DOWN}_scales", "down": DOWN}
    changed = OSS_TENSORS | {names.get(key, key): value for key, value in tensors.items()}
    changed.pop(without, None)

    def make(folder: Path) -> None:
        write_config(folder, GPT_OSS)
        write_weights(folder, _packed(changed))

    return make


def _scales_outside(folder: Path) -> None:
    """The scales are in a file beside the folder."""
    write_config(folder, config(quantization_config=FP8))
    plain = {name: value for name, value in FP8_TENSORS.items() if name != SCALES}
    write_weights(folder, _packed(plain), "a.safetensors")
    write_weights(folder.parent, _packed({SCALES: GRID}), "b.safetensors")
    (folder / "b.safetensors").symlink_to(folder.parent / "b.safetensors")
    places = dict.fromkeys(plain, "a.safetensors") | {SCALES: "b.safetensors"}
    write_index(folder, {"metadata": {}, "weight_map": places})


def _overlapping(folder: Path) -> None:
    """Weights and their scales are the same bytes of the file."""
    write_config(folder, config(quantization_config=FP8))
    header = {
        Q_PROJ: {"dtype": "F8_E4M3", "shape": [16, 16], "data_offsets": [0, 256]},
        SCALES: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    }
    write_weights(folder, pack(header, b"\0" * 256))


FINE = cases(
    "quantized",
    LOADED,
    {
        "benign fp8": _fp8(),
        "benign mxfp4": _mxfp4(),
        "fp8 with one scale": _fp8(scales=("F32", [], ONE)),
        "fp8 without scales for plain weights": _fp8(without=SCALES, weight=PLAIN[Q_PROJ]),
        "settings that name code": _fp8(
            FP8 | {"modules_to_not_convert": ["os.system"], "fmt": "evil", "kernel": "evil/kernel"}
        ),
        "code inside": _fp8(FP8 | {"auto_map": {"a": "evil.A"}, "_target_": "os.system"}),
        "activation scales of any shape": _fp8(
            **{Q_PROJ.replace("weight", "activation_scale"): ("I64", [3], b"\0" * 8)}
        ),
    },
)
SETTINGS = cases(
    "quantized",
    "ModelConfigError",
    {
        "by awq": (_fp8({"quant_method": "awq", "bits": 4}), "quantized by 'awq'"),
        "by gptq": (_fp8({"quant_method": "gptq"}), "Start from the unquantized folder"),
        "by bitsandbytes": (_fp8({"quant_method": "bitsandbytes"}), r"model.dequantize\(\)"),
        "by compressed-tensors": (
            _fp8({"quant_method": "compressed-tensors"}), "run_compressed=False",
        ),
        "by a class": (_fp8({"quant_method": "os.system"}), "quantized by 'os.system'"),
        "by a list": (_fp8({"quant_method": ["fp8"]}), "quantized by"),
        "by nothing": (_fp8({}), "not named"),
        "a list of settings": (_fp8([1]), "is not an object"),
        "a text of settings": (_fp8("fp8"), "is not an object"),
        "blocks of nothing": (_fp8(FP8 | {"weight_block_size": [0, 8]}), "two numbers from 1"),
        "negative blocks": (_fp8(FP8 | {"weight_block_size": [-8, 8]}), "two numbers from 1"),
        "one block size": (_fp8(FP8 | {"weight_block_size": [8]}), "two numbers from 1"),
        "truths for blocks": (_fp8(FP8 | {"weight_block_size": [True, 8]}), "two numbers from 1"),
        "huge blocks": (_fp8(FP8 | {"weight_block_size": [1 << 60, 8]}), "two numbers from 1"),
    },
)  # fmt: skip
SCALE_CASES = cases(
    "quantized",
    "WeightsMismatch",
    {
        "scales of another shape": (_fp8(scales=("F32", [3, 2], ONE)), "does not divide"),
        "scales of nothing": (_fp8(scales=("F32", [0, 2], ONE)), "does not divide"),
        "more scales than weights": (_fp8(scales=("F32", [32, 32], ONE)), "does not divide"),
        "scales for many matrices": (_fp8(scales=("F32", [9, 2, 2], ONE)), "does not divide"),
        "huge scales": (_fp8(scales=("F32", [2048, 2048], ONE)), "does not divide"),
        "scales of I64": (_fp8(scales=("I64", [2, 2], b"\1")), "it is I64"),
        "scales of F64": (_fp8(scales=("F64", [2, 2], b"\1")), "it is F64"),
        "scales of NaN": (_fp8(scales=("F32", [2, 2], b"\0\0\xc0\x7f")), "is not finite"),
        "infinite scales": (_fp8(scales=("F32", [2, 2], b"\0\0\x80\x7f")), "is not finite"),
        "scales that overflow": (
            _fp8(weight=("F8_E4M3", [16, 16], b"\x7e"), scales=("F32", [], b"\xff\xff\x7f\x7f")),
            "is not finite",
        ),
        "weights of NaN": (_fp8(weight=("F8_E4M3", [16, 16], b"\x7f")), "is not finite"),
        "scales missing": (_fp8(without=SCALES), "is F8_E4M3; weights must be"),
        "weights missing": (_fp8(without=Q_PROJ), "missing, or given twice"),
        "scales twice": (
            _fp8(**{Q_PROJ.replace("weight", "scale"): GRID}), "missing, or given twice",
        ),
        "scales of scales": (_fp8(**{f"{SCALES}_scale_inv": GRID}), "given twice|not F8_E4M3"),
        "scales of nobody": (_fp8(evil_scale_inv=GRID), "missing, or given twice"),
        "scales of plain weights": (_fp8(weight=PLAIN[Q_PROJ]), "is BF16, not F8_E4M3"),
        "scales of a norm": (
            _fp8(**{"model.norm.weight_scale_inv": GRID}), "is BF16, not F8_E4M3",
        ),
        "weights of E5M2": (_fp8(weight=("F8_E5M2", [16, 16], b"\0")), "not F8_E4M3"),
        "four bits of another width": (_fp8(weight=("I8", [16, 16], b"\1")), "has shape"),
        "weights without rows": (_fp8(weight=("F8_E4M3", [0, 16], b"\1")), "is refused"),
        "weights in a line": (_fp8(weight=("F8_E4M3", [256], b"\1")), "not a matrix"),
        "a long row": (
            _fp8(weight=("F8_E4M3", [1, 1 << 21], b"\1"), scales=("F32", [1, 1], ONE)),
            "is refused",
        ),
        "blocks of an exponent too high": (
            _mxfp4(scales=("U8", [2, 32, 1], b"\xff")), "is not finite",
        ),
        "blocks of other groups": (_mxfp4(blocks=("U8", [2, 32, 1, 8], b"\1")), "must be experts"),
        "blocks in a line": (_mxfp4(blocks=("U8", [1024], b"\1")), "must be experts"),
        "blocks of BF16": (_mxfp4(blocks=("BF16", [2, 32, 1, 16], b"\1")), "must be U8"),
        "exponents of BF16": (_mxfp4(scales=("BF16", [2, 32, 1], b"\1")), "must be U8"),
        "exponents of another shape": (_mxfp4(scales=("U8", [2, 32, 2], b"\1")), "it has shape"),
        "huge exponents": (_mxfp4(scales=("U8", [1 << 24], b"\1")), "it has shape"),
        "exponents missing": (_mxfp4(without=f"{DOWN}_scales"), "not in the model"),
        "blocks missing": (_mxfp4(without=f"{DOWN}_blocks"), "missing, or given twice"),
        "blocks and weights": (_mxfp4(down=("BF16", [2, 32, 32], b"\1")), "given twice"),
        "more experts": (
            _mxfp4(blocks=("U8", [9, 32, 1, 16], b"\1"), scales=("U8", [9, 32, 1], b"\x7f")),
            "has shape",
        ),
        "no experts": (
            _mxfp4(blocks=("U8", [0, 32, 1, 16], b"\1"), scales=("U8", [0, 32, 1], b"\x7f")),
            "has shape",
        ),
    },
)  # fmt: skip
FILES = [
    Case(
        name="quantized: scales outside the folder",
        make=_scales_outside,
        end="ModelFolderError",
        says="points outside the folder",
    ),
    Case(
        name="quantized: scales in the place of weights",
        make=_overlapping,
        end="WeightsFormatError",
        says="overlap or leave a gap",
    ),
]

QUANTIZED_CASES: list[Case] = [*FINE, *SETTINGS, *SCALE_CASES, *FILES]
