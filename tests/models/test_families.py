"""Every family: folder -> store -> folder, each bit in its place; and each skeleton is faithful."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain import load_model
from megatrain.disk.hf.names import NameMap
from megatrain.errors import UnsupportedModel
from megatrain.memory.kinds import TensorKind
from megatrain.models.build import build_decoder
from testkit.cases import in_dtypes
from testkit.families import COVERING, FAMILIES, REFUSED, save_tiny, tiny_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _state(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype]
    ).state_dict()
    return state


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "dtype"), in_dtypes(FAMILIES))
def test_round_trip_keeps_every_bit(
    family: str, dtype: Literal["bf16", "fp32"], tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "source", family, DTYPES[dtype])
    model = load_model(source, dtype=dtype)
    model.export(tmp_path / "export", shard_bytes=150_000)
    before = _state(source, dtype)
    assert _same(before, _state(tmp_path / "export", dtype))

    for param in model.decoder.params:
        assert param.dtype == before[param.name].dtype, f"{param.name}: dtype"
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype])
    buffers = dict(plain.named_buffers())
    for name, buffer in model.decoder.model.named_buffers():
        assert buffer.dtype == buffers[name].dtype, f"{name}: dtype"
        assert torch.equal(buffer, buffers[name]), f"{name}: value"


@pytest.mark.parametrize("kind", ["swapped experts", "one flipped bit"])
def test_round_trip_would_notice(kind: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "mixtral")
    model = load_model(source)
    experts = model.store.param("model.layers.0.mlp.experts.down_proj", TensorKind.HI)
    if kind == "swapped experts":
        experts.copy_(experts.flip(0).clone())
    else:
        experts.view(torch.int16)[0, 0, 0] ^= 1
    model.export(tmp_path / "export")
    assert not _same(_state(source, "bf16"), _state(tmp_path / "export", "bf16"))


@pytest.mark.parametrize(("family", "reason"), REFUSED.items())
def test_a_family_that_is_no_chain_of_layers_is_refused_with_the_reason(
    family: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        build_decoder(tiny_config(family), "bf16")


def test_enough_families() -> None:
    assert set(COVERING) < set(FAMILIES)
    assert len(set(FAMILIES)) == len(FAMILIES) >= 100


def test_names_cover_each_element_once() -> None:
    names = NameMap(build_decoder(tiny_config("qwen3_moe"), "bf16"))
    everything = list(names.tensors.values())
    assert names.faults(everything) == ([], [])
    assert names.faults(everything[1:]) == ([everything[0].name], [])
    assert names.faults([*everything, everything[3]]) == ([], [everything[3].param])
