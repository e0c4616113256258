"""What a first run on a GPU would find is found without one."""

from __future__ import annotations

import pytest

from testkit.cases import at_a_push

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from proofs.device_faults import FAULTS, SCENES, Fault, Scene, found_in, found_of

pytestmark = pytest.mark.hostgpu


@pytest.mark.parametrize("scene", SCENES)
def test_sound_code_has_no_fault(scene: Scene) -> None:
    assert found_in(scene) == []


@pytest.mark.parametrize("fault", at_a_push(FAULTS, 6), ids=str)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    assert found_of(fault)


def test_every_scene_finds_a_fault() -> None:
    assert {fault.scene for fault in FAULTS} == set(SCENES)
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) > 12
