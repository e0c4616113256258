"""The first steps of a run correct the rates of its machine, and say what was predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.cli.demo import write_demo
from megatrain.config import load_config
from megatrain.doctor import examine
from megatrain.planning.machine.examination import Examination, kept_examination
from megatrain.planning.machine.facts import host_facts
from megatrain.planning.machine.profile import unmeasured
from megatrain.report.page import render
from megatrain.report.run import read_run
from megatrain.run.first_steps import watched_steps
from megatrain.run.trainer import Trainer


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny run on a processor that is believed to be a thousand times as fast as any."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    profile = unmeasured(ram_bytes=1 << 36, base_bytes=0).changed(
        source="measured", cores=2, compute_cores=1.0, device_bytes_per_s=1e13, op_overhead_s=1e-6
    )
    profile = profile.changed(
        forward_flops=[one._replace(flops=1e15) for one in profile.forward_flops]
    )
    examine.keep(
        Examination(
            facts=host_facts(), profile=profile, kernel="native", folder="", when="", seconds=1.0
        )
    )
    return write_demo(tmp_path / "demo", num_steps=11)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing else be going on, whatever is."""
    monkeypatch.setattr("megatrain.doctor.refine.disturbed", lambda steps: "")


def trained(path: Path, name: str) -> tuple[Path, float]:
    """Train; return the run's folder, and what was predicted of a step over what was measured."""
    quiet = ["save.every=null", "eval.samples=0", "eval.every=null", "data.eval=null"]
    config = load_config(path, [*quiet, f"save.dir={path.parent / name}"])
    with Trainer(config) as trainer:
        trainer.train()
    plan = json.loads((path.parent / name / "plan.json").read_text())
    return path.parent / name, plan["predicted"]["step_s"] / plan["measured_step_s"]


@pytest.mark.merge
def test_a_run_on_a_busy_machine_corrects_nothing_and_says_so(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e3, 1e3, 1e3))
    before = kept_examination()
    folder, _ = trained(demo, "first")
    said = capsys.readouterr()
    text = said.out + said.err
    assert "not saving the measurements of these steps: the machine is busy, " in text
    assert "predicted in parentheses" not in text
    assert not re.search(r"a step: .* measured, ", text), "nor compared at the end"
    assert "ops" not in json.loads((folder / "plan.json").read_text())
    assert kept_examination() == before


@pytest.mark.merge
@pytest.mark.usefixtures("quiet")
def test_a_run_corrects_its_machine_and_the_next_plan_is_nearer(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = trained(demo, "first")
    said = capsys.readouterr()
    text = said.out + said.err
    assert "(predicted in parentheses): step" in text
    assert "kept for the next plan: " in text
    kept = kept_examination()
    assert kept is not None
    assert kept.origins["forward_flops"] == "a run of model"
    ops = json.loads((folder / "plan.json").read_text())["ops"]
    assert {"forward", "backward", "head", "update"} <= {op["op"] for op in ops}
    assert "Ops of a step" in render([read_run(folder, "first")])
    _, after = trained(demo, "second")
    assert before < 0.2
    assert before < after < 5
    assert abs(after - 1) < abs(before - 1)


def opening(**changes: Any) -> Any:
    facts = {"knows_time": True, "fits": True, "is_alone": True} | changes
    return SimpleNamespace(
        plan=SimpleNamespace(knows_time=facts["knows_time"], fits=facts["fits"]),
        ranks=SimpleNamespace(owner=SimpleNamespace(is_alone=facts["is_alone"])),
    )


def test_only_a_run_alone_with_a_prediction_is_watched() -> None:
    assert watched_steps(opening()) is not None
    for name in ("knows_time", "fits", "is_alone"):
        assert watched_steps(opening(**{name: False})) is None
