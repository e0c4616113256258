"""The benchmark runs from end to end, and its figures hang together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from megatrain.step.ops import LIMITS
from tests.gpu.rigs import RealRig, Rig

TINY = """
--layers 3 --hidden 32 --heads 2 --vocabulary 64 --tokens 36 --micro 2 --length 8 --steps 1
--copy-mib 1 --threads 1 --json
""".split()  # noqa: SIM905


def figures_of(device: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    gpu.main([*TINY, "--device", device, *more])
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def check(figures: dict[str, Any]) -> None:
    lanes = {name: figures[f"{name}_s"] for name in ("compute", "in", "out", "host")}
    assert min(lanes.values()) > 0
    assert figures["bound_s"] == max(lanes.values()) == lanes[figures["bound_by"]]
    assert figures["tokens_per_step"] == 32, "whole rows: 36 are asked for"
    # Each is rounded to four digits.
    assert figures["tokens_per_s"] == pytest.approx(32 / figures["step_s"], rel=1e-3)
    share = 100 * figures["bound_s"] / figures["step_s"]
    assert figures["percent_of_bound"] == pytest.approx(share, abs=0.2)
    embedding, layer, head = 64 * 32, 4 * 32 * 32 + 3 * 32 * 128 + 2 * 32, 64 * 32 + 32
    assert figures["params"] == embedding + 3 * layer + head
    # bf16, padding aside; the last two layers are still in their slots at the turn. Inputs of 32
    # tokens, 32 wide.
    tape = 3 * 32 * 32 * 2
    fetched = 2 * (embedding + 4 * layer + head) + tape
    drained = 2 * (embedding + 3 * layer + head) + tape
    # To a device with its own memory the inputs are sent as well: a few tensors for each of two
    # micro-batches, padded.
    inputs = 2 * 10 * 256 if figures["machine"]["device"] != "cpu" else 0
    assert 0.97 * fetched <= figures["bytes_in_per_step"] <= 1.03 * fetched + inputs
    assert figures["bytes_out_per_step"] == pytest.approx(drained, rel=0.03)
    assert figures["peak_device_bytes"] > 2 * layer * 2
    assert figures["copy_gb_per_s"].keys() == {"in", "out", "both"}
    assert figures["machine"]["cores"] > 0
    assert figures["device_busy_s"] > 0
    assert figures["host_paced_s"] >= 0
    assert figures["limited_by"] in LIMITS
    multiplied = 6 * (3 * layer + head) * 32
    mfu = multiplied / figures["step_s"] / figures["gemm_tflop_per_s"] / 1e12
    assert figures["mfu"] == pytest.approx(mfu, rel=2e-3)


@pytest.mark.parametrize("update", ["late", "in_backward"])
def test_it_measures_the_cpu(
    update: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    check(figures_of("cpu", capsys, "--update", update, "--trace", str(trace)))
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"FETCH(1)", "BACKWARD(1,1)", "DRAIN(1)", "UPDATE(1)"} <= names


@pytest.mark.merge
def test_it_measures_an_accelerator(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    device = str(rig.torch_device) if isinstance(rig, RealRig) else "simulated"
    figures = figures_of(device, capsys)
    check(figures)
    assert figures["machine"]["device"] == device


def test_it_says_why_it_cannot() -> None:
    with pytest.raises(SystemExit, match=r"^40 tokens in 2 micro-batches leave none of them a row"):
        gpu.main([*TINY, "--device", "cpu", "--tokens", "40", "--length", "32"])
    with pytest.raises(SystemExit, match=r"^DeviceFull: device memory: weight slots needs "):
        gpu.main([*TINY, "--device", "cpu", "--cap-gib", "1e-5"])
