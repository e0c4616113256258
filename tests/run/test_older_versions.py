"""Runs that an older version left behind: resumed, evaluated, sampled, exported, reported.

`.ci/older_runs.py` made the archives in tests/run/older with that version, and recorded what it
made of them itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatrain.cli.checkpoint_verbs import verify_checkpoints
from megatrain.cli.exporting import export_model
from megatrain.cli.verbs import evaluate_model, report_on, sample_from, train_from
from megatrain.disk.checkpoint.manifest import read_manifest, signed
from megatrain.errors import CheckpointMismatch, ModelFolderError
from megatrain.optim.states import M
from megatrain.run.opening import opening
from megatrain.run.opening.pin_commits import read_config
from megatrain.run.trainer import Trainer
from testkit.tiers import forced_tier
from testkit.warm_python import warm_python

HERE = Path(__file__).parent
ARCHIVES = sorted((HERE / "older").glob("*/*.tar.xz"))
REGROUPED = ("0.1.0-packed", "0.1.0-defaults")
"""Packed runs of 0.1 have the documents of each step as before, in other micro-batches."""
RANKS = ("0.2.0-ranks", "0.3.0-ranks")
"""Trained by two ranks, whose sums are added in their order."""
OTHER_BF16 = {
    "0.2.0-defaults": "049537b27bcf10887755b1bbc4e40fd7ef4baa4f3da4bed9d138ad7843c571b0",
}
"""The bf16 digest of a processor on which 0.2.0 itself does not repeat the bits of its archive."""
FP32_CLOSE, BF16_CLOSE = 1e-4, 5e-2
"""Relative, of losses: sums in another order, amplified by the steps after them."""


def _named(path: Path) -> str:
    return f"{path.parent.name}-{path.name.partition('.')[0]}"


EXACT = [path for path in ARCHIVES if _named(path) not in (*REGROUPED, *RANKS)]
ADAPTERS = [path for path in ARCHIVES if path.name == "adapters.tar.xz"]
"""They know the place of their model, which is another where an archive is unpacked."""
MOVED = [path for path in ARCHIVES if path not in ADAPTERS]


def _maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "older_runs", HERE.parents[1] / ".ci" / "older_runs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The archives were made so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the archives are relative."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def _unpacked(archive: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Unpack an archive, go to its folder, and return what its version made of it."""
    with tarfile.open(archive) as opened:
        opened.extractall(filter="data")
    monkeypatch.chdir(archive.name.partition(".")[0])
    made: dict[str, Any] = json.loads(Path("made.json").read_text())
    return made


def _loss(said: str) -> float:
    (loss,) = re.findall(r"^loss ([\d.]+)", said, re.M)
    return float(loss)


def _weights(made_or_last: dict[str, Any]) -> dict[str, Any]:
    """Return the hashes of all tensors of a checkpoint, by file."""
    return {
        name: record["digests"]
        for name, record in made_or_last["files"].items()
        if name.endswith(".safetensors")
    }


def _pad_rows(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad the rows of a run that is not packed, as 0.1 and 0.2 did; 0.3 lays all rows flat."""
    padded = made["version"] in ("0.1.0", "0.2.0")
    if padded and {"data.packing=false", "loss=dpo"} & set(made["settings"]):
        monkeypatch.setattr(opening, "packs_flat", lambda *_, **__: False)


def _last() -> dict[str, Any]:
    last: dict[str, Any] = json.loads(Path("run/last/manifest.json").read_text())
    return last


def _metrics() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def _losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


pytestmark = [
    pytest.mark.usefixtures("_here"),
    pytest.mark.filterwarnings("ignore:gather_embedding has no effect:FutureWarning"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("archive", MOVED, ids=_named)
def test_a_run_of_an_older_version_is_read(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _unpacked(archive, monkeypatch)
    run = Path("run")
    assert ": complete, step " in verify_checkpoints(run)
    said = evaluate_model(run, Path("rows.jsonl"), None)
    assert _loss(said) == pytest.approx(_loss(made["eval"]), abs=2e-4)
    assert len(sample_from(run, ["1 + 1"], 3)) == 1
    export_model(run, Path("exported"))
    (exported,) = Path("exported").glob("*.safetensors")
    assert hashlib.sha256(exported.read_bytes()).hexdigest() == made["exported_sha256"]
    report_on([run], None)
    assert "<!DOCTYPE html>" in Path("run/report.html").read_text()


@pytest.mark.merge
@pytest.mark.parametrize("archive", ADAPTERS, ids=_named)
def test_adapters_whose_model_has_moved_are_read_after_they_were_continued(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _unpacked(archive, monkeypatch)
    run = Path("run")
    assert ": complete, step " in verify_checkpoints(run)
    expected = "its base model cannot be found.* continue the run with its new place as `model`"
    with pytest.raises(ModelFolderError, match=expected):
        evaluate_model(run, Path("rows.jsonl"), None)
    train_from(read_config(Path("run.yaml"), ["save.dir=run", *made["settings"]]), resume=True)
    assert "loss " in evaluate_model(run, Path("rows.jsonl"), None)
    export_model(run, Path("exported"))
    assert Path("exported/adapter_model.safetensors").exists()
    report_on([run], None)


@pytest.mark.merge
@pytest.mark.parametrize("archive", EXACT, ids=_named)
def test_it_ends_in_the_bits_that_its_version_gives(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows padded as that version pads them; rows that are laid flat differ in last bits."""
    made = _unpacked(archive, monkeypatch)
    _pad_rows(made, monkeypatch)
    train_from(read_config(Path("run/config.yaml"), []), resume=True)
    losses, expected = _losses(_metrics()), _losses(made["metrics"])
    if not _rounds_alike(archive, made):
        assert losses == pytest.approx(expected, rel=BF16_CLOSE)
        pytest.skip("this processor rounds differently from the one that made the archives")
    assert _weights(_last()) == _weights(made["manifest"])
    assert losses == expected


def _rounds_alike(archive: Path, made: dict[str, Any]) -> bool:
    """Return whether this processor rounds as the one that made the archive."""
    digest = _maker().plain_digest
    if digest(Path("model")) != made["plain_digest"]:
        return False
    if read_config(Path("run/config.yaml"), []).model.dtype != "bf16":
        return True
    here = digest(Path("model"), torch.bfloat16)
    if here == OTHER_BF16.get(_named(archive)):
        return False
    return bool(here == made.get("bf16_digest", here))


@pytest.mark.merge
@pytest.mark.parametrize("archive", ARCHIVES, ids=_named)
def test_a_run_keeps_its_steps(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file that the user has, in which a default may have changed since."""
    made = _unpacked(archive, monkeypatch)
    words = ["save.dir=run", *made["settings"]]
    if made.get("ranks", 1) == 1:
        train_from(read_config(Path("run.yaml"), words), resume=True)
    else:
        program = [*warm_python().command, "-m", "megatrain", "train", "run.yaml", *words]
        subprocess.run([*program, "--resume", "--gpus", str(made["ranks"])], check=True)
    _compare_steps(made)


@pytest.mark.merge
@pytest.mark.parametrize("name", RANKS)
def test_a_run_of_two_ranks_is_resumed_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (archive,) = (path for path in ARCHIVES if _named(path) == name)
    made = _unpacked(archive, monkeypatch)
    train_from(read_config(Path("run/config.yaml"), []), resume=True)
    _compare_steps(made)


@pytest.mark.merge
@pytest.mark.parametrize("name", ["0.2.0-disk", "0.3.0-disk"])
def test_a_run_on_a_disk_continues_on_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan would leave the disk out here, as it does in the tests above."""
    (archive,) = (path for path in ARCHIVES if _named(path) == name)
    made = _unpacked(archive, monkeypatch)
    with forced_tier("states"):
        train_from(read_config(Path("run/config.yaml"), []), resume=True)
    _compare_steps(made)


def _compare_steps(made: dict[str, Any]) -> None:
    """Compare the lines of a run with those of one that its own version did not stop."""
    found = _metrics()
    close = FP32_CLOSE if "model.dtype=fp32" in made["settings"] else BF16_CLOSE
    assert len(found) == len(made["metrics"])
    for now, then in zip(found, made["metrics"], strict=True):
        for key in ("step", "num_tokens", "learning_rate"):
            assert now.get(key) == then.get(key), key
        for key in ("loss", "eval_loss"):
            if key in then:
                assert now[key] == pytest.approx(then[key], rel=close)


@pytest.mark.merge
def test_moments_that_are_lost_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _unpacked(EXACT[0], monkeypatch)
    _pad_rows(made, monkeypatch)
    take_up = Trainer._take_up

    def forgetful(self: Trainer, resumed: Any) -> None:
        take_up(self, resumed)
        for name, place in self.home.store.layout.places.items():
            if place.has(M):
                self.home.store.param(name, M).zero_()

    monkeypatch.setattr(Trainer, "_take_up", forgetful)
    train_from(read_config(Path("run/config.yaml"), []), resume=True)
    assert _weights(_last()) != _weights(made["manifest"])


def test_a_format_of_the_future_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _unpacked(ARCHIVES[0], monkeypatch)
    (path,) = Path("run/checkpoints").glob("step-*/manifest.json")
    fields = json.loads(path.read_text())
    del fields["sha256"]
    assert read_manifest(path.parent).step == fields["step"]
    path.write_bytes(signed(json.dumps(fields | {"schema": 2}, indent=1).encode()))
    expected = r"newer version of MegaTrain \(format 2; this one reads 1\)\. Use that version"
    with pytest.raises(CheckpointMismatch, match=expected):
        train_from(read_config(Path("run/config.yaml"), []), resume=True)
    with pytest.raises(CheckpointMismatch, match=expected):
        verify_checkpoints(Path("run"))
