"""A timed step: its bytes are those of the model, and a slow way in is its bound."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.timed_step import TimedModel, TimedStep, time_step
from megatrain.devices.device import CpuDevice, Device
from megatrain.doctor.rates import CopyRates
from megatrain.doctor.subject import CPU, Subject
from megatrain.step.settings import StepSettings

MODEL = TimedModel(
    layers=4, hidden=32, intermediate=128, heads=2, kv_heads=1, vocabulary=64, length=8, rows=1,
    num_micro=2,
)  # fmt: skip
LAYER_BYTES = 2 * (3 * 32 * 32 + 3 * 32 * 128 + 2 * 32)
SLOW_S = 0.02


class SlowIn(CpuDevice):
    """A link on which nothing crosses faster than in SLOW_S."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        time.sleep(SLOW_S)
        super().copy(target, source)


class SlowSubject(Subject):
    def new_device(self, cap_bytes: int | None = None, **sizes: int) -> Device:
        return SlowIn(copying=True)


def timed(subject: Subject) -> TimedStep:
    settings = StepSettings(micro_batch_tokens=8, tape="host")
    return time_step(subject, MODEL, settings, num_steps=1, num_threads=1)


def test_its_bytes_are_those_of_blocks_and_tape() -> None:
    found = timed(CPU)
    edges, tape = 2 * (2 * 64 * 32 + 32), 4 * 16 * 32 * 2
    assert found.num_params == 4 * LAYER_BYTES // 2 + edges // 2
    # The last two layers are still in their slots at the turn.
    assert found.bytes_in == pytest.approx(edges + 6 * LAYER_BYTES + tape, rel=0.03)
    assert found.bytes_out == pytest.approx(edges + 4 * LAYER_BYTES + tape, rel=0.03)
    assert found.num_tokens == 16


def test_a_slow_way_in_is_the_bound() -> None:
    slow = SlowSubject(name="slow", place=torch.device("cpu"), device_bytes=0, runtime=None)
    found = timed(slow)
    fetches = 2 + 6  # edges and layers, at the least: inputs from the tape come on top
    assert found.step_s >= fetches * SLOW_S
    copies = CopyRates(into=found.bytes_in / 7, out=1e12, duplex_share=1.0)
    assert replace(found, compute_s=3.0, host_s=2.0).lanes_s(copies) == {
        "compute": 3.0, "in": pytest.approx(7.0), "out": pytest.approx(0, abs=1e-3), "host": 2.0,
    }  # fmt: skip
