"""The examination of this machine: whole, kept, and gone from the disk it was made on."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatrain.cli.app import app
from megatrain.devices.pinning import NotPinned
from megatrain.doctor import examine as module
from megatrain.doctor import trial_steps
from megatrain.doctor.examine import (
    QUICK_STAGES,
    STAGES,
    examine,
    keep,
)
from megatrain.doctor.rates import Bench, CopyRates
from megatrain.errors import DoesNotFit
from megatrain.planning.machine.examination import kept_examination


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PARAMS", 1 << 16)
    monkeypatch.setattr(module, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(module, "DISK_BYTES", 32 << 20)
    monkeypatch.setattr(module, "NEEDED_BYTES", 1 << 20)
    monkeypatch.setattr(module, "shapes_for", lambda own_memory: iter([(32, 64), (16, 32)]))
    monkeypatch.setattr(module, "elementwise_rate", lambda bench: 1e9)
    monkeypatch.setattr(module, "_dram_rate", lambda kernel, num_threads: 1e10)
    monkeypatch.setattr(Bench, "seconds", _quick)
    monkeypatch.setattr(module, "SHAPES", ((64, 16), (64, 32)))
    monkeypatch.setattr(module, "QUICK_SHAPES", ((64, 16),))
    monkeypatch.setattr(trial_steps, "TRIAL_VOCABULARY", 128)


def _quick(bench: Bench, work: object) -> float:
    return max(bench._timed(work), 1e-9)  # type: ignore[arg-type]


def test_it_is_whole_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    said: list[str] = []
    found = examine(folder, said.append)
    assert kept_examination() is None
    keep(found)
    assert kept_examination() == found
    assert found.profile.source == "measured"
    assert found.profile.unified
    assert [point[:2] for point in found.profile.forward_flops] == [(64, 16), (64, 32)]
    assert found.profile.disk_read_bytes_per_s > 0
    assert said == [
        "copies", "products", "attention and element-wise work", "optimizer and memory traffic",
        "trial steps", f"disk, in {folder}",
    ]  # fmt: skip
    assert [each.partition(", in ")[0] for each in said] == list(STAGES)
    assert list(folder.iterdir()) == []


def test_a_doctor_that_is_stopped_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_with_disk", stop)
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 130
    assert "not measured yet: `megatrain doctor` does" in done.stdout
    assert "stopped: plans use what was measured so far" in done.stderr
    kept = kept_examination()
    assert kept is not None
    assert (kept.folder, kept.profile.source) == ("", "measured")
    whole = replace(kept, folder="here")
    keep(whole)
    CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert kept_examination() == whole, "a part does not replace the whole"


def test_a_quick_examination_is_rougher_and_replaces_no_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "disk"), "--quick"])
    assert done.exit_code == 0, done.stderr
    quick = kept_examination()
    assert quick is not None
    assert (quick.folder, len(quick.profile.forward_flops)) == ("", 1)
    assert [line.split(" (")[0] for line in done.stderr.splitlines()] == [
        f"measuring {stage}" for stage in QUICK_STAGES
    ]
    assert not (tmp_path / "disk").exists()
    CliRunner().invoke(app, ["doctor", str(tmp_path / "disk")])
    whole = kept_examination()
    assert whole is not None
    assert len(whole.profile.forward_flops) == 2
    again = CliRunner().invoke(app, ["doctor", "--quick"])
    assert "not kept: the whole examination" in again.stderr
    assert kept_examination() == whole


@pytest.mark.parametrize("pins", [True, False])
def test_whether_memory_can_be_pinned_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    def rates(device: object, **_: object) -> CopyRates:
        warnings.warn("host memory", UserWarning if pins else NotPinned, stacklevel=1)
        return CopyRates(into=1e9, out=1e9, duplex_share=1.0)

    monkeypatch.setattr(module, "copy_rates", rates)
    profile = examine(tmp_path, lambda what: None).profile
    assert (profile.pinned_bytes == 0) is pins


def test_too_little_memory_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(DoesNotFit, match=r"the measurements need 1073741824\.0 GiB, .* are free"):
        examine(tmp_path, lambda what: None)
    assert kept_examination() is None


def test_a_disk_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_read_seconds", fail)
    with pytest.raises(KeyboardInterrupt):
        examine(tmp_path / "disk", lambda what: None)
    assert list((tmp_path / "disk").iterdir()) == []
