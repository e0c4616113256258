"""The short laws: a device that keeps them passes, and each way to break one is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import compat
from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import Coherent
from megatrain.devices.device import CpuDevice, Device
from megatrain.doctor.gpu_check import laws as module
from megatrain.doctor.gpu_check.findings import Broken
from megatrain.doctor.gpu_check.laws import (
    a_cap_is_kept,
    copies_are_exact,
    equals_resident,
    lanes_equal_reference,
    laws,
    packed_equals_alone,
    tried,
)
from megatrain.doctor.gpu_check.tiny_models import PACKED, TinyModel
from megatrain.doctor.subject import CPU, Subject, find_subject
from megatrain.models import documents as by_document
from megatrain.models.documents import PackedDocuments


class Own(Subject):
    """A subject whose devices the test makes."""

    __slots__ = ("make",)
    make: Callable[[int | None], Device]

    def new_device(self, cap_bytes: int | None = None, **sizes: int) -> Device:
        return self.make(cap_bytes)


def subject_with(make: Callable[[int | None], Device]) -> Subject:
    made = Own(name="broken", place=torch.device("cpu"), device_bytes=0, runtime=None)
    object.__setattr__(made, "make", make)
    return made


class Flipping(CpuDevice):
    """Adds one to the first byte of copies made where `flips` says."""

    def __init__(self, flips: Callable[[], bool] = lambda: True) -> None:
        super().__init__(copying=True)
        self._flips = flips

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        if self._flips():
            target.view(torch.uint8).flatten()[0] += 1


@pytest.mark.merge
def test_a_sound_device_keeps_every_law() -> None:
    said: list[str] = []
    checks = laws(CPU, said.append)
    assert [(check.name, check.found) for check in checks if check.state != "ok"] == []
    assert said == [check.name for check in checks]
    assert {"copied bytes", "llama, fp32", "gemma, tied, bf16", "lanes", "cap"} < set(said)
    assert {"packed llama, bf16", "packed, windows, bf16"} < set(said)


def test_a_byte_that_changes_on_its_way_is_found() -> None:
    with pytest.raises(Broken, match=r"^\d of 5,242,883 bytes came back changed$"):
        copies_are_exact(Flipping(), CPU)


def test_a_wrong_weight_is_found_in_losses_and_gradients() -> None:
    broken = subject_with(lambda cap: Flipping())
    with pytest.raises(Broken, match=r"of 30 gradients differ: model\."):
        equals_resident(broken, TinyModel.make("llama", "fp32"))


def _one_token_late(micro: MicroBatch) -> PackedDocuments:
    bounds = micro.bounds()
    assert bounds is not None
    bounds[1] += 1
    return PackedDocuments(lengths=tuple(bounds.diff().tolist()), bounds=bounds)


@pytest.mark.parametrize("name", PACKED)
def test_documents_that_see_each_other_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatch, "packed_documents", _one_token_late)
    with pytest.raises(Broken, match=r"4 documents by one document after another: at most"):
        packed_equals_alone(CPU, TinyModel.make(name, "bf16"))


@pytest.mark.parametrize("wrong_by", [0, 1])
def test_the_kernel_for_documents_is_counted_and_its_window_matters(
    wrong_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is written out in torch: one that sees a token too many is found."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, **options: Any
    ) -> Tensor:
        before, group = options["window_size"][0], query.shape[1] // key.shape[1]
        places = torch.arange(len(query))
        document = torch.bucketize(places, bounds[1:], right=True)
        back = places[:, None] - places
        seen = (back >= 0) & (document[:, None] == document)
        if before >= 0:
            seen &= back <= before + wrong_by
        keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (key, value))
        scores = query.transpose(0, 1) @ keys.mT * options["scale"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output: Tensor = (weights @ values).transpose(0, 1)
        return output

    monkeypatch.setattr(compat, "document_kernel", lambda: kernel)
    monkeypatch.setattr(by_document, "_kernel_takes", lambda *given: True)
    tiny = TinyModel.make("packed, windows", "bf16")
    check = tried("packed", lambda: packed_equals_alone(CPU, tiny))
    assert "by one kernel, 9 calls" in check.found
    assert check.state == ("wrong" if wrong_by else "ok"), check.found
    assert compat.document_kernel() is kernel


def test_lanes_that_differ_from_one_op_at_a_time_are_found() -> None:
    def in_a_lane() -> bool:
        return threading.current_thread() is not threading.main_thread()

    broken = subject_with(lambda cap: Flipping(in_a_lane))
    with pytest.raises(Broken, match=r"^losses and norms .* parts of the store differ$"):
        lanes_equal_reference(broken)


def test_a_cap_that_outlives_its_device_is_found() -> None:
    caps: list[int] = []

    def make(cap: int | None) -> Device:
        caps.extend([] if cap is None else [cap])
        return CpuDevice(copying=True, cap_bytes=caps[-1])

    with pytest.raises(Broken, match="outlived its device: device memory: without a cap needs"):
        a_cap_is_kept(subject_with(make))


def test_after_a_device_may_be_lost_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> str:
        raise RuntimeError("device error: an illegal memory access, in /home/ada/train.py")

    monkeypatch.setattr(module, "copies_are_exact", lost)
    first, *others = laws(CPU, lambda what: None)
    assert first.state == "wrong"
    assert first.exit_code == 5
    assert first.found == "RuntimeError: device error: an illegal memory access, in (path)"
    assert {check.state for check in others} == {"left out"}


@pytest.mark.hostgpu
@pytest.mark.merge
@pytest.mark.parametrize("reads", [True, False])
def test_in_one_memory_weights_are_read_in_place_as_well(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sibling: a device that reads something else."""
    pytest.importorskip("testkit.host_gpu", exc_type=ImportError)
    from testkit.host_gpu import control

    in_place = Coherent.in_place
    if not reads:
        monkeypatch.setattr(Coherent, "in_place", lambda *given: in_place(*given) + 1)
    with control.integrated():
        found = module._laws(find_subject("hostgpu:1"))
        law = found["llama, bf16, in place"]
        assert tried("in place", law).state == ("ok" if reads else "wrong")
    assert "llama, bf16, in place" not in module._laws(find_subject("hostgpu:1"))
