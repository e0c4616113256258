"""Laws of host_memory.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.config import Config, load_config
from megatrain.errors import DoesNotFit
from megatrain.memory.host import resident_bytes
from megatrain.trainer import host_memory
from megatrain.trainer.demo import write_demo
from megatrain.trainer.host_memory import check_ram
from megatrain.trainer.loop import Trainer

NUM_PARAMS = 558_976
BASE = 1_000_000
WITH_CLIP, WITHOUT_CLIP = BASE + 14 * NUM_PARAMS, BASE + 12 * NUM_PARAMS


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    return write_demo(tmp_path / "demo", num_steps=2)


def capped(path: Path, ram: int, *others: str) -> Config:
    return load_config(path, [f"memory.ram={ram}B", "model.dtype=bf16", *others])


def needed(path: Path, *others: str) -> int:
    """The least cap that is enough."""
    with pytest.raises(DoesNotFit) as refused:
        check_ram(capped(path, 2 * BASE, *others))
    low = int(re.findall(r"memory\.ram=(\d+)MB", str(refused.value))[0]) * 10**6 - 10**6
    high = low + 10**6
    while low < high:
        middle = (low + high) // 2
        try:
            check_ram(capped(path, middle, *others))
            high = middle
        except DoesNotFit:
            low = middle + 1
    return low


def test_the_cap_is_held_against_the_whole_ledger(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: BASE)
    assert needed(path) == pytest.approx(WITH_CLIP, rel=0.02)  # blocks begin on pages
    assert needed(path, "train.max_grad_norm=null") == pytest.approx(WITHOUT_CLIP, rel=0.02)
    check_ram(load_config(path))  # auto


def test_a_refusal_names_what_would_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: BASE)
    with pytest.raises(DoesNotFit) as refused:
        check_ram(capped(path, WITH_CLIP - 1))
    first, purposes, changes = str(refused.value).splitlines()
    assert first == "host memory: the run needs 8.5 MiB, memory.ram allows 8.4 MiB."
    assert purposes.startswith("  Python and libraries 1.0 MiB  weights (hi) 1.1 MiB  ")
    assert changes == "  What would fit: train.max_grad_norm=null (7.4 MiB), or memory.ram=9MB"
    for change in re.findall(r"\w+\.\w+=\w+", changes):
        check_ram(load_config(path, [f"memory.ram={WITH_CLIP - 1}B", "model.dtype=bf16", change]))


def test_the_trainer_refuses_before_it_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatrain.trainer.opening.load_model", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(DoesNotFit, match=r"memory\.ram allows"):
        Trainer(capped(path, resident_bytes() // 2))
