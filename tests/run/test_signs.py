"""Laws of signs.py."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.errors import DiskError, Interrupted, RankLost
from megatrain.lanes.trace import Span
from megatrain.run import signs as module
from megatrain.run.folder import RunFolder
from megatrain.run.signs import HEARTBEAT, PROMETHEUS, Signs, lanes_drawn
from megatrain.step.ops import Op, OpKind
from testkit.patience import HANG_S, eventually
from testkit.runs import Setting, config_of, lines_of, run

STEP = {
    "step": 3, "loss": float("nan"), "grad_norm": None, "learning_rate": 1e-5, "seconds": 2.5,
    "tokens_per_s": 100.0, "split": {"compute": 2.0, "data": 0.5}, "total_tokens": 750,
    "spike": "loss",
}  # fmt: skip
SAMPLE = re.compile(r'megatrain_(\w+)\{run="[^"]*"(?:,part="(\w+)")?\} (\S+)')


def watched(path: Path, error: BaseException | None = None, **log: str) -> list[str]:
    """Write signs of a run of some lines that ends as told; return what was said."""
    said: list[str] = []
    config = Config.model_validate({"model": "m", "data": "d", "log": log})
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with RunFolder(path) as folder, expected, Signs(config, folder, said.append, 9):
        folder.append("metrics.jsonl", STEP)
        folder.append("metrics.jsonl", {"step": 3, "eval_loss": 1.5})
        folder.append("events.jsonl", {"event": "save failed", "step": 2, "error": "x"})
        folder.append("events.jsonl", {"event": "saved", "step": 3})
        if error is not None:
            raise error
    return said


def samples(path: Path) -> dict[tuple[str, str], str]:
    text = (path / PROMETHEUS).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    found = [SAMPLE.fullmatch(line) for line in lines]
    assert all(found), text
    return {(match[1], match[2] or ""): match[3] for match in found if match is not None}


def test_both_files_have_the_last_figures(tmp_path: Path) -> None:
    assert watched(tmp_path / "run") == []
    beat = json.loads((tmp_path / "run" / HEARTBEAT).read_text())
    expected = {"state": "ended", "step": 3, "num_steps": 9, "saved_step": 3}
    assert {name: beat[name] for name in expected} == expected
    found = samples(tmp_path / "run")
    figures = {
        "running": "0", "step": "3", "steps": "9", "loss": "NaN", "eval_loss": "1.5",
        "learning_rate": "1e-05", "step_seconds": "2.5", "tokens_per_second": "100.0",
        "tokens_total": "750", "saved_step": "3", "failed_saves_total": "1", "spikes_total": "1",
    }  # fmt: skip
    assert {name: found[name, ""] for name in figures} == figures
    assert found["step_part_seconds", "compute"] == "2.0"
    assert ("gradient_norm", "") not in found


@pytest.mark.parametrize("resumed", [None, 4])
def test_what_never_comes_is_seen_to_be_late(tmp_path: Path, resumed: int | None) -> None:
    """A run that is stuck before its first step, or whose first save never succeeds, is found."""
    config = Config.model_validate({"model": "m", "data": "d"})
    with (
        RunFolder(tmp_path / "run") as folder,
        Signs(config, folder, print, 9, step=resumed or 0, saved_step=resumed),
    ):
        pass
    beat = json.loads((tmp_path / "run" / HEARTBEAT).read_text())
    assert (beat["step"], beat["saved_step"], beat["step_time"]) == (resumed or 0, resumed, None)
    found = samples(tmp_path / "run")
    assert found["step", ""] == str(resumed or 0)
    assert found.get(("saved_step", "")) == (None if resumed is None else str(resumed))
    began = {float(found[f"{name}_timestamp_seconds", ""]) for name in ("step", "saved")}
    assert len(began) == 1
    assert 0 <= beat["time"] - began.pop() < HANG_S


def test_each_metric_has_one_type_and_no_sample_has_a_time(tmp_path: Path) -> None:
    """node_exporter refuses a file with either."""
    watched(tmp_path / "run")
    text = (tmp_path / "run" / PROMETHEUS).read_text()
    types = re.findall(r"^# TYPE (\w+) (?:gauge|counter)$", text, re.MULTILINE)
    assert len(types) == len(set(types)) == len(re.findall("^# HELP", text, re.MULTILINE))
    assert {f"megatrain_{name}" for name, _ in samples(tmp_path / "run")} == set(types)
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("error", "state"),
    [(RankLost("x"), "failed"), (Interrupted("x"), "interrupted"), (None, "ended")],
)
def test_the_last_state_is_that_of_the_end(
    error: BaseException | None, state: str, tmp_path: Path
) -> None:
    watched(tmp_path / "run", error)
    assert json.loads((tmp_path / "run" / HEARTBEAT).read_text())["state"] == state


def test_a_lost_rank_and_a_spike_call_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f'echo "$MEGATRAIN_TEXT" >> {out}'
    assert watched(tmp_path / "run", RankLost("rank 3 is lost"), on_trouble=command) == []
    spike, lost = out.read_text().splitlines()
    assert spike.endswith("spike: step 3: loss")
    assert lost.endswith("rank lost: step 3: rank 3 is lost")


def test_signs_come_while_a_step_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    config = Config.model_validate({"model": "m", "data": "d"})

    def beat() -> dict[str, Any]:
        path = tmp_path / "run" / HEARTBEAT
        return dict(json.loads(path.read_text())) if path.exists() else {}

    with RunFolder(tmp_path / "run") as folder, Signs(config, folder, print, 9):
        assert eventually(lambda: beat().get("state") == "training")
        first = beat()["time"]
        assert eventually(lambda: beat()["time"] > first)


@pytest.mark.merge
@pytest.mark.usefixtures("cache_in_world")
def test_a_run_whose_disk_refuses_them_has_the_same_lines(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(save_every=None, eval_every=None)
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    assert run(config_of(world, tmp_path / "with", setting)) is not None
    beat = json.loads((tmp_path / "with" / HEARTBEAT).read_text())
    assert "compute" in beat["lanes"]
    assert {len(drawn) for drawn in beat["lanes"].values()} == {60}

    def refuse(folder: RunFolder, name: str, text: str) -> None:
        if name in (HEARTBEAT, PROMETHEUS):
            raise DiskError("cannot write")
        write(folder, name, text)

    write = RunFolder.write
    monkeypatch.setattr(RunFolder, "write", refuse)
    assert run(config_of(world, tmp_path / "without", setting)) is not None
    assert not (tmp_path / "without" / HEARTBEAT).exists()
    assert lines_of(tmp_path / "with") == lines_of(tmp_path / "without")


def test_lanes_are_as_busy_as_their_ops() -> None:
    op = Op(kind=OpKind.FORWARD, block=1, micro=0)
    spans = [
        Span(1, "compute", op, 0, 100),
        Span(1, "fetch", op, 25, 50),
        Span(1, "fetch", op, 50, 100, awaited=op),
    ]
    assert lanes_drawn(spans, 4) == {"compute": "9999", "fetch": "0900"}
    assert lanes_drawn([*spans, Span(1, "drain", op, 10, 15)], 4)["drain"] == "2000"
    assert lanes_drawn([]) == {}
