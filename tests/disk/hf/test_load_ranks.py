"""Loading as one of several ranks: the store of one process, in parts, each read once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.disk.hf import load as load_module
from megatrain.disk.hf.growth import Growth
from megatrain.disk.hf.load import match_tensors
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import WeightsMismatch
from megatrain.memory.direct import DirectReader
from megatrain.memory.kinds import TensorKind
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.ranks.ownership import Owner
from testkit.families import save_tiny, tiny_model
from tests.disk.rank_homes import SHARED, differences, joined, shared_by, small

KINDS = (TensorKind.HI, TensorKind.LO)


@pytest.mark.few(3)
@pytest.mark.parametrize(("stored", "tier"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("family", SHARED)
def test_ranks_have_the_bits_of_one_process(
    tmp_path: Path, family: str, stored: torch.dtype, tier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "READ_BYTES", 1000)  # cuts do not follow chunks
    small(tmp_path, family, stored)
    scratch = Scratch(folder=tmp_path, kinds=(TensorKind.LO,)) if tier else None
    folder = read_model_folder(tmp_path, dtype="bf16")
    alone = folder.load(KINDS)
    buffers = {name: b.clone() for name, b in folder.decoder.persistent_buffers().items()}
    assert bool(buffers) == (family == "deepseek_v3")
    for size in (3, 8):
        for buffer in folder.decoder.persistent_buffers().values():
            buffer.zero_()
        homes = shared_by(folder, KINDS, size, scratch)
        assert differences(homes, alone) == []
        for name, buffer in folder.decoder.persistent_buffers().items():
            assert torch.equal(buffer, buffers[name])
        homes[-1].store.arena(TensorKind.HI)[:2] += 1
        assert len(differences(homes, alone)) == 1, "a changed byte would be noticed"
        for home in homes:
            home.store.close()


def test_no_rank_reads_the_bytes_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, "llama")
    folder, size = read_model_folder(tmp_path), 3
    stored = match_tensors(tmp_path, folder.decoder)[0]
    total = sum(match.stored.entry.stop - match.stored.entry.start for match in stored)
    reads: list[tuple[Path, int, int]] = []
    real = DirectReader.read

    def read(self: DirectReader, start: int, stop: int, buffer: torch.Tensor) -> torch.Tensor:
        reads.append((self.path, start, stop))
        return real(self, start, stop, buffer)

    monkeypatch.setattr(DirectReader, "read", read)
    for rank in range(size):
        before = sum(stop - start for _, start, stop in reads)
        home = folder.load(KINDS, None, Owner(rank, size))
        own = sum(len(place.owned) for place in home.store.layout.places.values())
        assert sum(stop - start for _, start, stop in reads) - before == 2 * own
    assert sum(stop - start for _, start, stop in reads) == total
    spans = sorted(reads)
    pairs = itertools.pairwise(spans)
    assert all(one[2] <= other[1] for one, other in pairs if one[0] == other[0])


def test_a_tied_copy_that_differs_is_found_by_the_rank_that_has_it(tmp_path: Path) -> None:
    tiny_model("gemma", torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    other = tensors["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": other}, tmp_path / "model.safetensors")
    folder = read_model_folder(tmp_path)
    folder.load(KINDS, None, Owner(0, 2))
    with pytest.raises(WeightsMismatch, match=r"config\.json ties them"):
        folder.load(KINDS, None, Owner(1, 2))


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_new_rows_are_those_of_one_process(
    tmp_path: Path, dtype: Literal["bf16", "fp32"], tier: bool
) -> None:
    """The width is no multiple of what ranks divide by, so that a row may have two owners."""
    save_tiny(tmp_path, "llama", torch.float32, num_hidden_layers=1, hidden_size=96)
    growth = Growth(num_tokens=318, new_ids=(318, 319, 320, 321), files={})
    folder = read_model_folder(tmp_path, dtype=dtype, growth=growth)
    scratch = Scratch(folder=tmp_path, kinds=(TensorKind.LO,)) if tier and dtype == "bf16" else None
    alone = folder.load(KINDS)
    for size in (3, 8):
        homes = shared_by(folder, KINDS, size, scratch)
        assert differences(homes, alone) == []
        for home in homes:
            home.store.close()
    table = joined([alone], "model.embed_tokens.weight", TensorKind.HI).view(322, -1)
    assert torch.equal(table[318], table[321])
    assert table[321].any()
