"""A run on an accelerator that torch drives is the run on the CPU, bit for bit, and resumes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.models.llama.modeling_llama import LlamaMLP

from megatrain.errors import DeviceFull
from megatrain.run.opening import planned
from megatrain.run.opening.opening import open_run
from testkit.patience import HANG_S
from testkit.runs import Setting, State, config_of, run, write_world

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import control

pytestmark = pytest.mark.hostgpu


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


def trained(world: Path, folder: Path, setting: Setting, device: str, **how: Any) -> State | None:
    return run(config_of(world, folder, setting, memory={"device": device}), **how)


def same(first: State | None, second: State | None) -> bool:
    assert first is not None
    assert second is not None
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.merge
def test_a_run_has_the_bits_of_the_cpu(world: Path, tmp_path: Path) -> None:
    setting = Setting(tape="host", save_every=None)
    expected = trained(world, tmp_path / "cpu", setting, "cpu")
    with control.timed("random"):
        found = trained(world, tmp_path / "hostgpu", setting, "hostgpu:1")
    assert same(found, expected)
    assert control.registered_bytes() == 0


@pytest.mark.merge
def test_a_run_that_dies_and_resumes_is_the_whole_run(world: Path, tmp_path: Path) -> None:
    """With dropout, whose numbers are drawn by the device's own generator."""
    setting = Setting(dropout=0.1, eval_every=None)
    whole = trained(world, tmp_path / "whole", setting, "hostgpu:1")
    with control.timed("lazy"):
        trained(world, tmp_path / "died", setting, "hostgpu:1", die=5)
        resumed = trained(world, tmp_path / "died", setting, "hostgpu:1", resume=True)
    assert same(resumed, whole)
    assert not same(whole, trained(world, tmp_path / "cpu", setting, "cpu")), "other numbers"


@pytest.mark.merge
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_repeats_and_resumes_where_kernels_do_if_they_are_asked_to(
    world: Path, tmp_path: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that adds in another order each time, unless torch is told not to."""
    forward, orders = LlamaMLP.forward, count(1)

    def atomic(module: LlamaMLP, hidden: torch.Tensor) -> Any:
        found = forward(module, hidden)
        repeats = torch.are_deterministic_algorithms_enabled()
        return found if repeats else found * (1 + 2**-7 * (next(orders) % 3))

    monkeypatch.setattr(LlamaMLP, "forward", atomic)

    def states(name: str, **how: Any) -> State | None:
        changes = {"memory": {"device": "hostgpu:1"}, "train": {"deterministic": deterministic}}
        return run(config_of(world, tmp_path / name, Setting(eval_every=None), **changes), **how)

    whole, again = states("whole"), states("again")
    states("died", die=5)
    resumed = states("died", resume=True)
    assert same(whole, again) == same(whole, resumed) == deterministic
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("integrated", [True, False])
def test_a_run_keeps_an_integrated_device_within_the_memory_of_both(
    world: Path, tmp_path: Path, integrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the switch the device may use all memory that it has."""
    monkeypatch.setattr(planned, "free_bytes", lambda: 1 << 30)
    config = config_of(world, tmp_path / "run", Setting(), memory={"device": "hostgpu:1"})
    with control.integrated() if integrated else nullcontext():
        opened = open_run(config)
        try:
            profile, ledger = opened.plan.profile, opened.plan.ledger
            purposes = [line.purpose for line in ledger.lines if line.place == "host"]
            assert ("device memory" in purposes) == integrated
            assert profile.integrated == integrated
            with pytest.raises(DeviceFull) if integrated else nullcontext():
                opened.device.allocate(1 << 30, "more")
            if integrated:
                cap = opened.device.free_bytes + torch.accelerator.memory_allocated(1)
                host = ledger.total("host") - ledger.total("device")
                assert ledger.total("device") <= cap <= profile.ram_bytes - host
        finally:
            opened.close()


@pytest.mark.merge
def test_the_command_line_trains_on_it(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", Setting(), memory={"device": "auto"})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    done = subprocess.run(
        [sys.executable, "-m", "testkit.host_gpu", "train", str(path)],
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hostgpu:0" in done.stdout + done.stderr
