"""Loading: every value in its place, every fault named, nothing held twice."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import load_model
from megatrain.disk.hf import load as load_module
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import DiskError, WeightsMismatch
from megatrain.memory.direct import DirectReader
from megatrain.memory.kinds import TensorKind
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.optim.states import WITH_CLIP, M, V
from testkit.families import save_tiny, tiny_model
from testkit.faulty_os import faulty
from testkit.peak_bytes import peak_above


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny model with one weight file."""
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_masters_are_the_stored_values_exactly(
    stored: torch.dtype, dtype: Literal["bf16", "fp32"], tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama", stored)
    values = tiny_model("llama", stored).state_dict()
    store = load_model(tmp_path, dtype=dtype).store
    for name in store.layout.places:
        assert torch.equal(store.master(name), values[name].float()), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_on_disk_are_the_stored_values_and_bf16_writes_nothing(
    stored: torch.dtype, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", "mixtral", stored)
    values = load_model(tmp_path / "model").store
    folder = read_model_folder(tmp_path / "model", dtype="bf16")
    with faulty(counted=frozenset({"pwrite"})) as calls:
        store = folder.load(WITH_CLIP, Scratch(folder=tmp_path, kinds=(TensorKind.LO, M, V))).store
    assert bool(calls.num_calls) == (stored is not torch.bfloat16)
    for name in store.layout.places:
        assert torch.equal(store.master(name), values.master(name)), name
    store.close()


def test_masters_would_show_a_lost_remainder(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    model = load_model(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    model.store.param(name, TensorKind.LO).zero_()
    assert not torch.equal(
        model.store.master(name), tiny_model("llama", torch.float32).state_dict()[name]
    )


def test_chunks_smaller_than_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(folder).store
    monkeypatch.setattr(load_module, "READ_BYTES", 1000)
    parts = load_model(folder).store
    for name in whole.layout.places:
        assert torch.equal(whole.param(name, TensorKind.HI), parts.param(name, TensorKind.HI))


def test_tensors_at_odd_bytes(folder: Path) -> None:
    # The format allows a tensor to start anywhere; an odd-sized one before it shifts the rest.
    data = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + length].rstrip(b" ")
    text += b" " * (7 - len(text) % 8)
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + data[8 + length :]
    )
    values = tiny_model("llama", torch.bfloat16).state_dict()
    store = load_model(folder).store
    assert all(torch.equal(store.param(n, TensorKind.HI), values[n]) for n in store.layout.places)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors are missing: model.norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "1 tensors are not in the model: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            r"model.norm.weight has shape \(65,\); the model has \(64,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight is I8; weights must be BF16, F16 or F32",
        ),
        (
            lambda t: t.update({"norm.weight": torch.ones(64)}),
            "1 params are given twice: model.norm.weight",
        ),
        (lambda t: t.clear(), "39 tensors are missing: .*, and 31 more"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], reason: str, folder: Path
) -> None:
    _edit(folder, change)
    with pytest.raises(WeightsMismatch, match=reason):
        load_model(folder)


def test_faults_are_found_before_a_byte_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _edit(folder, lambda t: t.pop("model.norm.weight"))
    monkeypatch.setattr(DirectReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(WeightsMismatch):
        load_model(folder)


def test_names_of_the_base_model_are_understood(folder: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    _edit(folder, strip)
    values = tiny_model("llama", torch.bfloat16).state_dict()
    store = load_model(folder).store
    assert all(torch.equal(store.param(n, TensorKind.HI), values[n]) for n in store.layout.places)


def test_experts_may_be_stored_in_one_piece(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    store = load_model(tmp_path).store
    values = model.state_dict()
    assert all(torch.equal(store.param(n, TensorKind.HI), values[n]) for n in store.layout.places)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    _edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsMismatch, match=f"1 tensors are missing: {name}"):
        load_model(tmp_path)


def test_a_second_copy_of_a_tied_param_must_agree(tmp_path: Path) -> None:
    tiny_model("gemma", torch.bfloat16).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    load_model(tmp_path)
    embedding[3, 5] += 1
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    said = r"lm_head.weight differs from model.embed_tokens.* Set tie_word_embeddings to false"
    with pytest.raises(WeightsMismatch, match=said):
        load_model(tmp_path)


def test_a_disk_that_fails_is_our_error_and_stops_all_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    threads = threading.active_count()
    with pytest.raises(DiskError, match=r"cannot read .*: Input/output error"):
        load_model(folder)
    assert threading.active_count() == threads


@pytest.mark.merge
def test_nothing_is_held_twice(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16, hidden_size=1024, intermediate_size=8192)
    load_model(tmp_path)  # so that what stays from the first call of anything is not counted
    model, peak = peak_above(lambda: load_model(tmp_path))
    weights = model.store.layout.kind_bytes[TensorKind.HI]
    assert weights > 150 << 20
    buffers = load_module.NUM_LOAD_WORKERS * load_module.READ_BYTES
    assert peak < weights + buffers + (32 << 20)


def test_generation_config_is_not_needed(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert json.loads(load_model(folder).config_json)["model_type"] == "llama"
