"""What is counted of a model: bytes as the layout has them, FLOPs as people count them."""

from __future__ import annotations

import pytest

from megatrain.disk.hf.narrowed import presumed
from megatrain.memory import layout
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.optim.states import WITH_CLIP
from megatrain.planning.model.shapes import PLANNED_ALIGN, PLANNED_PAGE, AttentionShape
from megatrain.planning.model.skeleton import shape_of
from testkit.families import tiny_config
from testkit.machines import EIGHT, EXPERTS
from testkit.rehearsed import SMALL, decoder_of


def test_the_layout_rounds_alike() -> None:
    assert (PLANNED_PAGE, PLANNED_ALIGN) == (layout.PAGE, layout.ALIGN)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", SMALL)
def test_bytes_of_blocks_are_those_of_the_layout(family: str, dtype: str) -> None:
    decoder = decoder_of(family, dtype)
    real, model = build_layout(decoder.blocks, WITH_CLIP), shape_of(decoder)
    for index, block in enumerate(model.blocks):
        assert block.weight_bytes(dtype) == real.block_extents[index, TensorKind.HI].num_bytes  # type: ignore[arg-type]
        assert block.gradient_bytes(dtype) == real.block_extents[index, TensorKind.GRAD].num_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_bytes_of_narrow_blocks_are_those_of_the_layout(family: str) -> None:
    lora = LoraConfig(rank=4, alpha=4)
    decoder = presumed(build_decoder(tiny_config(family), "bf16", lora=lora), "nf4", None)
    real, model = build_layout(decoder.blocks, WITH_CLIP), shape_of(decoder)
    assert model.narrow_params > 0
    for index, block in enumerate(model.blocks):
        assert block.weight_bytes("bf16") == real.block_extents[index, TensorKind.HI].num_bytes
        assert block.wide_bytes("bf16") == real.wide_bytes(index)
        assert block.gradient_bytes("bf16") == real.block_extents[index, TensorKind.GRAD].num_bytes


def test_flops_are_two_per_weight_and_attention() -> None:
    matrices = EIGHT.params - EIGHT.embedding.params - (2 * 32 + 1) * 4096
    attention = EIGHT.layers[0].attention
    assert attention is not None
    scores = 32 * attention.flops_per_token(2048, masked=False)
    assert EIGHT.flops_per_token(2048) == pytest.approx(2 * matrices + scores)
    assert scores == pytest.approx(32 * 4 * 4096 * 2049 / 2)


def test_a_mask_hides_but_does_not_save() -> None:
    shape = AttentionShape(heads=1, kv_heads=1, head_dim=1, value_dim=1, window=16)
    assert shape.flops_per_token(64, masked=False) == 4 * 64
    assert shape.flops_per_token(15, masked=False) == 4 * 8
    assert shape.flops_per_token(15, masked=True) == 4 * 15


def test_a_token_uses_a_part_of_the_experts() -> None:
    assert EXPERTS.params == pytest.approx(30.5e9, rel=0.01)
    assert EXPERTS.active_params == pytest.approx(3.35e9, rel=0.01)


@pytest.mark.parametrize(
    ("family", "gated"),
    [("llama", True), ("qwen3_moe", True), ("phi3", True), ("phi", False), ("nemotron", False)],
)
def test_a_feed_forward_with_a_gate_is_recognized(family: str, gated: bool) -> None:
    shape = shape_of(build_decoder(tiny_config(family), "bf16"))
    assert {layer.gated for layer in shape.structures} == {gated}
