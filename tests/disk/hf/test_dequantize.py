"""Quantized folders: transformers' own weights to the bit, and every fault of scales named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight

from megatrain import load_model
from megatrain.disk.hf import dequantize as scaled_module
from megatrain.disk.hf import load as load_module
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.model import HostModel, read_model_folder
from megatrain.errors import WeightsMismatch
from megatrain.memory.direct import DirectReader
from megatrain.memory.kinds import TensorKind
from testkit.peak_bytes import peak_above
from testkit.quantized import FILE, dequantized, edit, save_fp8, save_mxfp4
from tests.disk.rank_homes import differences, shared_by

KINDS = (TensorKind.HI, TensorKind.LO)
DOWN = "model.layers.1.mlp.down_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
Change = Callable[[dict[str, Tensor]], object]


def _edit(folder: Path, change: Change) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def _unlike(home: HostModel, wanted: dict[str, Tensor]) -> list[str]:
    """Return the params that have other bits, or a remainder beside them."""
    names = [name for name in home.store.layout.places if name in wanted]
    assert len(names) > 20
    return [
        name
        for name in names
        if not torch.equal(home.store.param(name, TensorKind.HI), wanted[name])
        or (
            home.store.layout.places[name].has(TensorKind.LO)
            and home.store.param(name, TensorKind.LO).any()
        )
    ]


@pytest.mark.parametrize(
    ("family", "block", "scale_fmt", "dtype"),
    [
        ("llama", (16, 32), "float", "fp32"),
        ("llama", None, "float", "bf16"),
        ("qwen3_moe", (16, 16), "ue8m0", "bf16"),
        ("deepseek_v3", (16, 32), "float", "bf16"),
    ],
)
def test_fp8_has_the_bits_of_transformers(
    family: str,
    block: tuple[int, int] | None,
    scale_fmt: str,
    dtype: Literal["bf16", "fp32"],
    tmp_path: Path,
) -> None:
    save_fp8(tmp_path, family, block, scale_fmt)
    wanted = dequantized(tmp_path, torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert _unlike(load_model(tmp_path, dtype=dtype), wanted) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_mxfp4_has_the_bits_of_transformers(dtype: Literal["bf16", "fp32"], tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    wanted = dequantized(tmp_path, torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert _unlike(load_model(tmp_path, dtype=dtype), wanted) == []


@pytest.mark.parametrize(
    ("save", "name", "scales"),
    [(save_fp8, DOWN, f"{DOWN}_scale_inv"), (save_mxfp4, EXPERTS, f"{EXPERTS}_scales")],
)
def test_one_changed_scale_would_be_noticed(
    save: Callable[[Path], None], name: str, scales: str, tmp_path: Path
) -> None:
    save(tmp_path)
    wanted = dequantized(tmp_path)
    _edit(tmp_path, lambda tensors: tensors[scales].view(-1)[-1:].add_(1))
    assert _unlike(load_model(tmp_path), wanted) == [name]


@pytest.mark.few(1)
@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_neither_pieces_nor_ranks_change_a_bit(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    folder = read_model_folder(tmp_path)
    alone = folder.load(KINDS)
    monkeypatch.setattr(scaled_module, "ELEMENTS_AT_ONCE", 700)
    assert _unlike(folder.load(KINDS), dequantized(tmp_path)) == []
    for size in (3, 8):
        homes = shared_by(folder, KINDS, size)
        assert differences(homes, alone) == []


@pytest.mark.parametrize(("block", "grid"), [((40, 24), (2, 4)), ((128, 128), (1, 1))])
def test_a_block_over_the_edge_has_the_size_of_the_config(
    block: tuple[int, int], grid: tuple[int, int], tmp_path: Path
) -> None:
    """64 rows in blocks of 40: layers of transformers read them so, and its loader cannot."""
    save_fp8(tmp_path, "llama", (16, 32))
    values, scales = torch.empty(64, 96).normal_().to(torch.float8_e4m3fn), torch.rand(grid)
    _edit(tmp_path, lambda t: t.update({DOWN: values, f"{DOWN}_scale_inv": scales}))
    edit(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    wanted = _dequantize_fp8_weight(values, scales, list(block), torch.float32)
    assert torch.equal(load_model(tmp_path, dtype="fp32").store.param(DOWN, TensorKind.HI), wanted)


@pytest.mark.parametrize("exponents", [torch.uint8, torch.float8_e8m0fnu])
def test_four_bits_with_an_exponent_for_each_32_values(
    exponents: torch.dtype, tmp_path: Path
) -> None:
    save_fp8(tmp_path)
    values = torch.randint(-128, 128, (64, 48), dtype=torch.int8)
    scales = torch.randint(100, 130, (64, 3), dtype=torch.uint8).view(exponents)
    _edit(tmp_path, lambda t: t.update({DOWN: values, DOWN.replace("weight", "scale"): scales}))
    _edit(tmp_path, lambda t: t.pop(f"{DOWN}_scale_inv"))
    oracle = Fp8Dequantize(SimpleNamespace())
    wanted = oracle._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(load_model(tmp_path).store.param(DOWN, TensorKind.HI), wanted)


def test_an_export_is_plain_bf16(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model")
    wanted = dequantized(tmp_path / "model")
    load_model(tmp_path / "model").export(tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_quantized_table_grows(tmp_path: Path) -> None:
    table = "model.embed_tokens.weight"

    def quantize(tensors: dict[str, Tensor]) -> None:
        scales = torch.rand(20, 2) / 10
        tensors |= {table: tensors[table].to(torch.float8_e4m3fn), f"{table}_scale_inv": scales}

    growth = Growth(num_tokens=318, new_ids=(318, 319, 320, 321), files={})
    save_fp8(tmp_path)
    _edit(tmp_path, quantize)
    load_model(tmp_path).export(tmp_path / "plain")
    homes = [
        read_model_folder(path, growth=growth).load(KINDS)
        for path in (tmp_path, tmp_path / "plain")
    ]
    assert differences(homes[:1], homes[1]) == []


def _to(dtype: torch.dtype, name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def _cut(name: str) -> Change:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


SCALES = f"{DOWN}_scale_inv"
FP8_FAULTS: list[tuple[Change, str]] = [
    (_cut(SCALES), r"shape \(3, 3\) does not divide .*down_proj.weight, \(64, 96\)"),
    (lambda t: t.update({SCALES: torch.ones(7)}), r"shape \(7,\) does not divide"),
    (lambda t: t.update({SCALES: torch.ones(0, 3)}), r"shape \(0, 3\) does not divide"),
    (_to(torch.int32, SCALES), "it is I32; scales are F32, BF16, F16, U8, F8_E8M0"),
    (_to(torch.bfloat16, DOWN), "is BF16, not F8_E4M3"),
    (_cut(DOWN), r"down_proj.weight has shape|does not divide"),
    (lambda t: t.pop(DOWN), "its weights are missing, or given twice"),
    (lambda t: t.pop(SCALES), "is F8_E4M3; weights must be BF16, F16 or F32"),
    (lambda t: t.update({DOWN.replace("weight", "scale"): t[SCALES] + 1}), "given twice"),
]
MXFP4_FAULTS: list[tuple[Change, str]] = [
    (_cut(f"{EXPERTS}_scales"), r"it has shape \(3, 64, 3\); .*blocks has \(4, 64, 3, 16\)"),
    (_to(torch.int8, f"{EXPERTS}_scales"), "blocks and scales must be U8"),
    (_to(torch.int8, f"{EXPERTS}_blocks"), "blocks and scales must be U8"),
    (lambda t: t.update({f"{EXPERTS}_blocks": torch.ones(4, 64)}), "must be U8"),
    (lambda t: t.pop(f"{EXPERTS}_scales"), "1 tensors are not in the model: .*_blocks"),
    (lambda t: t.pop(f"{EXPERTS}_blocks"), "its weights are missing, or given twice"),
    (lambda t: t.update({EXPERTS: torch.ones(4, 96, 64)}), "given twice"),
]


@pytest.mark.parametrize(
    ("save", "change", "reason"),
    [(save_fp8, *fault) for fault in FP8_FAULTS] + [(save_mxfp4, *fault) for fault in MXFP4_FAULTS],
)
def test_scales_that_do_not_suit_are_named_before_a_byte_is_read(
    save: Callable[[Path], None],
    change: Change,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path)
    _edit(tmp_path, change)
    monkeypatch.setattr(DirectReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(WeightsMismatch, match=reason):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_scales_that_are_not_finite_or_huge_are_named(value: float, tmp_path: Path) -> None:
    save_fp8(tmp_path)
    _edit(tmp_path, lambda tensors: tensors[SCALES][1, 1:].fill_(value))
    with pytest.raises(WeightsMismatch, match=r"down_proj.*_scale_inv is not finite in rows"):
        load_model(tmp_path)


def test_an_exponent_that_no_weight_has_is_named(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    _edit(tmp_path, lambda tensors: tensors[f"{EXPERTS}_scales"][2, 5].fill_(255))
    with pytest.raises(WeightsMismatch, match="is not finite in rows 0 to 63 of matrix 2"):
        load_model(tmp_path)


@pytest.mark.merge
def test_nothing_is_held_twice(tmp_path: Path) -> None:
    save_fp8(
        tmp_path, "llama", (128, 128), hidden_size=1024, intermediate_size=8192, num_hidden_layers=2
    )
    load_model(tmp_path)  # so that what stays from the first call of anything is not counted
    model, peak = peak_above(lambda: load_model(tmp_path))
    weights = model.store.layout.kind_bytes[TensorKind.HI]
    assert weights > 90 << 20
    buffers = load_module.NUM_LOAD_WORKERS * load_module.READ_BYTES
    assert peak < weights + buffers + (32 << 20)
