"""What a checkpoint consists of: every bit of the store once, and nothing that training ignores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain import HostModel
from megatrain.disk.checkpoint.parts import checkpoint_parts, model_mark
from megatrain.memory.kinds import TensorKind
from megatrain.model_files import INDEX_NAME
from tests.disk.checkpoint.saving import KINDS, tiny_model

FAMILIES = ["llama", "gemma", "mixtral", "qwen3"]


def _spans(home: HostModel) -> list[tuple[int, int]]:
    """Return where the bytes of each tensor of each file are, and how many."""
    return [
        (tensor.memory.data_ptr(), tensor.memory.nbytes)
        for files in checkpoint_parts(home).blocks
        for file in files
        for tensor in file.tensors
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_of_every_kind_is_in_one_file(tmp_path: Path, family: str) -> None:
    home = tiny_model(tmp_path / "model", family)
    covered = {
        address for start, num_bytes in _spans(home) for address in range(start, start + num_bytes)
    }
    assert len(covered) == sum(num_bytes for _, num_bytes in _spans(home)), "a byte is there twice"
    for name, place in home.store.layout.places.items():
        for kind in KINDS:
            if place.has(kind):
                values = home.store.param(name, kind)
                start = values.data_ptr()
                assert covered.issuperset(range(start, start + values.nbytes)), (name, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_owns_its_files(tmp_path: Path, family: str) -> None:
    home = tiny_model(tmp_path / "model", family)
    parts = checkpoint_parts(home)
    assert len(parts.blocks) == len(home.decoder.blocks)
    for block, files in enumerate(parts.blocks):
        names = {place.param.name for place in home.store.layout.block_places(block)}
        for file in files:
            if file.name.startswith("state/"):
                assert file.name == f"state/block-{block:05}.safetensors"
                assert {tensor.name.split(".", 1)[1] for tensor in file.tensors} <= names
    all_names = [file.name for files in parts.blocks for file in files] + list(parts.small)
    assert len(set(all_names)) == len(all_names)


def test_the_index_names_every_tensor_of_the_model_part(tmp_path: Path) -> None:
    parts = checkpoint_parts(tiny_model(tmp_path / "model"))
    index = json.loads(parts.small[f"model/{INDEX_NAME}"])["weight_map"]
    there = {
        tensor.name: file.name.removeprefix("model/")
        for files in parts.blocks
        for file in files
        if file.name.startswith("model/")
        for tensor in file.tensors
    }
    assert index == there
    assert parts.small["model/tokenizer.json"] == b"{}"


def test_frozen_params_have_no_state(tmp_path: Path) -> None:
    home = tiny_model(tmp_path / "model", frozen=("model.layers.0.*",))
    named = {
        tensor.name
        for files in checkpoint_parts(home).blocks
        for file in files
        if file.name.startswith("state/")
        for tensor in file.tensors
    }
    assert not any("layers.0." in name for name in named)
    assert any(name.startswith(f"{TensorKind.LO}.") for name in named)


@pytest.mark.parametrize(
    "settings", [{"frozen": ("model.embed_*",)}, {"dtype": "fp32"}], ids=["frozen", "dtype"]
)
def test_the_mark_tells_models_apart(tmp_path: Path, settings: dict[str, Any]) -> None:
    mark = model_mark(tiny_model(tmp_path / "model").store)
    assert mark == model_mark(tiny_model(tmp_path / "same").store)
    assert mark != model_mark(tiny_model(tmp_path / "other", **settings).store)
    assert mark != model_mark(tiny_model(tmp_path / "family", "mixtral").store)
