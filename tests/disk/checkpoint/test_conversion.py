"""Laws of conversion.py: states that change their code on the way from a checkpoint to a store."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, HostModel, load_model
from megatrain.disk.checkpoint import checked_read
from megatrain.disk.checkpoint import conversion as conversion_module
from megatrain.disk.checkpoint.checked_read import NUM_HASH_WORKERS, CheckedFile
from megatrain.disk.checkpoint.conversion import Conversion
from megatrain.disk.checkpoint.manifest import Manifest, read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import CheckpointCorrupted, CheckpointMismatch
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import DirectReader
from megatrain.memory.kinds import TensorKind, kinds_on_disk, state, store_kinds
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode, encode
from megatrain.optim.states import STATES
from testkit.engines import make_engine
from tests.disk.checkpoint.saving import BATCHES, save, tiny_model

CODES = list(STATES["adamw"])
NARROW = [code for code in CODES if code != "fp32"]
SEED, NUM_STEPS = 7, 3
Moments = Mapping[str, tuple[Tensor, Tensor]]


def _kinds(code: str) -> tuple[TensorKind, ...]:
    return store_kinds(STATES["adamw"][code], waits=True)


def _states(home: HostModel, name: str, code: str) -> list[Tensor]:
    return [home.store.param(name, kind).view(-1) for kind in STATES["adamw"][code]]


def _moments(home: HostModel, code: str) -> Moments:
    trained = [name for name, place in home.store.layout.places.items() if place.segment.trained]
    return {name: decode([s.clone() for s in _states(home, name, code)]) for name in trained}


def _trained(folder: Path, code: str) -> tuple[HostModel, Path]:
    """Return a model after a few steps, and its checkpoint."""
    home = tiny_model(folder / "model", kinds=_kinds(code))
    optimizer = AdamW(learning_rate=0.01, max_grad_norm=1.0, state=code, seed=SEED)
    with make_engine(home.decoder, home.store, optimizer=optimizer, state=code) as engine:
        for batch in BATCHES[:NUM_STEPS]:
            engine.step(batch)
        engine.synchronize()
        return home, save(engine, checkpoint_parts(home), folder / "checkpoints")


@pytest.fixture(scope="module", params=CODES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, HostModel, Path]:
    """A checkpoint of each code, and the model that it was saved from."""
    return (request.param, *_trained(tmp_path_factory.mktemp("saved"), request.param))


def _converted(
    path: Path,
    source: HostModel,
    saved: str,
    wanted: str,
    seed: int = SEED,
    scratch: Scratch | None = None,
) -> HostModel:
    home = read_model_folder(source.source, dtype="bf16").load(_kinds(wanted), scratch)
    conversion = Conversion(
        layout=home.store.layout,
        saved=STATES["adamw"][saved],
        wanted=STATES["adamw"][wanted],
        seed=seed,
        num_updates=dict.fromkeys(range(home.store.layout.num_blocks), NUM_STEPS),
    )
    same = saved == wanted
    restore(path, read_manifest(path), checkpoint_parts(home), None if same else conversion)
    return home


def _same_states(first: HostModel, second: HostModel, code: str) -> bool:
    return all(
        torch.equal(first.store.arena(kind), second.store.arena(kind))
        for kind in STATES["adamw"][code]
    )


@pytest.mark.parametrize("wanted", CODES)
def test_moments_are_the_saved_ones_in_the_code_of_the_store(
    saved: tuple[str, HostModel, Path], wanted: str
) -> None:
    """All pairs. Masters are not touched; fp32 holds what was saved exactly."""
    code, source, path = saved
    home = _converted(path, source, code, wanted)
    before, after, first = _moments(source, code), _moments(home, wanted), 0
    for segment in home.store.layout.segments:
        for place in home.store.layout.segment_places(segment):
            name = place.param.name
            assert torch.equal(home.store.master(name), source.store.master(name))
            expected = [torch.zeros_like(each) for each in _states(home, name, wanted)]
            rounding = Rounding(seed=SEED, update=NUM_STEPS, first=first + place.start)
            encode(*before[name], expected, rounding)
            if code == wanted:  # not once more through the code
                expected = _states(source, name, code)
            for made, right in zip(_states(home, name, wanted), expected, strict=True):
                assert torch.equal(made.view(torch.uint8), right.view(torch.uint8)), name
            if wanted in ("fp32", code):
                assert all(map(torch.equal, after[name], before[name])), name
        first += segment.num_elements


@pytest.mark.few(5)
@pytest.mark.parametrize("wanted", NARROW)
def test_the_bits_depend_on_the_seed_and_not_on_windows(
    saved: tuple[str, HostModel, Path], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, source, path = saved
    if code == wanted:
        pytest.skip("nothing is converted")
    usual = _converted(path, source, code, wanted)
    monkeypatch.setattr(conversion_module, "WINDOW", 256)
    assert _same_states(_converted(path, source, code, wanted), usual, wanted)
    other = _converted(path, source, code, wanted, seed=SEED + 1)
    assert code == "bf16" or not _same_states(other, usual, wanted), "rounded by another draw"


@pytest.mark.parametrize("wanted", CODES)
def test_a_store_with_a_disk_tier_gets_the_same_bits(
    saved: tuple[str, HostModel, Path], wanted: str, tmp_path: Path
) -> None:
    code, source, path = saved
    usual = _converted(path, source, code, wanted)
    scratch = Scratch(folder=tmp_path, kinds=kinds_on_disk(_kinds(wanted), "states"))
    tiered = _converted(path, source, code, wanted, scratch=scratch)
    try:
        for name, place in usual.store.layout.places.items():
            for kind in (TensorKind.HI, TensorKind.LO, *STATES["adamw"][wanted]):
                if place.has(kind):
                    found, right = (home.store.at_rest(name, kind) for home in (tiered, usual))
                    assert torch.equal(found.view(torch.uint8), right.view(torch.uint8)), name
    finally:
        tiered.store.close()


@pytest.mark.parametrize("wanted", CODES)
def test_a_chunk_is_read_once_and_few_are_held(
    tmp_path: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("memory.direct", "disk.checkpoint.checked_read", "disk.checkpoint.manifest"):
        monkeypatch.setattr(f"megatrain.{module}.CHUNK_BYTES", 4096)
    code = CODES[CODES.index(wanted) - 1]
    source, path = _trained(tmp_path, code)
    usual = _converted(path, source, code, wanted)
    num_chunks = sum(
        len(record.digests)
        for name, record in read_manifest(path).files.items()
        if name.startswith("state/")
    )
    buffers: list[int] = []
    reads: list[tuple[str, int]] = []
    real_buffer, real_read = aligned_buffer, DirectReader.read

    def buffer(num_bytes: int) -> Tensor:
        buffers.append(num_bytes)
        return real_buffer(num_bytes)

    def read(self: DirectReader, start: int, stop: int, into: Tensor) -> Tensor:
        if self.path.parent.name == "state":
            reads.append((self.path.name, start))
        return real_read(self, start, stop, into)

    monkeypatch.setattr(conversion_module, "WINDOW", 256)
    monkeypatch.setattr(checked_read, "aligned_buffer", buffer)
    monkeypatch.setattr(DirectReader, "read", read)
    assert _same_states(_converted(path, source, code, wanted), usual, wanted)
    num_files = source.store.layout.num_blocks
    assert len(set(reads)) == num_chunks > 30
    assert len(reads) <= num_chunks + 4 * num_files, "only chunks where two kinds meet come twice"
    assert len(buffers) <= num_files * CheckedFile.KEPT_CHUNKS + NUM_HASH_WORKERS


def test_a_changed_byte_of_the_states_is_named(
    saved: tuple[str, HostModel, Path], tmp_path: Path
) -> None:
    code, source, path = saved
    copy = Path(shutil.copytree(path, tmp_path / path.name))
    file = copy / "state" / "block-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 8
    file.write_bytes(data)
    other = next(each for each in CODES if each != code)
    with pytest.raises(CheckpointCorrupted, match=r"block-00001.*do not match their hash \(in "):
        _converted(copy, source, code, other)


def test_the_states_of_another_optimizer_are_refused(saved: tuple[str, HostModel, Path]) -> None:
    code, source, path = saved
    wanted = next(each for each in CODES if each != code)
    home = load_model(source.source, kinds=_kinds(wanted))
    conversion = Conversion(
        layout=home.store.layout,
        saved=(state("momentum", "momentum"),),
        wanted=STATES["adamw"][wanted],
        seed=SEED,
        num_updates={},
    )
    manifest: Manifest = read_manifest(path)
    with pytest.raises(CheckpointMismatch, match="Resume with the optimizer that saved"):
        restore(path, manifest, checkpoint_parts(home), conversion)
