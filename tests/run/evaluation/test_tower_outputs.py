"""Outputs of frozen towers: computed once, kept by content, equal to the bit."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from megatrain import load_model
from megatrain.devices.device import CpuDevice
from megatrain.disk.hf.tower_weights import TowerWeights
from megatrain.errors import DataError, DiskFull
from megatrain.media import MediaItem
from megatrain.models.towers import recorded
from megatrain.ranks.ranks import Ranks
from megatrain.run.evaluation import tower_outputs
from megatrain.run.evaluation.tower_outputs import compute_outputs
from testkit.faulty_os import faulty
from testkit.joint_media import media_documents, save_media_model
from testkit.rank_threads import ONE_AT_A_TIME, Together

FAMILY = "qwen3_vl"


def _items(seed: int = 1) -> dict[str, MediaItem]:
    documents = media_documents(FAMILY, [2, 1], seed=seed)
    return {item.digest: item for _, _, items in documents for item in items}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    return save_media_model(tmp_path / "model", FAMILY, torch.float32)


def test_an_item_has_the_outputs_of_transformers_own_tower_to_the_bit(source: Path) -> None:
    decoder = load_model(source, dtype="fp32", media="projector").decoder
    plain = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.float32).eval()
    weights, items = TowerWeights(source, decoder, "fp32"), _items()
    asked: list[str] = []

    def read(digest: str) -> MediaItem:
        asked.append(digest)
        return items[digest]

    files, seconds = compute_outputs(list(items), read, weights, CpuDevice())
    assert asked == list(items)
    assert seconds is not None
    assert decoder.towers is not None
    for digest, item in items.items():
        found, wanted = files.read(digest), recorded(plain, decoder.towers, item)
        assert found.outputs is not None
        assert found.outputs.structure == wanted.structure
        for one, other in zip(found.outputs.tensors, wanted.tensors, strict=True):
            assert torch.equal(one, other)
        assert found.tensors["image_grid_thw" if item.kind == "image" else "video_grid_thw"].any()
        shapes = {name: tensor.shape for name, tensor in item.tensors.items()}
        assert {name: tensor.shape for name, tensor in found.tensors.items()} == shapes
    with weights.running(CpuDevice(), comes=True) as streamed:
        again = streamed.outputs(items[asked[0]]).tensors
    kept = files.read(asked[0]).outputs
    assert kept is not None
    assert all(torch.equal(one, other) for one, other in zip(again, kept.tensors, strict=True))

    assert compute_outputs(list(items), read, weights, CpuDevice())[1] is None
    assert asked == list(items)  # a second run finds all
    path = files.path(asked[1])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=r"the output of a tower cannot be read.*computed again"):
        files.read(asked[1])
    compute_outputs(list(items), read, weights, CpuDevice())
    assert asked[len(items) :] == [asked[1]]  # what is damaged is computed again
    more = _items(seed=2)
    items |= more
    compute_outputs(list(items), read, weights, CpuDevice())
    assert asked[len(_items()) + 1 :] == list(more)  # other pixels


@pytest.mark.parametrize(
    ("name", "differs"),
    [("visual.blocks.1.mlp.linear_fc1.weight", True), ("visual.merger.linear_fc1.weight", False)],
)
def test_other_weights_of_a_tower_are_other_outputs(source: Path, name: str, differs: bool) -> None:
    decoder = load_model(source, dtype="fp32", media="projector").decoder
    before = TowerWeights(source, decoder, "fp32").mark()
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        changed = [one for one in tensors if one.endswith(name)]
        if changed:
            tensors = {n: t + 1 if n in changed else t for n, t in tensors.items()}
            save_file(tensors, path, metadata={"format": "pt"})
    assert (TowerWeights(source, decoder, "fp32").mark() != before) == differs
    frozen = replace(
        decoder, towers=load_model(source, dtype="fp32", media="frozen").decoder.towers
    )
    assert TowerWeights(source, frozen, "fp32").mark() != before  # another place of the cut


@pytest.mark.parametrize(
    ("caches", "computed"), [("xxx", [1, 1, 1]), ("xxy", [2, 1, 3])], ids=["one cache", "two"]
)
def test_every_host_has_all_outputs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: str, computed: list[int]
) -> None:
    decoder = load_model(source, dtype="fp32", media="projector").decoder
    weights, items, here = TowerWeights(source, decoder, "fp32"), _items(), threading.local()
    compute = tower_outputs._compute

    def in_turn(*given: Any) -> Any:
        with ONE_AT_A_TIME:
            return compute(*given)

    monkeypatch.setattr("socket.gethostname", lambda: "aab"[here.rank])
    monkeypatch.setattr(tower_outputs, "_compute", in_turn)
    monkeypatch.setattr(
        tower_outputs, "writable_cache_folder", lambda: tmp_path / caches[here.rank]
    )
    for name in caches:
        (tmp_path / name).mkdir(exist_ok=True)

    def work(ranks: Ranks) -> int:
        here.rank = ranks.owner.rank
        files, done = compute_outputs(list(items), items.__getitem__, weights, CpuDevice(), ranks)
        assert all(files.has(digest) for digest in items)
        return 0 if done is None else done.items

    assert Together(3).run(work) == computed


def test_a_cache_without_room_names_the_remedies(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_model(source, dtype="fp32", media="projector").decoder
    weights, items = TowerWeights(source, decoder, "fp32"), _items()

    def compute() -> None:
        compute_outputs(list(items), items.__getitem__, weights, CpuDevice())

    remedies = r"\. Set MEGATRAIN_CACHE to a folder on a larger disk, or let the processor"
    full = rf"has no room for the outputs of towers{remedies}"
    with (
        faulty(fail_at=0, counted=frozenset(["write", "pwrite"])),
        pytest.raises(DiskFull, match=full),
    ):
        compute()
    monkeypatch.setattr("megatrain.files.free_disk_bytes", lambda folder: 10)
    with pytest.raises(DiskFull, match=rf"will need about .* more, and .* are free{remedies}"):
        compute()
